package netstack

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// backlog is how many connections may wait for Accept.
	backlog = 1024
	// packetBuffer is what may wait to be read from a net.PacketConn.
	packetBuffer = 1 << 20
)

// Listen accepts connections to an address, which is the stack's own from now on:
// Takes says that all packets for it are Held, and what is for it and for no
// listener is refused, not dialled. Port 0 is a free one.
//
// A connection is a net.Conn with CloseWrite() error, and with Reset() error,
// which aborts instead of closing. Close of the listener leaves connections alone.
func (s *Stack) Listen(addr netip.AddrPort) (net.Listener, error) {
	full, proto, err := s.adopt(addr)
	if err != nil {
		return nil, fmt.Errorf("listen on tcp %v: %w", addr, err)
	}
	l := &listener{stack: s}
	var problem tcpip.Error
	if l.ep, problem = s.stack.NewEndpoint(tcp.ProtocolNumber, proto, &l.events); problem != nil {
		return nil, fmt.Errorf("listen on tcp %v: %w", addr, errorOf(problem))
	}
	l.ready.init(&l.events, waiter.ReadableEvents|waiter.EventHUp|waiter.EventErr)
	problem = l.ep.Bind(full)
	if problem == nil {
		problem = l.ep.Listen(backlog)
	}
	if problem != nil {
		l.ep.Close()
		return nil, fmt.Errorf("listen on tcp %v: %w", addr, errorOf(problem))
	}
	if bound, problem := l.ep.GetLocalAddress(); problem == nil {
		l.addr = addrPort(bound.Addr, bound.Port)
	}
	return l, nil
}

// adopt makes an address one of the stack's own.
func (s *Stack) adopt(addr netip.AddrPort) (full tcpip.FullAddress, proto tcpip.NetworkProtocolNumber, err error) {
	ip := addr.Addr()
	if !ip.IsValid() || ip.IsUnspecified() || ip.Is4In6() || ip.IsMulticast() || ip.Zone() != "" {
		return full, proto, fmt.Errorf("%v is not an address that a stack can have: choose one of its network's", ip)
	}
	proto = header.IPv4ProtocolNumber
	if ip.Is6() {
		proto = header.IPv6ProtocolNumber
	}
	full = tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(ip.AsSlice()), Port: addr.Port()}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return full, proto, net.ErrClosed
	}
	if s.owns(ip) {
		return full, proto, nil
	}
	if err := s.stack.AddProtocolAddress(nic, tcpip.ProtocolAddress{
		Protocol: proto, AddressWithPrefix: full.Addr.WithPrefix(),
	}, stack.AddressProperties{}); err != nil {
		return full, proto, errorOf(err)
	}
	own := maps.Clone(*s.own.Load())
	own[ip] = struct{}{}
	s.own.Store(&own)
	return full, proto, nil
}

// A listener is where connections to an address of the stack's own come.
type listener struct {
	stack  *Stack
	ep     tcpip.Endpoint
	events waiter.Queue
	addr   netip.AddrPort
	ready  gate
	closed atomic.Bool
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		ep, events, err := l.ep.Accept(nil)
		switch err.(type) {
		case nil:
			l.ready.wake() // another Accept may have waited for this one
			return &accepted{newConn(l.stack, ep, events)}, nil
		case *tcpip.ErrWouldBlock:
			l.ready.wait(l.stack)
			continue
		}
		l.ready.wake()
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.Addr(), Err: net.ErrClosed}
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	if !l.closed.Swap(true) {
		l.ep.Close()
	}
	return nil
}

// Addr implements net.Listener, by *net.TCPAddr.
func (l *listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.addr) }

// An accepted is a connection of a listener's: nobody waits for its end.
type accepted struct{ *conn }

func (c *accepted) Close() error {
	err := c.conn.Close()
	if err == nil && isOpen(c.ep) {
		c.stack.background(c.hangUp)
	}
	return err
}

// background runs f unless the Stack has ended, which Close waits for.
func (s *Stack) background(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.running.Go(f)
	}
}

// ListenPacket takes datagrams to an address, as Listen does for connections. They
// come and go by *net.UDPAddr.
func (s *Stack) ListenPacket(addr netip.AddrPort) (net.PacketConn, error) {
	full, proto, err := s.adopt(addr)
	if err != nil {
		return nil, fmt.Errorf("listen on udp %v: %w", addr, err)
	}
	events := new(waiter.Queue)
	ep, problem := s.stack.NewEndpoint(udp.ProtocolNumber, proto, events)
	if problem != nil {
		return nil, fmt.Errorf("listen on udp %v: %w", addr, errorOf(problem))
	}
	if problem := ep.Bind(full); problem != nil {
		ep.Close()
		return nil, fmt.Errorf("listen on udp %v: %w", addr, errorOf(problem))
	}
	ep.SocketOptions().SetReceiveBufferSize(packetBuffer, true)
	ep.SocketOptions().SetSendBufferSize(packetBuffer, true)
	return &packetConn{UDPConn: gonet.NewUDPConn(events, ep)}, nil
}

// A packetConn is gVisor's, with the errors of a *net.UDPConn.
type packetConn struct {
	*gonet.UDPConn
	closed atomic.Bool
}

func (c *packetConn) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := c.UDPConn.ReadFrom(b)
	return n, from, c.errorOf(err)
}

func (c *packetConn) WriteTo(b []byte, to net.Addr) (int, error) {
	u, ok := to.(*net.UDPAddr)
	if !ok {
		return 0, &net.OpError{Op: "write", Net: "udp", Addr: to, Err: errors.New("not a UDP address")}
	}
	// gVisor tells the IP versions by the length of an address.
	n, err := c.UDPConn.WriteTo(b, net.UDPAddrFromAddrPort(netip.AddrPortFrom(u.AddrPort().Addr().Unmap(), uint16(u.Port))))
	return n, c.errorOf(err)
}

func (c *packetConn) errorOf(err error) error {
	var op *net.OpError
	var timeout net.Error
	switch {
	case err == nil:
		return nil
	case c.closed.Load() || errors.Is(err, io.EOF):
		return &net.OpError{Op: "read or write", Net: "udp", Addr: c.LocalAddr(), Err: net.ErrClosed}
	case errors.As(err, &timeout) && timeout.Timeout() && errors.As(err, &op):
		return &net.OpError{Op: op.Op, Net: op.Net, Source: op.Source, Addr: op.Addr, Err: os.ErrDeadlineExceeded}
	}
	return err
}

// Close implements net.PacketConn.
func (c *packetConn) Close() error {
	if !c.closed.Swap(true) {
		return c.UDPConn.Close()
	}
	return nil
}
