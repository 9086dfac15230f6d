package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// wantedSocketBuffer is what quic-go wants for either direction.
	wantedSocketBuffer = 7 << 20
	// closeTimeout bounds how long Close waits for room in a full send buffer.
	closeTimeout = 250 * time.Millisecond
)

// A socketConfig says how to open a socket.
type socketConfig struct {
	// Listen is the address to bind. Port zero takes any free one. An invalid
	// address or [::] takes IPv4 and IPv6, 0.0.0.0 takes IPv4 alone.
	Listen netip.AddrPort
	// Mark is the SO_MARK of what is sent; zero sets none.
	Mark uint32
	// DisableGRO and DisableGSO read and send every packet for itself.
	DisableGRO, DisableGSO bool
	// OnTooBig is told that packets to remote are larger than the path carries.
	// mtu is the largest IP packet that it does carry, or zero where the kernel
	// does not say; from a router it may be less than QUIC needs. Packets that only
	// probe for a larger size are reported like all others. It is called from any
	// goroutine, for each refusal that comes to know, and must not block; it may
	// write to the socket. Nil is allowed.
	OnTooBig func(remote netip.AddrPort, mtu int)
}

// A socket is the UDP socket below a quic-go Transport. It reads what the kernel
// merged (UDP_GRO) and gives it to quic-go packet by packet; it merges the
// segments that quic-go sends one after the other into sends of up to 64 KB
// (UDP_SEGMENT); it learns of smaller path MTUs from ICMP; and it outlives every
// fault of the network below: a packet that cannot be sent is a lost packet.
//
// One goroutine reads, any number write.
type socket struct {
	conn     *net.UDPConn
	raw      syscall.RawConn
	onTooBig func(remote netip.AddrPort, mtu int)
	only4    bool // an IPv4 socket, which has no way to IPv6 addresses

	rx                     receiver
	tx                     sender
	errs                   errorQueue
	counts                 socketCounters
	recvBuffer, sendBuffer int

	closeOnce sync.Once
	closeErr  error
	flusher   sync.WaitGroup
}

// listenUDP opens a socket. Its errors say what to do.
func listenUDP(cfg socketConfig) (*socket, error) {
	network, address := listenAddress(cfg.Listen)
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		if cerr := raw.Control(func(fd uintptr) { err = setSocketOptions(int(fd), cfg.Mark) }); cerr != nil {
			return cerr
		}
		return err
	}}
	pc, err := lc.ListenPacket(context.Background(), network, address)
	if err != nil {
		return nil, listenError(err, cfg.Listen)
	}
	conn := pc.(*net.UDPConn)
	s := &socket{conn: conn, onTooBig: cfg.OnTooBig, only4: conn.LocalAddr().(*net.UDPAddr).IP.To4() != nil}
	if s.raw, err = conn.SyscallConn(); err == nil {
		err = s.raw.Control(func(fd uintptr) { s.setUp(int(fd), cfg) })
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up UDP socket %s: %w", conn.LocalAddr(), err), conn.Close())
	}
	s.flusher.Go(s.runFlusher)
	return s, nil
}

// listenAddress returns what to ask package net for. It takes the wildcard
// without an address for both IP versions, and for IPv4 where there is no IPv6.
func listenAddress(a netip.AddrPort) (network, address string) {
	ip := a.Addr().Unmap()
	switch {
	case !ip.IsValid() || ip == netip.IPv6Unspecified():
		return "udp", fmt.Sprintf(":%d", a.Port())
	case ip.Is4():
		return "udp4", netip.AddrPortFrom(ip, a.Port()).String()
	default:
		return "udp6", netip.AddrPortFrom(ip, a.Port()).String()
	}
}

// errMark is the cause where SO_MARK failed.
var errMark = errors.New("set SO_MARK")

