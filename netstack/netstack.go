// Package netstack ends TCP connections that come as packets, whatever address
// they are for, in a TCP of its own (gVisor's). So what a peer sends meets no
// socket, no address and no firewall of the host.
//
// It bounds how long somebody may hold a connection half open or half closed;
// what happens in between is its users' to bound. It knows nothing of sessions
// and devices: packets come by Stack.Input and leave by Config.Output.
package netstack

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Config says what becomes of connections. All of it is required.
type Config struct {
	// MTU is the largest packet that leaves.
	MTU int
	// Admit is asked about each connection before its handshake, and release is
	// called when nothing of it is left. A connection that is not admitted is
	// refused. Admit must not block.
	Admit func(from netip.Addr) (release func(), ok bool)
	// Serve owns a connection until it returns, and need not close it. Its local
	// address is the one that the peer dialled.
	Serve func(net.Conn)
	// Output takes a packet, which it borrows. It is not called at the same time
	// from several goroutines.
	Output func(packet.Packet)
}

// A Stack is a host that has every address.
type Stack struct {
	cfg   Config
	stack *stack.Stack
	link  *channel.Endpoint
	end   context.CancelFunc // of output
	// handshake and linger are handshakeLimit and lingerLimit, but for tests.
	handshake, linger time.Duration

	forwarder *tcp.Forwarder

	mu     sync.Mutex // guards what follows, and additions to conns
	closed bool
	// coming are the connections in their handshake, with what releases them.
	coming map[stack.TransportEndpointID]func()
	conns  sync.WaitGroup
	out    sync.WaitGroup // output
}

const (
	nic = 1
	// queueLen is how many packets may wait for Output; TCP repeats the others.
	queueLen = 512
	// buffers is what a connection may keep in each direction.
	buffers = 64 << 10

	// handshakeLimit is how long a handshake may take, and lingerLimit how long
	// the peer may take to acknowledge the last bytes and to close its side.
	handshakeLimit = 10 * time.Second
	lingerLimit    = 5 * time.Second
	// sweep is how often a Stack that ends aborts what is left: a connection that
	// is just coming may not be known yet.
	sweep = 10 * time.Millisecond
)

// New returns a Stack, which lives until Close.
func New(cfg Config) (*Stack, error) {
	s := &Stack{
		cfg: cfg,
		stack: stack.New(stack.Options{
			NetworkProtocols: []stack.NetworkProtocolFactory{
				ipv4.NewProtocolWithOptions(ipv4.Options{AllowExternalLoopbackTraffic: true}),
				ipv6.NewProtocolWithOptions(ipv6.Options{AllowExternalLoopbackTraffic: true}),
			},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
		}),
		link:      channel.New(queueLen, uint32(cfg.MTU), ""),
		coming:    make(map[stack.TransportEndpointID]func()),
		handshake: handshakeLimit, linger: lingerLimit,
	}
	if err := s.setUp(); err != nil {
		return nil, errors.Join(fmt.Errorf("set up a TCP: %w", err), s.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	s.out.Go(func() { s.output(ctx) })
	return s, nil
}

func (s *Stack) setUp() error {
	s.link.LinkEPCapabilities = stack.CapabilityRXChecksumOffload
	sack := tcpip.TCPSACKEnabled(true)
	for _, err := range []tcpip.Error{
		s.stack.CreateNIC(nic, s.link),
		s.stack.SetPromiscuousMode(nic, true), // takes what is for any address
		s.stack.SetSpoofing(nic, true),        // and answers from it
		s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack),
		s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &tcpip.TCPReceiveBufferSizeRangeOption{
			Min: tcp.MinBufferSize, Default: buffers, Max: buffers}),
		s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &tcpip.TCPSendBufferSizeRangeOption{
			Min: tcp.MinBufferSize, Default: buffers, Max: buffers}),
	} {
		if err != nil {
			return errors.New(err.String())
		}
	}
	s.stack.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nic},
		{Destination: header.IPv6EmptySubnet, NIC: nic},
	})
	// Admit bounds how many come at once.
	s.forwarder = tcp.NewForwarder(s.stack, buffers, math.MaxInt, s.accept)
	s.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, s.knock)
	return nil
}

