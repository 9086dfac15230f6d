package gateway

import (
	"net/netip"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// From a client:
//
//  1. WritePackets takes a batch from the session.
//  2. route decides about each packet, and answers the ones that go nowhere.
//  3. pass hands on runs of packets with the same way.
//
// From the internet:
//
//  4. fromKernel takes a batch from the TUN device and hands runs of packets to
//     the sessions that own their destinations.
//
// Nothing here allocates for a packet that is passed on.

// A way is where packets go.
type way struct {
	kind wayKind
	peer *port // of wayPeer
}

type wayKind uint8

const (
	wayNowhere  wayKind = iota // dropped and counted
	wayOut                     // to the TUN device
	wayPeer                    // to another client of the network
	wayBack                    // the packet was made into an answer
	wayRefused                 // against the policy
	wayUnrouted                // of an IP version that does not leave
	wayOwn                     // to the gateway itself
	wayNobody                  // an address of the network that has no client here
)

// A memo remembers the way to the destination before: a batch is of few flows.
type memo struct {
	dst netip.Addr
	way way
}

// WritePackets takes what the client sends.
func (p *port) WritePackets(queue int, pkts []packet.Packet) {
	if p.gone.Load() {
		p.router.cfg.drops.Add(packet.DropClosed, len(pkts))
		return
	}
	var last memo
	var run way
	start := 0
	for i := range pkts {
		w := p.route(queue, &pkts[i], &last)
		if w != run {
			p.pass(queue, pkts[start:i], run)
			start, run = i, w
		}
	}
	p.pass(queue, pkts[start:], run)
}

// route decides where a packet goes.
func (p *port) route(queue int, pkt *packet.Packet, last *memo) way {
	r := p.router
	h, err := packet.Parse(pkt.Data)
	if err == nil {
		err = pkt.Check(h)
	}
	if err != nil {
		r.cfg.drops.Add(packet.DropMalformed, 1)
		return way{}
	}
	inPool := p.owns(h.Src)
	if !inPool && !contains(p.announced, h.Src) {
		r.cfg.drops.Add(packet.DropSource, 1)
		return way{}
	}
	if h.Dst != last.dst {
		*last = memo{h.Dst, p.find(h.Dst)}
	}
	switch w := last.way; w.kind {
	case wayOut:
		if p.asksAnyName(queue, pkt, h) {
			return way{}
		}
		if !inPool { // the internet cannot answer it
			r.cfg.drops.Add(packet.DropSource, 1)
			p.answerUnreachable(queue, pkt.Data, packet.AdminProhibited)
			return way{}
		}
		return w
	case wayPeer:
		if !packet.DecrementHopLimit(pkt.Data) {
			r.cfg.drops.Add(packet.DropHopLimit, 1)
			p.answerTimeExceeded(queue, pkt.Data)
			return way{}
		}
		return w
	case wayNobody:
		r.cfg.drops.Add(packet.DropNoSession, 1)
		p.answerUnreachable(queue, pkt.Data, packet.HostUnreachable)
	case wayOwn, wayRefused:
		if w.kind == wayOwn && packet.AnswerEcho(pkt.Data, h) {
			return way{kind: wayBack}
		}
		if r.cfg.names != nil && r.cfg.names(p, queue, pkt, h) {
			return way{}
		}
		r.cfg.drops.Add(packet.DropDestination, 1)
		p.answerUnreachable(queue, pkt.Data, packet.AdminProhibited)
	case wayUnrouted:
		if p.asksAnyName(queue, pkt, h) {
			return way{}
		}
		r.cfg.drops.Add(packet.DropDestination, 1)
		p.answerUnreachable(queue, pkt.Data, packet.NoRoute)
	}
	return way{}
}

// asksAnyName takes a packet to a public name server, where the client has all of
// them answered here.
func (p *port) asksAnyName(queue int, pkt *packet.Packet, h packet.Header) bool {
	names := p.router.cfg.names
	return p.names == tunnel.NamesAll && h.DstPort == namePort && names != nil && names(p, queue, pkt, h)
}

// find returns the way to an address.
func (p *port) find(dst netip.Addr) way {
	r := p.router
	switch {
	case dst == r.own4 || dst == r.own6:
		return way{kind: wayOwn}
	case r.cfg.pool4.Contains(dst) || r.cfg.pool6.Contains(dst):
		return p.findPeer(dst, r.lookup(dst))
	}
	if peer, ok := p.network.lookup(dst); ok && !p.policy.names(dst) && !r.cfg.isHost(dst) {
		return p.findPeer(dst, peer)
	}
	switch {
	case !p.policy.allows(dst) || r.cfg.isHost(dst):
		return way{kind: wayRefused}
	case dst.Is6() && !r.cfg.exit6:
		return way{kind: wayUnrouted}
	}
	return way{kind: wayOut}
}

// findPeer returns the way to an address that is a peer's. A client of another
// network looks like one that is not there. So does whom the client itself should
// know, in its block or what it announced: it would get the packet back.
func (p *port) findPeer(dst netip.Addr, peer *port) way {
	if peer == nil || peer.network != p.network || peer == p && dst != p.client.Addr4 && dst != p.client.Addr6 {
		return way{kind: wayNobody}
	}
	return way{kind: wayPeer, peer: peer}
}

// owns reports whether an address of the pools is the client's.
func (p *port) owns(ip netip.Addr) bool {
	c := &p.client
	return ip == c.Addr4 || ip == c.Addr6 || c.Block4.Contains(ip) || c.Block6.Contains(ip)
}

func contains(prefixes []netip.Prefix, ip netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(ip) {
			return true
		}
	}
	return false
}

