// Package netstack ends TCP connections that come as packets in a TCP of its own
// (gVisor's), whatever address they are for, and carries each on by a connection
// that its user dials. So what an app sends meets no socket, no address and no
// firewall of the host. It also listens, for TCP and UDP, on addresses that are
// the stack's own.
//
// The path of a connection, called a flow:
//
//  1. Takes tells whose a packet is, and Input takes those that are the stack's
//  2. a SYN has Config.Dial called, within limits; nothing is answered yet
//  3. a connection from Dial gets the SYN answered, an error the app told
//  4. relay.Relay passes both directions, with half-close, reset and back-pressure
//  5. what is left is over within seconds; the addresses are free again
//
// It bounds how long somebody may hold a connection half open or half closed, and
// what it may keep of it; what happens in between is its users' to bound. It knows
// nothing of sessions and devices: packets come by Stack.Input and leave by
// Config.Output.
package netstack

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Config says what becomes of connections.
type Config struct {
	// MTU is the largest single packet that leaves, 1280 at least. Required.
	MTU int

	// Output takes packets, which it borrows. Those of TCP may be super-packets, and
	// have a partial checksum. It is called for several flows at the same time, and
	// for each in order; it must not block, for all wait then. Required.
	Output func([]packet.Packet)

	// Dial opens the other side of a connection from an app to an address. The app is
	// answered when it returns: by an accepted connection, or for an error
	//
	//	ENETUNREACH, EHOSTUNREACH, EACCES    by ICMP: network or host unreachable, prohibited
	//	ETIMEDOUT, any with Timeout()        not at all, or, if it still asks, by RST
	//	ECONNREFUSED, any other              by RST
	//
	// ctx is for dialling alone, and done after a minute or with the Stack. The
	// connection is the Stack's, which passes both directions and closes it: see
	// relay.Relay for what methods it should have.
	Dial func(ctx context.Context, from, to netip.AddrPort) (net.Conn, error)

	// Serve, where Dial is nil, owns an accepted connection until it returns, and
	// need not close it. Its LocalAddr is what the app dialled. It may have more
	// methods, as a listener's has. Without both all connections are refused that are
	// not for listeners.
	Serve func(net.Conn)

	// Admit is asked about each connection for Dial or Serve when it begins, and
	// release is called when nothing of it is left. A connection that is not admitted
	// is refused by RST. Nil admits all. Admit must not block.
	Admit func(from netip.Addr) (release func(), ok bool)

	// Buffer is what a connection may keep in each direction at most. Zero is 1 MiB:
	// enough where apps are near, within milliseconds. Where they are far, 2
	// bandwidth-delay products are; 4 MiB carry 160 Mbit/s over 100 ms. With many
	// connections each may keep less, so that all together have about 256 MiB.
	Buffer int

	// Drops counts what is not taken; nil counts for nobody.
	Drops *packet.Drops
}

// A Stack is a host that has every address. It is safe for concurrent use.
type Stack struct {
	cfg       Config
	stack     *stack.Stack
	link      *link
	forwarder *tcp.Forwarder
	flows     flows
	buffers   buffers
	errors    packet.Limiter // of ICMP
	// own are the addresses of listeners.
	own atomic.Pointer[map[netip.Addr]struct{}]
	// handshake and linger are handshakeLimit and lingerLimit, but for tests.
	handshake, linger time.Duration
	began             time.Time // what deadlines count from

	ctx     context.Context // done with Close
	end     context.CancelFunc
	running sync.WaitGroup // goroutines

	mu      sync.Mutex // guards what follows, and additions to running and flows
	closed  bool
	coming  int                // flows that are not accepted yet
	sources map[netip.Addr]int // the same, by source
}

