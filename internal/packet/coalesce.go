package packet

import (
	"bytes"
	"encoding/binary"
)

const (
	slots = 16
	// maxPieces bounds the payloads of a run: 64 KiB of packets of an ordinary
	// size are fewer.
	maxPieces = 64
	maxTotal  = 0xffff
)

// A Run is what a Coalescer lets out: one packet as it came, or the packets of
// one flow as one super-packet.
type Run struct {
	// Pieces make up the packet. A super-packet's first piece is its headers,
	// with the lengths and the partial checksum of the whole; the others are the
	// payloads where they were.
	Pieces [][]byte
	// Packets are the packets that were put in, unchanged.
	Packets []*Packet
	Header  Header
	// Segment is zero for one packet.
	Segment uint16
	Flags   Flags
}

// A Coalescer joins single packets that come one after the other in a flow to
// super-packets: what a splitter would cut into just these packets. It keeps the
// order of every flow and copies no payload.
//
// It joins TCP segments that carry nothing but data and follow on each other, of
// the same acknowledgement, window and options; UDP datagrams of one size, of
// which the last may be shorter; never packets with IPv4 options or extension
// headers, fragments, or packets whose checksum is wrong.
//
// It is not safe for concurrent use.
type Coalescer struct {
	// Emit takes what comes out. It must not keep the run.
	Emit func(*Run)
	// TCP and UDP say what is joined.
	TCP, UDP bool

	slots [slots]slot
	order [slots]uint8 // the slots in use, by the age of their runs
	used  int
	one   Run // for single packets
	oneP  [1]*Packet
	oneB  [1][]byte
}

// A slot holds the run of one flow.
type slot struct {
	used    bool
	closed  bool // nothing may follow
	run     Run
	hdr     [128]byte
	payload int
	next    uint32 // sequence number
	pieces  [1 + maxPieces][]byte
	packets [maxPieces]*Packet
}

// Add puts in one packet with its header. It must stay as it is until it has
// come out.
func (c *Coalescer) Add(p *Packet, h Header) {
	if h.Fragment {
		c.Flush() // its ports are not known: it may belong to any of the flows
		c.single(p, h)
		return
	}
	if !h.transport() {
		c.single(p, h)
		return
	}
	i := uint8(FlowHash(h, p.Data) >> 28)
	s := &c.slots[i]
	can := c.joinable(p, &h)
	if s.used {
		if can && s.follows(p.Data, &h) {
			s.join(p, &h)
			return
		}
		c.flush(i)
	}
	if !can {
		c.single(p, h)
		return
	}
	s.start(p, h)
	c.order[c.used] = i
	c.used++
}

// Flush lets out everything that is held back.
func (c *Coalescer) Flush() {
	for _, i := range c.order[:c.used] {
		c.let(&c.slots[i])
	}
	c.used = 0
}

// flush lets out one slot's run.
func (c *Coalescer) flush(i uint8) {
	at := bytes.IndexByte(c.order[:c.used], i)
	c.used--
	copy(c.order[at:c.used], c.order[at+1:])
	c.let(&c.slots[i])
}

func (c *Coalescer) single(p *Packet, h Header) {
	c.oneB[0], c.oneP[0] = p.Data, p
	c.one = Run{Pieces: c.oneB[:], Packets: c.oneP[:], Header: h, Segment: p.Segment, Flags: p.Flags}
	c.Emit(&c.one)
	c.oneB[0], c.oneP[0] = nil, nil
}

func (c *Coalescer) let(s *slot) {
	s.used = false
	// Nothing of what came out is kept from the garbage collector.
	defer s.forget()
	if len(s.run.Packets) == 1 {
		c.single(s.run.Packets[0], s.run.Header)
		return
	}
	h := &s.run.Header
	hdr := s.hdr[:h.HeaderLen]
	total := h.HeaderLen + s.payload
	if h.Version == 4 {
		binary.BigEndian.PutUint16(hdr[2:], uint16(total))
		setIPv4Checksum(hdr, h.IPLen)
	} else {
		binary.BigEndian.PutUint16(hdr[4:], uint16(total-ipv6Len))
	}
	t := hdr[h.IPLen:]
	if h.Proto == UDP {
		binary.BigEndian.PutUint16(t[4:], uint16(total-h.IPLen))
	}
	putSum(t[checksumAt(h.Proto):], fold(pseudo(hdr, h.Proto, total-h.IPLen)))
	s.run.Flags = Partial
	c.Emit(&s.run)
}

