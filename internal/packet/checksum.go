package packet

import (
	"encoding/binary"
	"math/bits"
)

// Ones' complement sums (RFC 1071) do not care for byte order, so that all of
// these work on words as they lie in memory, read little-endian, and a folded
// sum is stored the same way.

// sum adds b to an accumulator.
func sum(b []byte, acc uint64) uint64 {
	var c uint64
	for len(b) >= 64 {
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b), 0)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b[8:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b[16:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b[24:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b[32:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b[40:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b[48:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b[56:]), c)
		acc += c
		b = b[64:]
	}
	for len(b) >= 8 {
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b), 0)
		acc += c
		b = b[8:]
	}
	if len(b) == 0 {
		return acc
	}
	var tail [8]byte
	copy(tail[:], b)
	acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(tail[:]), 0)
	return acc + c
}

// fold reduces an accumulator to 16 bits.
func fold(acc uint64) uint16 {
	acc = acc>>32 + acc&0xffffffff
	acc = acc>>32 + acc&0xffffffff
	acc = acc>>16 + acc&0xffff
	acc = acc>>16 + acc&0xffff
	return uint16(acc)
}

func putSum(b []byte, v uint16) { binary.LittleEndian.PutUint16(b, v) }

// word is a 16-bit field's part of a sum.
func word(v uint16) uint64 { return uint64(bits.ReverseBytes16(v)) }

// change is what the change of words adds to a sum (RFC 1624 equation 3), given
// the folded sums of the old and the new.
func change(was, is uint16) uint16 { return fold(uint64(^was) + uint64(is)) }

// adjust follows a change of what a checksum field covers, and returns the
// field's own.
func adjust(field []byte, by uint16) uint16 {
	was := binary.LittleEndian.Uint16(field)
	is := ^fold(uint64(^was) + uint64(by))
	putSum(field, is)
	return change(was, is)
}

// pseudo returns the sum of the pseudo-header (RFC 9293 section 3.1, RFC 8200
// section 8.1) for a transport header and payload of n bytes.
func pseudo(b []byte, proto uint8, n int) uint64 {
	acc := word(uint16(proto)) + word(uint16(n))
	if b[0]>>4 == 4 {
		return sum(b[12:20], acc)
	}
	return sum(b[8:40], acc)
}

// checksumAt is the offset of the checksum in a TCP or UDP header.
func checksumAt(proto uint8) int {
	if proto == UDP {
		return 6
	}
	return 16
}

// finish turns a sum into the value of a checksum field. UDP writes a sum of
// zero as all ones, since zero says that there is none (RFC 768).
func finish(acc uint64, proto uint8) uint16 {
	v := ^fold(acc)
	if v == 0 && proto == UDP {
		return 0xffff
	}
	return v
}

// setIPv4Checksum computes the checksum of an IPv4 header of n bytes.
func setIPv4Checksum(b []byte, n int) {
	b[10], b[11] = 0, 0
	putSum(b[10:], ^fold(sum(b[:n], 0)))
}

// CompleteChecksum turns the partial checksum of a single packet into a full
// one and clears the flag. h is the packet's own header. It does nothing to a
// packet that is not Partial, and nothing to a super-packet, whose segments get
// theirs in the Splitter.
func (p *Packet) CompleteChecksum(h Header) {
	if p.Flags&Partial == 0 || p.Segment != 0 {
		return
	}
	p.Flags &^= Partial
	if h.Fragment || !h.transport() {
		return
	}
	t := p.Data[h.IPLen:]
	putSum(t[checksumAt(h.Proto):], finish(sum(t, 0), h.Proto))
}

// SetPartial writes the folded pseudo-header sum into the checksum field of a
// TCP or UDP packet or super-packet without extension headers, and sets the
// flag: what a device with checksum offload wants to see.
func (p *Packet) SetPartial(h Header) {
	n := len(p.Data) - h.IPLen
	putSum(p.Data[h.IPLen+checksumAt(h.Proto):], fold(pseudo(p.Data, h.Proto, n)))
	p.Flags |= Partial
}

// validChecksum verifies the transport checksum of a whole TCP or UDP packet. A
// UDP checksum of zero is none, and nothing to rely on.
func validChecksum(b []byte, h *Header) bool {
	t := b[h.IPLen:]
	if h.Proto == UDP && t[6] == 0 && t[7] == 0 {
		return false
	}
	return fold(sum(t, pseudo(b, h.Proto, len(t)))) == 0xffff
}

// CompleteChecksumAt completes a checksum that covers b from start on and lies
// offset bytes behind it, which is how a device describes the partial checksum
// of any protocol. It returns false where that is not in the packet.
func CompleteChecksumAt(b []byte, start, offset int) bool {
	if start < 0 || offset < 0 || start+offset+2 > len(b) {
		return false
	}
	v := ^fold(sum(b[start:], 0))
	if v == 0 {
		v = 0xffff // the same to all, and UDP needs it
	}
	putSum(b[start+offset:], v)
	return true
}