const (
	nic = 1

	// maxComing is how many connections may be dialled or in their handshake at a
	// time, maxComingFrom how many of one source.
	maxComing     = 8192
	maxComingFrom = 2048

	// dialLimit is how long Dial may take, handshakeLimit the handshake, and
	// lingerLimit the peer to acknowledge the last bytes and to close its side.
	dialLimit      = time.Minute
	handshakeLimit = 10 * time.Second
	lingerLimit    = 5 * time.Second

	// A peer that is silent for keepIdle is asked whether it is there, and has
	// keepCount times keepInterval to answer.
	keepIdle     = 5 * time.Minute
	keepInterval = 30 * time.Second
	keepCount    = 4

	// sweep is how often a Stack that ends aborts what is left: a connection that
	// is just coming may not be known yet.
	sweep = 10 * time.Millisecond
)

// New returns a Stack, which lives until Close.
func New(cfg Config) (*Stack, error) {
	switch {
	case cfg.MTU < header.IPv6MinimumMTU || cfg.MTU > math.MaxUint16:
		return nil, fmt.Errorf("netstack: MTU %d: choose one from %d to %d", cfg.MTU, header.IPv6MinimumMTU, math.MaxUint16)
	case cfg.Output == nil:
		return nil, errors.New("netstack: Output is not set")
	case cfg.Buffer < 0 || cfg.Buffer > 0 && cfg.Buffer < startBuffer:
		return nil, fmt.Errorf("netstack: Buffer %d: choose %d or more", cfg.Buffer, startBuffer)
	case cfg.Dial != nil && cfg.Serve != nil:
		return nil, errors.New("netstack: both Dial and Serve are set")
	}
	if cfg.Buffer == 0 {
		cfg.Buffer = nearBuffer
	}
	if cfg.Drops == nil {
		cfg.Drops = new(packet.Drops)
	}
	s := &Stack{
		cfg: cfg,
		stack: stack.New(stack.Options{
			NetworkProtocols: []stack.NetworkProtocolFactory{
				ipv4.NewProtocolWithOptions(ipv4.Options{AllowExternalLoopbackTraffic: true}),
				ipv6.NewProtocolWithOptions(ipv6.Options{AllowExternalLoopbackTraffic: true}),
			},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
		}),
		link:      &link{mtu: uint32(cfg.MTU), output: cfg.Output},
		handshake: handshakeLimit, linger: lingerLimit,
		began:   time.Now(),
		sources: make(map[netip.Addr]int),
	}
	s.flows.init()
	s.buffers.stack, s.buffers.most = s.stack, cfg.Buffer
	s.own.Store(&map[netip.Addr]struct{}{})
	s.ctx, s.end = context.WithCancel(context.Background())
	if err := s.setUp(); err != nil {
		return nil, errors.Join(fmt.Errorf("set up a TCP: %w", err), s.Close())
	}
	return s, nil
}

func (s *Stack) setUp() error {
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(true)
	// With super-packets gVisor's CUBIC may come to a window of nothing, and then
	// sends no more.
	recovery, control := tcpip.TCPRACKLossDetection, tcpip.CongestionControlOption("reno")
	_, limit := s.buffers.add(0)
	for _, err := range []tcpip.Error{
		s.stack.CreateNIC(nic, s.link),
		s.stack.SetPromiscuousMode(nic, true), // takes what is for any address
		s.stack.SetSpoofing(nic, true),        // and answers from it
		s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack),
		s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &recovery),
		s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &control),
		s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &moderate),
		limit,
	} {
		if err != nil {
			return errors.New(err.String())
		}
	}
	s.stack.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nic},
		{Destination: header.IPv6EmptySubnet, NIC: nic},
	})
	// How many may come at once is bounded before.
	s.forwarder = tcp.NewForwarder(s.stack, startBuffer, math.MaxInt, s.accept)
	s.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, s.knock)
	return nil
}

// Close resets all connections, closes the listeners and returns when all is over.
// Input does nothing then.
func (s *Stack) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end()
	over := make(chan struct{})
	go func() {
		defer close(over)
		s.running.Wait()
	}()
	for {
		for _, ep := range s.stack.RegisteredEndpoints() {
			ep.Abort()
		}
		select {
		case <-over:
			s.link.closed.Store(true)
			s.stack.Destroy()
			return nil
		case <-time.After(sweep):
		}
	}
}