func setSocketOptions(fd int, mark uint32) error {
	if mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			return fmt.Errorf("%w to %#x: %w", errMark, mark, err)
		}
	}
	// A socket has the options of the IP versions that it speaks: an IPv4 socket
	// refuses those of IPv6, which leaves the error of the first.
	for _, opt := range []struct{ v4, v6, value int }{
		{unix.IP_RECVERR, unix.IPV6_RECVERR, 1},
		// Never fragment, and let the path's MTU be known to us alone: the kernel
		// shall not refuse a packet because of what an ICMP message claimed.
		{unix.IP_MTU_DISCOVER, unix.IPV6_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE},
	} {
		err4 := unix.SetsockoptInt(fd, unix.IPPROTO_IP, opt.v4, opt.value)
		err6 := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, opt.v6, opt.value)
		if err4 != nil && err6 != nil {
			return fmt.Errorf("ask for path MTU errors: %w", err4)
		}
	}
	return nil
}

func (s *socket) setUp(fd int, cfg socketConfig) {
	s.recvBuffer = raiseBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF)
	s.sendBuffer = raiseBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF)
	gro := !cfg.DisableGRO && unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) == nil
	s.rx.init(gro)
	gso := false
	if !cfg.DisableGSO {
		_, err := unix.GetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT)
		gso = err == nil
	}
	s.tx.init(gso)
	s.errs.init()
}

// raiseBuffer makes a buffer as large as it may be and returns its size, half of
// what the kernel reports, which counts its own overhead.
func raiseBuffer(fd, force, plain int) int {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, wantedSocketBuffer) != nil {
		// Up to net.core.rmem_max or wmem_max; the size that is read back tells.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, plain, wantedSocketBuffer)
	}
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, plain)
	if err != nil {
		return 0
	}
	return n / 2
}

func listenError(err error, listen netip.AddrPort) error {
	what := "listen on UDP " + listen.String()
	if !listen.Addr().IsValid() {
		what = fmt.Sprintf("listen on UDP port %d", listen.Port())
	}
	var hint string
	switch {
	case errors.Is(err, errMark):
		hint = "marking packets needs the capability NET_ADMIN"
	case errors.Is(err, unix.EADDRINUSE):
		hint = fmt.Sprintf("another process uses port %d: stop it, or choose another port with --listen", listen.Port())
	case errors.Is(err, unix.EACCES):
		hint = fmt.Sprintf("port %d needs the capability NET_BIND_SERVICE: grant it, or choose a port from 1024 up with --listen", listen.Port())
	case errors.Is(err, unix.EADDRNOTAVAIL):
		hint = fmt.Sprintf("this network namespace has no address %s: choose one that it has with --listen", listen.Addr())
	case errors.Is(err, unix.EAFNOSUPPORT):
		hint = "the kernel has no IPv6: choose an IPv4 address with --listen"
	default:
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %s: %w", what, hint, err)
}

// Close sends what is held, then closes the socket and ends its goroutine.
func (s *socket) Close() error {
	s.closeOnce.Do(func() {
		// A writer may be waiting, with the lock, for a send buffer that never
		// drains. If the deadline cannot be set, the socket is closed anyway.
		_ = s.conn.SetWriteDeadline(time.Now().Add(closeTimeout))
		flushErr := s.tx.close(s)
		s.closeErr = errors.Join(flushErr, s.conn.Close())
		s.flusher.Wait()
	})
	return s.closeErr
}

// LocalAddr returns the address that the socket is bound to, a *net.UDPAddr.
func (s *socket) LocalAddr() net.Addr { return s.conn.LocalAddr() }

// SyscallConn gives quic-go the descriptor for its socket options.
func (s *socket) SyscallConn() (syscall.RawConn, error) { return s.raw, nil }

func (s *socket) SetReadBuffer(bytes int) error  { return s.conn.SetReadBuffer(bytes) }
func (s *socket) SetWriteBuffer(bytes int) error { return s.conn.SetWriteBuffer(bytes) }

func (s *socket) SetDeadline(t time.Time) error      { return s.conn.SetDeadline(t) }
func (s *socket) SetReadDeadline(t time.Time) error  { return s.conn.SetReadDeadline(t) }
func (s *socket) SetWriteDeadline(t time.Time) error { return s.conn.SetWriteDeadline(t) }