// Input takes a packet of TCP, which it borrows. Its checksum has been verified.
func (s *Stack) Input(p packet.Packet) {
	proto := header.IPv4ProtocolNumber
	if p.Data[0]>>4 == 6 {
		proto = header.IPv6ProtocolNumber
	}
	b := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(p.Data)})
	defer b.DecRef()
	s.link.InjectInbound(proto, b)
}

// output hands out packets until ctx ends, and those that wait then.
func (s *Stack) output(ctx context.Context) {
	for {
		b := s.link.ReadContext(ctx)
		if b == nil {
			b = s.link.Read()
		}
		if b == nil {
			return
		}
		v := b.ToView()
		s.cfg.Output(packet.Packet{Data: v.AsSlice()})
		v.Release()
		b.DecRef()
	}
}

// knock takes a packet of no connection, and reports whether it has dealt with it:
// gVisor resets the others. What is refused costs no goroutine, which matters in a
// flood.
func (s *Stack) knock(id stack.TransportEndpointID, b *stack.PacketBuffer) bool {
	flags := header.TCP(b.TransportHeader().Slice()).Flags()
	if flags&(header.TCPFlagSyn|header.TCPFlagAck) != header.TCPFlagSyn {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.coming[id] != nil {
		return true
	}
	from, _ := netip.AddrFromSlice(id.RemoteAddress.AsSlice())
	release, ok := s.cfg.Admit(from)
	if !ok {
		return false
	}
	s.coming[id] = release
	s.conns.Add(1)
	if !s.forwarder.HandlePacket(id, b) { // else accept runs
		delete(s.coming, id)
		s.conns.Done()
		release()
		return false
	}
	return true
}

// accept takes a connection through its whole life.
func (s *Stack) accept(r *tcp.ForwarderRequest) {
	defer s.conns.Done()
	id := r.ID()
	s.mu.Lock()
	defer s.coming[id]()
	s.mu.Unlock()
	proto := header.IPv4ProtocolNumber
	if id.RemoteAddress.Len() != header.IPv4AddressSize {
		proto = header.IPv6ProtocolNumber
	}
	limit := time.AfterFunc(s.handshake, func() {
		if ep := s.stack.FindTransportEndpoint(proto, tcp.ProtocolNumber, id, nic); ep != nil {
			ep.Abort()
		}
	})
	var events waiter.Queue
	ep, err := r.CreateEndpoint(&events)
	limit.Stop()
	r.Complete(err != nil)
	s.mu.Lock()
	delete(s.coming, id)
	s.mu.Unlock()
	if err != nil {
		return
	}
	s.cfg.Serve(gonet.NewTCPConn(&events, ep))
	s.hangUp(ep, &events)
}

// hangUp ends a connection, and returns when nothing of it is left. A peer that
// does not take the last bytes, or does not close its side, does not keep it. Nor
// does gVisor, which forgets that the peer has closed if it must repeat its FIN.
func (s *Stack) hangUp(ep tcpip.Endpoint, events *waiter.Queue) {
	changed, notify := waiter.NewChannelEntry(waiter.EventHUp)
	events.EventRegister(&changed)
	defer events.EventUnregister(&changed)
	limit := time.NewTimer(s.linger)
	defer limit.Stop()
	ep.Close()
	for isOpen(ep) {
		select {
		case <-notify:
		case <-limit.C:
			ep.Abort()
		}
	}
	ep.Abort() // what would wait for late packets (RFC 9293, section 3.6.1)
}

// isOpen reports whether a peer has something to acknowledge or to close.
func isOpen(ep tcpip.Endpoint) bool {
	switch tcp.EndpointState(ep.State()) {
	case tcp.StateClose, tcp.StateError, tcp.StateTimeWait:
		return false
	}
	return true
}

// Close ends all connections and returns when they are over.
func (s *Stack) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	over := make(chan struct{})
	go func() {
		defer close(over)
		s.conns.Wait()
	}()
	for {
		for _, ep := range s.stack.RegisteredEndpoints() {
			ep.Abort()
		}
		select {
		case <-over:
			if s.end != nil {
				s.end()
			}
			s.out.Wait()
			s.link.Close()
			s.stack.Destroy()
			return nil
		case <-time.After(sweep):
		}
	}
}
