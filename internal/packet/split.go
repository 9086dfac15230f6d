package packet

import (
	"encoding/binary"
	"math/bits"
)

// A Splitter cuts a super-packet into the packets that it stands for, lazily and
// in place: the header of a segment is written just before its payload, over
// the end of the segment before. The zero value is ready for Reset, and can be
// used again and again.
type Splitter struct {
	data   []byte
	hdr    []byte // a copy of the headers, with the fields that vary set to zero
	iplen  int
	size   int // payload of a segment; 0 for a packet that is handed out whole
	off    int // of the payload not yet handed out
	n      int // segments handed out
	proto  uint8
	v6     bool
	seq    uint32
	id     uint16
	flags  uint8
	ipSum  uint64 // of the IPv4 header copy; folded, so that fields can be added
	tpSum  uint64 // of pseudo-header and transport header copy, less the lengths; folded
	sealed bool   // nothing is left
}

// Reset starts on a packet that Parse, and Check if it is a peer's, accepted. h
// is its header. A segment size other than zero replaces p.Segment where that
// makes TCP segments smaller, as for a path that shrank; datagrams are never cut
// at another place than their sender chose.
//
// A single packet comes out as itself, with its checksum completed.
func (s *Splitter) Reset(p *Packet, h Header, segment int) {
	*s = Splitter{data: p.Data, hdr: s.hdr[:0]}
	size := int(p.Segment)
	if h.Proto == TCP && segment > 0 && (size == 0 || segment < size) {
		size = segment
	}
	if !splittable(p.Data, &h, size) {
		p.Segment = 0
		p.CompleteChecksum(h)
		return
	}
	s.size, s.iplen, s.off = size, h.IPLen, h.HeaderLen
	s.proto, s.v6 = h.Proto, h.Version == 6
	s.hdr = append(s.hdr, p.Data[:h.HeaderLen]...)
	t := s.hdr[h.IPLen:]
	if s.v6 {
		s.hdr[4], s.hdr[5] = 0, 0
	} else {
		s.id = binary.BigEndian.Uint16(s.hdr[4:])
		clear(s.hdr[2:6])
		s.hdr[10], s.hdr[11] = 0, 0
		s.ipSum = uint64(fold(sum(s.hdr[:h.IPLen], 0)))
	}
	if s.v6 && h.IPLen != ipv6Len && p.Flags&Partial != 0 {
		// With a routing header the pseudo-header has the last destination
		// (RFC 8200 section 8.1): the sender has summed it up.
		at := checksumAt(s.proto)
		s.tpSum = uint64(binary.LittleEndian.Uint16(t[at:])) + uint64(^uint16(word(uint16(len(p.Data)-h.IPLen))))
	} else {
		s.tpSum = pseudo(s.hdr, s.proto, 0)
	}
	if s.proto == TCP {
		s.seq = binary.BigEndian.Uint32(t[4:])
		s.flags = t[13]
		clear(t[4:8])
		t[13] = 0
		t[16], t[17] = 0, 0
	} else {
		clear(t[4:8])
	}
	s.tpSum = uint64(fold(sum(t, s.tpSum)))
}

// splittable reports whether a packet is to be cut at size.
func splittable(b []byte, h *Header, size int) bool {
	if size <= 0 || h.Fragment || !h.transport() || len(b)-h.HeaderLen <= size {
		return false
	}
	return h.Proto != TCP || b[h.IPLen+13]&(tcpSYN|tcpRST) == 0
}

// Next returns the next packet, with full checksums, or nil after the last. It
// is valid until the following call, and the caller may write to it.
func (s *Splitter) Next() []byte {
	if s.sealed {
		return nil
	}
	if s.size == 0 {
		s.sealed = true
		return s.data
	}
	end := s.off + s.size
	last := end >= len(s.data)
	if last {
		end = len(s.data)
		s.sealed = true
	}
	hl := len(s.hdr)
	b := s.data[s.off-hl : end : end]
	copy(b, s.hdr)
	n := len(b) - s.iplen
	if s.v6 {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-ipv6Len))
	} else {
		id := s.id + uint16(s.n)
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		binary.BigEndian.PutUint16(b[4:], id)
		putSum(b[10:], ^fold(s.ipSum+word(uint16(len(b)))+word(id)))
	}
	t := b[s.iplen:]
	acc := s.tpSum + word(uint16(n))
	if s.proto == UDP {
		binary.BigEndian.PutUint16(t[4:], uint16(n))
		acc += word(uint16(n))
	} else {
		flags := s.flags
		if !last {
			flags &^= tcpFIN | tcpPSH
		}
		if s.n > 0 {
			flags &^= tcpCWR
		}
		seq := s.seq + uint32(s.off-hl)
		binary.BigEndian.PutUint32(t[4:], seq)
		t[13] = flags
		acc += uint64(bits.ReverseBytes32(seq)) + uint64(flags)<<8
	}
	putSum(t[checksumAt(s.proto):], finish(sum(b[hl:], acc), s.proto))
	s.n++
	s.off = end
	return b
}
