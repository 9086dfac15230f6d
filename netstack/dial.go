package netstack

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/relay"
)

// begin takes the SYN of a connection. What is refused costs no goroutine, and
// nothing that stays, which matters in a flood.
func (s *Stack) begin(t tuple, syn []byte) {
	f, refused := s.add(t, syn)
	switch {
	case refused:
		s.link.deliver(syn, len(syn)) // and gVisor resets what nobody takes
	case f == nil:
	case s.cfg.Dial == nil:
		s.answer(f)
	default:
		go func() {
			defer s.running.Done()
			s.dial(f)
		}()
	}
}

// add makes a flow of a SYN, unless it is refused, or, with nil, to be dropped.
func (s *Stack) add(t tuple, syn []byte) (f *flow, refused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := t.from.Addr()
	switch {
	case s.closed || s.flows.get(t) != nil: // it came twice at the same time
		return nil, false
	case s.cfg.Dial == nil && s.cfg.Serve == nil:
		return nil, true
	case s.coming >= maxComing || s.sources[from] >= maxComingFrom:
		s.cfg.Drops.Add(packet.DropQueueFull, 1)
		return nil, false
	}
	f = &flow{tuple: t, syn: bytes.Clone(syn)}
	if s.cfg.Admit != nil {
		var ok bool
		if f.release, ok = s.cfg.Admit(from); !ok {
			return nil, true
		}
	}
	s.coming++
	s.sources[from]++
	s.flows.add(f)
	s.running.Add(1)
	return f, false
}

// arrived ends what began with add: a flow has been accepted, or has failed.
func (s *Stack) arrived(f *flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.coming--
	from := f.from.Addr()
	if s.sources[from]--; s.sources[from] == 0 {
		delete(s.sources, from)
	}
}

// forget ends a flow.
func (s *Stack) forget(f *flow) {
	s.flows.remove(f)
	if f.release != nil {
		f.release()
	}
}

// dial opens the other side of a flow, and answers the app.
func (s *Stack) dial(f *flow) {
	ctx, cancel := context.WithTimeout(s.ctx, dialLimit)
	conn, err := s.cfg.Dial(ctx, f.from, f.to)
	cancel()
	if err != nil {
		s.fail(f, err)
		return
	}
	f.upstream = conn
	s.running.Add(1) // which is not zero yet
	s.answer(f)
}

// fail tells an app why there is no connection.
func (s *Stack) fail(f *flow, err error) {
	f.mu.Lock()
	syn, again := f.syn, f.again
	f.mu.Unlock()
	s.arrived(f)
	s.forget(f)
	switch why, icmp := unreachable(err); {
	case icmp:
		if !s.errors.Allow(time.Now()) {
			return
		}
		if b := packet.AppendUnreachable(nil, syn, f.to.Addr(), why); b != nil {
			s.cfg.Output([]packet.Packet{{Data: b}})
		}
	case isTimeout(err) && !again && s.ctx.Err() == nil:
	default:
		s.link.deliver(syn, len(syn)) // and gVisor resets what nobody takes
	}
}

// unreachable returns what ICMP says of an error, if it does.
func unreachable(err error) (why packet.Unreachable, ok bool) {
	switch {
	case errors.Is(err, syscall.ENETUNREACH):
		return packet.NoRoute, true
	case errors.Is(err, syscall.EHOSTUNREACH):
		return packet.HostUnreachable, true
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return packet.AdminProhibited, true
	}
	return 0, false
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, context.DeadlineExceeded) || errors.As(err, &t) && t.Timeout()
}

// answer has the app's SYN answered. It takes over from add what running counts.
func (s *Stack) answer(f *flow) {
	f.mu.Lock()
	syn := f.syn
	f.syn = nil
	f.mu.Unlock()
	s.link.deliver(syn, len(syn)) // and accept runs
	f.mu.Lock()
	accepted := f.accepted
	f.mu.Unlock()
	if !accepted { // gVisor does not like the packet
		s.lose(f)
		s.running.Done()
	}
}

// lose ends a flow that the app does not have.
func (s *Stack) lose(f *flow) {
	s.arrived(f)
	s.forget(f)
	if f.upstream != nil {
		relay.Reset(f.upstream)
	}
}

// knock takes a packet of a connection that gVisor does not know, and reports
// whether it has dealt with it: gVisor resets the others.
func (s *Stack) knock(id stack.TransportEndpointID, b *stack.PacketBuffer) bool {
	flags := header.TCP(b.TransportHeader().Slice()).Flags()
	if flags&(header.TCPFlagSyn|header.TCPFlagAck) != header.TCPFlagSyn {
		return false
	}
	f := s.flows.get(tupleOfID(id))
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.syn != nil || f.accepted {
		return true
	}
	f.accepted = s.forwarder.HandlePacket(id, b)
	return f.accepted
}

func tupleOfID(id stack.TransportEndpointID) tuple {
	return tuple{addrPort(id.RemoteAddress, id.RemotePort), addrPort(id.LocalAddress, id.LocalPort)}
}

func addrPort(a tcpip.Address, port uint16) netip.AddrPort {
	ip, _ := netip.AddrFromSlice(a.AsSlice())
	return netip.AddrPortFrom(ip, port)
}

// accept takes a flow from its handshake to its end.
func (s *Stack) accept(r *tcp.ForwarderRequest) {
	defer s.running.Done()
	f := s.flows.get(tupleOfID(r.ID()))
	c := s.shakeHands(r)
	if c == nil {
		s.lose(f)
		return
	}
	s.arrived(f)
	defer s.forget(f)
	if f.upstream != nil {
		relay.Relay(s.ctx, c, f.upstream, nil)
	} else {
		s.cfg.Serve(c)
	}
	c.hangUp()
}

// shakeHands does the handshake, and returns nil if it fails.
func (s *Stack) shakeHands(r *tcp.ForwarderRequest) *conn {
	id := r.ID()
	proto := header.IPv4ProtocolNumber
	if id.RemoteAddress.Len() != header.IPv4AddressSize {
		proto = header.IPv6ProtocolNumber
	}
	limit := time.AfterFunc(s.handshake, func() {
		if ep := s.stack.FindTransportEndpoint(proto, tcp.ProtocolNumber, id, nic); ep != nil {
			ep.Abort()
		}
	})
	events := new(waiter.Queue)
	ep, err := r.CreateEndpoint(events)
	limit.Stop()
	r.Complete(err != nil)
	if err != nil {
		return nil
	}
	return newConn(s, ep, events)
}