// forget drops the packets of a run.
func (s *slot) forget() {
	clear(s.run.Pieces)
	clear(s.run.Packets)
}

// start opens a run with a first packet.
func (s *slot) start(p *Packet, h Header) {
	s.used = true
	s.payload = len(p.Data) - h.HeaderLen
	copy(s.hdr[:h.HeaderLen], p.Data)
	s.pieces[0] = s.hdr[:h.HeaderLen]
	s.pieces[1] = p.Data[h.HeaderLen:]
	s.packets[0] = p
	s.run = Run{Pieces: s.pieces[:2], Packets: s.packets[:1], Header: h, Segment: uint16(s.payload)}
	s.closed = false
	if h.Proto == TCP {
		t := p.Data[h.IPLen:]
		s.next = binary.BigEndian.Uint32(t[4:]) + uint32(s.payload)
		s.closed = t[13]&tcpPSH != 0
	}
}

// join adds a packet that follows.
func (s *slot) join(p *Packet, h *Header) {
	n := len(p.Data) - h.HeaderLen
	s.run.Pieces = append(s.run.Pieces, p.Data[h.HeaderLen:])
	s.run.Packets = append(s.run.Packets, p)
	s.payload += n
	s.next += uint32(n)
	s.closed = n < int(s.run.Segment) || len(s.run.Packets) == maxPieces
	if h.Proto == TCP && p.Data[h.IPLen+13]&tcpPSH != 0 {
		s.hdr[h.IPLen+13] |= tcpPSH
		s.closed = true
	}
}

// follows reports whether a packet is the next of the slot's run: of the same
// flow, and what a splitter would make of the run's headers.
func (s *slot) follows(b []byte, h *Header) bool {
	r := &s.run.Header
	n := len(b) - h.HeaderLen
	if s.closed || h.HeaderLen != r.HeaderLen || h.Proto != r.Proto || h.Version != r.Version ||
		n > int(s.run.Segment) || r.HeaderLen+s.payload+n > maxTotal {
		return false
	}
	head := &s.hdr
	if h.Version == 4 {
		// Version, length and type of service; flags; time to live; addresses.
		if head[1] != b[1] || head[6] != b[6] || head[8] != b[8] || !bytes.Equal(head[12:20], b[12:20]) {
			return false
		}
		// The identification of what is never fragmented means nothing (RFC 6864).
		id := binary.BigEndian.Uint16(head[4:]) + uint16(len(s.run.Packets))
		if b[6]&0x40 == 0 && binary.BigEndian.Uint16(b[4:]) != id {
			return false
		}
	} else if !bytes.Equal(head[:4], b[:4]) || !bytes.Equal(head[7:40], b[7:40]) {
		return false
	}
	was, t := head[h.IPLen:h.HeaderLen], b[h.IPLen:h.HeaderLen]
	if !bytes.Equal(was[:4], t[:4]) {
		return false
	}
	return h.Proto == UDP || binary.BigEndian.Uint32(t[4:]) == s.next &&
		bytes.Equal(was[8:13], t[8:13]) && was[13] == t[13]&^tcpPSH &&
		bytes.Equal(was[14:16], t[14:16]) && bytes.Equal(was[18:], t[18:])
}

// joinable reports whether a packet can be part of a run at all. The checksums
// of a run are computed anew, so that a wrong one must not get into it.
func (c *Coalescer) joinable(p *Packet, h *Header) bool {
	b := p.Data
	if p.Segment != 0 || !h.Plain() || len(b) == h.HeaderLen {
		return false
	}
	t := b[h.IPLen:]
	if h.Proto == UDP {
		if !c.UDP || int(binary.BigEndian.Uint16(t[4:])) != len(t) || t[6] == 0 && t[7] == 0 {
			return false
		}
	} else if !c.TCP || t[13]&^(tcpPSH|tcpECE) != tcpACK {
		return false
	}
	if h.Version == 4 && fold(sum(b[:ipv4Len], 0)) != 0xffff {
		return false
	}
	return p.Flags&(Partial|Verified) != 0 || validChecksum(b, h)
}
