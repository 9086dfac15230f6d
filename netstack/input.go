package netstack

import (
	"net/netip"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Claim says whose a packet is.
type Claim uint8

const (
	// Foreign is a packet of no connection that the Stack knows: it may be one of a
	// connection that passes as packets, or began before the Stack.
	Foreign Claim = iota
	// Begins is the SYN of a connection that the Stack does not have yet.
	Begins
	// Held is a packet of a connection that is dialled or open, or one for an address
	// on which the Stack listens.
	Held
)

// Takes says whose a packet is, with its header, that an app sent. Who passes some
// packets by the Stack gives Input what is Held, of what Begins what is to be
// dialled, and of what is Foreign what is to be answered by RST, as a host answers
// what it knows nothing of: nothing, where connections pass as packets too. Of a
// connection that is over, late packets are Foreign.
func (s *Stack) Takes(p *packet.Packet, h packet.Header) Claim {
	switch {
	case (h.Proto == packet.TCP || h.Proto == packet.UDP) && s.owns(h.Dst):
		return Held
	case h.Proto != packet.TCP || h.Fragment:
		return Foreign
	case s.flows.get(tupleOf(&h)) != nil:
		return Held
	case begins(p, &h):
		return Begins
	}
	return Foreign
}

// maxSYN is how much of a SYN is kept. One that carries data may be longer: its
// sender tries without, when it gets no answer (RFC 7413, section 4.1.3).
const maxSYN = 2048

// begins reports whether a packet of TCP is the first of a connection.
func begins(p *packet.Packet, h *packet.Header) bool {
	const fin, syn, rst, ack = 0x01, 0x02, 0x04, 0x10
	return p.Data[h.IPLen+13]&(fin|syn|rst|ack) == syn && len(p.Data) <= maxSYN
}

func (s *Stack) owns(a netip.Addr) bool {
	_, ok := (*s.own.Load())[a]
	return ok
}

// Input takes packets that an app sent, which it borrows, and super-packets whole.
// What is neither Partial nor Verified is verified, but for fragments. It takes TCP for any address,
// and UDP for the addresses on which the Stack listens; it counts, and drops, all
// else. What is of no connection, and begins none, is answered by RST. It does not
// block.
func (s *Stack) Input(pkts []packet.Packet) {
	for i := range pkts {
		s.input(&pkts[i])
	}
}

func (s *Stack) input(p *packet.Packet) {
	h, err := packet.Parse(p.Data)
	own := err == nil && s.owns(h.Dst)
	switch {
	case err != nil:
		s.cfg.Drops.Add(packet.DropMalformed, 1)
		return
	case h.Proto != packet.TCP && (h.Proto != packet.UDP || !own):
		s.cfg.Drops.Add(packet.DropDestination, 1)
		return
	case h.Fragment && h.Proto == packet.UDP: // gVisor puts them together
		s.link.deliver(p.Data, h.IPLen)
		return
	case h.Fragment || !p.ChecksumHolds(h):
		s.cfg.Drops.Add(packet.DropMalformed, 1)
		return
	}
	if h.Proto == packet.UDP {
		var cut packet.Splitter
		cut.Reset(p, h, 0)
		for b := cut.Next(); b != nil; b = cut.Next() {
			s.link.deliver(b, h.HeaderLen)
		}
		return
	}
	t := tupleOf(&h)
	switch f := s.flows.get(t); {
	case f == nil && !own && begins(p, &h):
		s.begin(t, p.Data)
	case f != nil && f.repeats(p, &h):
	default:
		s.link.deliver(p.Data, h.HeaderLen)
	}
}
