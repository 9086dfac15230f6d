package userspace

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A socket is one of UDP, or for ICMP echo, that is not connected and hears of ICMP
// errors.
type socket struct {
	file *os.File
	raw  syscall.RawConn
	six  bool
	// single says that UDP_SEGMENT does not work.
	single atomic.Bool
}

// mayPing reports why there are no sockets for ICMP echo.
func mayPing() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	return unix.Close(fd)
}

// open makes the socket for a client's endpoint.
func open(k key) (*socket, error) {
	six, proto := k.from.Addr().Is6(), 0
	if k.proto != packet.UDP {
		proto = int(k.proto)
	}
	fd, err := unix.Socket(family(k.from.Addr()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if six {
		err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1),
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1))
	} else {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1)
	}
	if err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	if k.proto == packet.UDP {
		// Larger where the kernel allows; older kernels do not merge.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<20)
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1)
	}
	s := &socket{file: os.NewFile(uintptr(fd), "client"), six: six}
	if s.raw, err = s.file.SyscallConn(); err != nil {
		s.file.Close()
		return nil, err
	}
	return s, nil
}

func (s *socket) close() { s.file.Close() }

// send sends a datagram, or several of a size, without waiting.
func (s *socket) send(payload []byte, segment int, to netip.AddrPort) error {
	var control []byte
	if segment > 0 && len(payload) > segment {
		var room [32]byte
		control = room[:unix.CmsgSpace(2)]
		h := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
		h.Level, h.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
		h.SetLen(unix.CmsgLen(2))
		binary.NativeEndian.PutUint16(control[unix.CmsgLen(0):], uint16(segment))
	}
	var sent error
	// An error may be an earlier packet's, of which the reader hears too, and there may
	// be several in a row.
	for range 8 {
		err := s.raw.Write(func(fd uintptr) bool {
			_, sent = unix.SendmsgN(int(fd), payload, control, sockaddr(to), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			return true
		})
		if err != nil {
			return err
		}
		if sent == nil {
			break
		}
	}
	return sent
}

// receive waits and hands on what came: a datagram, or several of a size, or errors.
// It returns an error when the socket is closed.
func (s *socket) receive(take func([]byte, int, netip.AddrPort), fail func(syscall.Errno, []byte, netip.AddrPort)) error {
	buf := (*[]byte)(nil)
	defer func() {
		if buf != nil {
			buffers.Put(buf)
		}
	}()
	var control [512]byte
	var n, oobn int
	var from unix.Sockaddr
	var failed error
	err := s.raw.Read(func(fd uintptr) bool {
		if buf == nil {
			buf = buffers.Get().(*[]byte)
		}
		n, oobn, _, from, failed = unix.Recvmsg(int(fd), *buf, control[:], unix.MSG_DONTWAIT)
		if failed == unix.EAGAIN && !hasErrors(fd) {
			buffers.Put(buf) // nobody waits with one
			buf = nil
			return false
		}
		return true
	})
	if err != nil {
		return err
	}
	if failed != nil {
		return s.errors(*buf, control[:], fail)
	}
	segment := 0
	eachControl(control[:oobn], func(level, kind int32, data []byte) {
		if level == unix.IPPROTO_UDP && kind == unix.UDP_GRO && len(data) >= 4 {
			segment = int(binary.NativeEndian.Uint32(data))
		}
	})
	take((*buf)[:n], segment, addrPort(from))
	return nil
}

// hasErrors reports whether there is something in a socket's queue of errors. A call
// that sends may have taken the socket's own error, so that no receiving call fails.
func hasErrors(fd uintptr) bool {
	set := []unix.PollFd{{Fd: int32(fd)}}
	_, err := unix.Poll(set, 0)
	return err == nil && set[0].Revents&unix.POLLERR != 0
}

// errors hands on what is in the socket's queue of errors.
func (s *socket) errors(buf, control []byte, fail func(syscall.Errno, []byte, netip.AddrPort)) error {
	for {
		var n, oobn int
		var to unix.Sockaddr
		var failed error
		if err := s.raw.Control(func(fd uintptr) {
			n, oobn, _, to, failed = unix.Recvmsg(int(fd), buf, control, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		}); err != nil {
			return err
		}
		if failed != nil {
			return nil // the queue is empty
		}
		eachControl(control[:oobn], func(level, kind int32, data []byte) {
			is4 := level == unix.IPPROTO_IP && kind == unix.IP_RECVERR
			is6 := level == unix.IPPROTO_IPV6 && kind == unix.IPV6_RECVERR
			if (is4 || is6) && len(data) >= 4 {
				fail(syscall.Errno(binary.NativeEndian.Uint32(data)), buf[:n], addrPort(to))
			}
		})
	}
}

func eachControl(b []byte, each func(level, kind int32, data []byte)) {
	for len(b) >= unix.CmsgLen(0) {
		h, data, rest, err := unix.ParseOneSocketControlMessage(b)
		if err != nil {
			return
		}
		each(h.Level, h.Type, data)
		b = rest
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// addrPort returns the zero value for what is no address.
func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}
