package tunnel

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// Receiving:
//
//  1. ReadBatch gives out what is left of the last messages; if nothing is, fill
//     asks the kernel for the next ones with one recvmmsg.
//  2. Before it does, it yields: a burst that was just given out would overflow
//     quic-go's queue of 256 packets if the connection did not get to run.
//  3. Each message is up to 64 KB of packets of one size from one source, all
//     with the same control messages (the kernel merges no others).

const (
	// groMessages is how many merged messages one call takes, and plainMessages
	// how many single packets where the kernel merges none.
	groMessages, plainMessages = 4, 8
	// plainBuffer holds any packet that quic-go can use.
	plainBuffer = 2048
	// receiveControl holds the messages for UDP_GRO, and for ECN and packet info
	// of both IP versions at once.
	receiveControl = 256
)

// receiver is the receiving side of a socket. It belongs to the reader.
type receiver struct {
	recv  func(fd uintptr) bool // recvmmsg into msgs
	errno syscall.Errno         // that recv ended with
	n     int                   // messages that it got
	msgs  []unix.Mmsghdr
	iovs  []unix.Iovec
	names []unix.RawSockaddrInet6
	bufs  [][]byte
	oobs  [][]byte

	next  int    // the message after the current one
	rest  []byte // what is left of the current one
	seg   int    // the size of its packets
	oob   []byte // its control messages, without UDP_GRO
	addr  *net.UDPAddr
	addrs addrCache
}

func (r *receiver) init(gro bool) {
	n, size := plainMessages, plainBuffer
	if gro {
		n, size = groMessages, 1<<16
	}
	r.msgs = make([]unix.Mmsghdr, n)
	r.iovs = make([]unix.Iovec, n)
	r.names = make([]unix.RawSockaddrInet6, n)
	for i := range n {
		r.bufs = append(r.bufs, make([]byte, size))
		r.oobs = append(r.oobs, make([]byte, receiveControl))
		r.iovs[i].Base = &r.bufs[i][0]
		r.iovs[i].SetLen(size)
		h := &r.msgs[i].Hdr
		h.Name = (*byte)(unsafe.Pointer(&r.names[i]))
		h.Iov = &r.iovs[i]
		h.SetIovlen(1)
		h.Control = &r.oobs[i][0]
	}
	r.recv = func(fd uintptr) bool {
		for {
			n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&r.msgs[0])),
				uintptr(len(r.msgs)), unix.MSG_DONTWAIT, 0, 0)
			switch errno {
			case unix.EINTR:
				continue
			case unix.EAGAIN:
				return false
			case 0:
				r.n = int(n)
			}
			r.errno = errno
			return true
		}
	}
}

// ReadBatch waits for packets and fills as many of ms as there are. The flags
// are not looked at.
func (s *socket) ReadBatch(ms []ipv4.Message, _ int) (int, error) {
	r := &s.rx
	for {
		n := 0
		for n < len(ms) {
			p := r.packet()
			if p == nil {
				break
			}
			s.counts.segments.Add(1)
			m := &ms[n]
			if len(p) > len(m.Buffers[0]) {
				s.counts.oversize.Add(1)
				continue
			}
			m.N, m.NN, m.Flags, m.Addr = copy(m.Buffers[0], p), 0, 0, r.addr
			if len(r.oob) <= len(m.OOB) {
				m.NN = copy(m.OOB, r.oob)
			}
			n++
		}
		if n > 0 || len(ms) == 0 {
			return n, nil
		}
		if err := s.fill(); err != nil {
			return 0, err
		}
	}
}

// ReadMsgUDP reads one packet. As everywhere, IPv4 addresses have 4 bytes.
func (s *socket) ReadMsgUDP(b, oob []byte) (n, oobn, flags int, addr *net.UDPAddr, err error) {
	ms := []ipv4.Message{{Buffers: [][]byte{b}, OOB: oob}}
	if _, err := s.ReadBatch(ms, 0); err != nil {
		return 0, 0, 0, nil, err
	}
	return ms[0].N, ms[0].NN, 0, ms[0].Addr.(*net.UDPAddr), nil
}

// ReadFrom reads one packet.
func (s *socket) ReadFrom(b []byte) (int, net.Addr, error) {
	n, _, _, addr, err := s.ReadMsgUDP(b, nil)
	if err != nil {
		return 0, nil, err
	}
	return n, addr, nil
}

