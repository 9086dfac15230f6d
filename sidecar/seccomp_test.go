package sidecar

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data; the arguments are 64 bits, little endian.
const (
	seccompNr   = 0
	seccompArg0 = 16
	seccompArg2 = 32
)

// lackParts has the kernel answer this process as one that was built without
// these parts.
func lackParts(nftables, policyRouting bool) error {
	if nftables {
		// socket(AF_NETLINK, …, NETLINK_NETFILTER)
		if err := seccomp(unix.SYS_SOCKET, unix.EPROTONOSUPPORT, [][2]uint32{{seccompArg0, unix.AF_NETLINK}, {seccompArg2, unix.NETLINK_NETFILTER}}); err != nil {
			return err
		}
	}
	if policyRouting {
		// The message that adds the rule with our mark: the filter sees only its
		// length, which no other has.
		const length = unix.SizeofNlMsghdr + unix.SizeofRtMsg + 4*(unix.SizeofRtAttr+4)
		return seccomp(unix.SYS_SENDTO, unix.EOPNOTSUPP, [][2]uint32{{seccompArg2, length}})
	}
	return nil
}

// seccomp has a system call fail, in all threads, where words of its arguments
// are equal to these.
func seccomp(call uint32, errno unix.Errno, words [][2]uint32) error {
	var filter []unix.SockFilter
	tests := append([][2]uint32{{seccompNr, call}}, words...)
	for i, t := range tests {
		toEnd := uint8(2*(len(tests)-i-1) + 1)
		filter = append(filter,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: t[0]},
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: t[1], Jf: toEnd})
	}
	filter = append(filter,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog))); errno != 0 {
		return fmt.Errorf("install seccomp filter: %w", errno)
	}
	return nil
}