// pass hands on a run of packets.
func (p *port) pass(queue int, pkts []packet.Packet, w way) {
	if len(pkts) == 0 {
		return
	}
	switch w.kind {
	case wayOut:
		p.router.writeOut(queue, pkts)
	case wayPeer:
		w.peer.session.Send(queue, pkts, &p.errors)
	case wayBack:
		p.session.Send(queue, pkts, nil)
	}
}

// writeOut writes to the TUN device.
func (r *router) writeOut(queue int, pkts []packet.Packet) {
	// What is lost the device counts, and one that is gone ends its readers.
	_ = r.cfg.exits[uint(queue)%uint(len(r.cfg.exits))].Write(pkts)
}

// fromKernel takes what a queue of the TUN device has.
func (r *router) fromKernel(queue int, pkts []packet.Packet) {
	var last netip.Addr
	var to, run *port
	start := 0
	for i := range pkts {
		h, err := packet.Parse(pkts[i].Data)
		switch {
		case err != nil:
			r.cfg.drops.Add(packet.DropMalformed, 1)
			to, last = nil, netip.Addr{}
		case h.Dst != last:
			to, last = r.lookup(h.Dst), h.Dst
			fallthrough
		default:
			if to == nil {
				r.cfg.drops.Add(packet.DropNoSession, 1)
			}
		}
		if to != run {
			r.sendTo(run, queue, pkts[start:i])
			start, run = i, to
		}
	}
	r.sendTo(run, queue, pkts[start:])
}

func (r *router) sendTo(p *port, queue int, pkts []packet.Packet) {
	if p != nil && len(pkts) > 0 {
		p.session.Send(queue, pkts, &r.toKernel)
	}
}

// A kernelSink takes the ICMP errors about packets from the internet. They leave
// as the answers that they are: the connection tracker knows the connection.
type kernelSink struct{ router *router }

func (s *kernelSink) WritePackets(queue int, pkts []packet.Packet) { s.router.writeOut(queue, pkts) }

// An errorSink takes the ICMP errors about packets from one client to another.
type errorSink struct{ port *port }

func (s *errorSink) WritePackets(queue int, pkts []packet.Packet) {
	s.port.session.Send(queue, pkts, nil)
}

var _ tunnel.Sink = (*port)(nil)