// packet returns the next packet that is here; nil if none is.
func (r *receiver) packet() []byte {
	for len(r.rest) == 0 { // a message may be empty
		if r.next == r.n {
			return nil
		}
		r.load(r.next)
		r.next++
	}
	p := r.rest[:min(r.seg, len(r.rest))]
	r.rest = r.rest[len(p):]
	return p
}

// load makes message i the current one.
func (r *receiver) load(i int) {
	m := &r.msgs[i]
	r.rest = r.bufs[i][:m.Len]
	r.seg = len(r.rest)
	all := r.oobs[i][:m.Hdr.Controllen]
	r.oob = all[:0]
	controlMessages(all, func(level, typ int32, data, whole []byte) {
		if level == unix.IPPROTO_UDP && typ == unix.UDP_GRO && len(data) >= 4 {
			r.seg = int(binary.NativeEndian.Uint32(data))
			return
		}
		r.oob = append(r.oob, whole...) // in place: it moves down, if at all
	})
	if r.seg <= 0 {
		r.seg = len(r.rest)
	}
	r.addr = r.addrs.get(&r.names[i])
}

// fill waits for the next messages. Whatever the network reports, it goes on
// until the socket closes or a deadline passes.
func (s *socket) fill() error {
	r := &s.rx
	for failures := 0; ; failures++ {
		r.n, r.next, r.errno = 0, 0, 0
		for i := range r.msgs {
			h := &r.msgs[i].Hdr
			h.Namelen = unix.SizeofSockaddrInet6
			h.SetControllen(receiveControl)
		}
		runtime.Gosched()
		err := s.raw.Read(r.recv)
		switch {
		case err == nil && r.errno == 0:
			s.counts.receives.Add(1)
			return nil
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return err
		}
		switch r.errno {
		case unix.EBADF, unix.ENOTSOCK, unix.EFAULT, unix.EINVAL, unix.ENOSYS, unix.EPERM:
			return &net.OpError{Op: "read", Net: "udp", Source: s.LocalAddr(), Err: os.NewSyscallError("recvmmsg", r.errno)}
		}
		// The kernel reports an ICMP error instead of messages. While the send
		// buffer is full, package net refuses to wait at all until that is read.
		s.report(s.drainErrors())
		if failures >= 10 {
			time.Sleep(time.Millisecond)
		}
	}
}

// addrCache keeps the addresses of the peers that were heard last. quic-go keeps
// what it is given, so an address is made once and never changed.
type addrCache [256]struct {
	raw  unix.RawSockaddrInet6
	addr *net.UDPAddr
}

func (c *addrCache) get(raw *unix.RawSockaddrInet6) *net.UDPAddr {
	// Whichever of the two it is, the port and the last bytes of the address are in
	// these.
	b := (*[unix.SizeofSockaddrInet6]byte)(unsafe.Pointer(raw))
	h := binary.NativeEndian.Uint32(b[0:]) ^ binary.NativeEndian.Uint32(b[4:])*31 ^
		binary.NativeEndian.Uint32(b[16:])*37 ^ binary.NativeEndian.Uint32(b[20:])
	e := &c[h*0x9e3779b1>>24]
	if e.addr == nil || e.raw != *raw {
		e.raw, e.addr = *raw, udpAddr(raw)
	}
	return e.addr
}

// udpAddr converts an address of either IP version. IPv4 addresses have 4 bytes,
// also where an IPv6 socket received them.
func udpAddr(raw *unix.RawSockaddrInet6) *net.UDPAddr {
	if raw.Family == unix.AF_INET {
		raw4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(raw))
		return net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4(raw4.Addr), networkPort(&raw4.Port)))
	}
	ip := netip.AddrFrom16(raw.Addr).Unmap()
	if ip.Is6() && raw.Scope_id != 0 {
		ip = ip.WithZone(zoneName(raw.Scope_id))
	}
	return net.UDPAddrFromAddrPort(netip.AddrPortFrom(ip, networkPort(&raw.Port)))
}

func networkPort(p *uint16) uint16 {
	return binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(p))[:])
}

// zoneName returns the name of an interface as package net does.
func zoneName(index uint32) string {
	if ifi, err := net.InterfaceByIndex(int(index)); err == nil {
		return ifi.Name
	}
	return strconv.Itoa(int(index))
}
