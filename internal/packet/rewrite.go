package packet

import (
	"encoding/binary"
	"net/netip"
)

// Protocols, beside those that the house looks at, whose checksum covers the
// pseudo-header: their checksums lie where UDP's does.
const (
	dccp    = 33  // RFC 4340 section 9.1
	udpLite = 136 // RFC 3828 section 3.1
)

// RewriteSource replaces the source address of a packet or super-packet, in Data
// and in h, its header, by one of the same IP version.
//
// Checksums follow incrementally (RFC 1624): a right one stays right, a wrong
// one wrong, a partial one partial, and none, which is a UDP checksum of zero,
// none. In an ICMP error the packet that it quotes came from the other side, so
// that the address is its destination and is replaced there, too: the error
// reaches who sent that packet, and he knows it again (RFC 5508 section 4.2).
func (p *Packet) RewriteSource(h *Header, to netip.Addr) {
	p.rewrite(h, true, to)
	h.Src = to
}

// RewriteDestination replaces the destination address, and in ICMP errors the
// source of the packet that they quote, as RewriteSource does.
func (p *Packet) RewriteDestination(h *Header, to netip.Addr) {
	p.rewrite(h, false, to)
	h.Dst = to
}

// Quoted reads the headers of the packet that an ICMP error quotes. A quote is
// cut off somewhere: ports are zero, and the protocol "none", where they are not
// in it. It returns false for everything that is not an ICMP error.
func Quoted(b []byte, h Header) (Header, bool) {
	return readQuote(quote(b, &h))
}

func (p *Packet) rewrite(h *Header, source bool, to netip.Addr) {
	var buf [16]byte
	is := buf[:16]
	if h.Version == 4 {
		a := to.As4()
		is = buf[:copy(buf[:], a[:])]
	} else {
		buf = to.As16()
	}
	at := address(p.Data, source)
	by := change(foldAddress(at), foldAddress(is))
	if h.Version == 4 {
		adjust(p.Data[10:], by)
	}
	if h.FragmentOffset == 0 {
		if h.Proto == ICMP || h.Proto == ICMPv6 {
			rewriteICMP(p.Data, h, source, at, is, by)
		} else {
			rewriteSum(p.Data[h.IPLen:], h.Proto, by, p.Flags&Partial != 0)
		}
	}
	copy(at, is)
}

// address returns one of an IP header's addresses.
func address(b []byte, source bool) []byte {
	switch {
	case b[0]>>4 == 4 && source:
		return b[12:16]
	case b[0]>>4 == 4:
		return b[16:20]
	case source:
		return b[8:24]
	}
	return b[24:40]
}

// foldAddress is the folded sum of an address.
func foldAddress(b []byte) uint16 {
	if len(b) == 4 {
		return fold(uint64(binary.LittleEndian.Uint32(b)))
	}
	return fold(sum(b, 0))
}

// rewriteSum follows a change of the pseudo-header in the checksum of a
// transport header, of which not all need be there, and returns the change of
// that field.
func rewriteSum(t []byte, proto uint8, by uint16, partial bool) uint16 {
	at := 16
	switch proto {
	case TCP:
	case UDP, udpLite, dccp:
		at = 6
	default:
		return 0
	}
	if len(t) < at+2 {
		return 0
	}
	field := t[at : at+2]
	was := binary.LittleEndian.Uint16(field)
	if partial {
		is := fold(uint64(was) + uint64(by))
		putSum(field, is)
		return change(was, is)
	}
	if proto == UDP && was == 0 {
		return 0
	}
	by = adjust(field, by)
	if proto == UDP && field[0] == 0 && field[1] == 0 {
		putSum(field, 0xffff)
	}
	return by
}

// rewriteICMP follows a change of an address, which is still the old one, in an
// ICMP message. ICMPv6 has a pseudo-header.
func rewriteICMP(b []byte, h *Header, source bool, was, is []byte, by uint16) {
	t := b[h.IPLen:]
	if len(t) < 4 {
		return
	}
	acc := uint64(0)
	if h.Version == 6 && h.Proto == ICMPv6 {
		acc = uint64(by)
	}
	q := quote(b, h)
	if inner, ok := readQuote(q); ok && inner.Version == h.Version {
		if at := address(q, !source); string(at) == string(was) {
			copy(at, is)
			acc += uint64(by)
			if inner.Version == 4 {
				acc += uint64(adjust(q[10:], by))
			}
			if inner.FragmentOffset == 0 {
				acc += uint64(rewriteQuotedSum(q[inner.IPLen:], &inner, by))
			}
		}
	}
	if acc != 0 {
		adjust(t[2:], fold(acc))
	}
}

// rewriteQuotedSum is rewriteSum for the packet within an ICMP error, which may
// be a ping.
func rewriteQuotedSum(t []byte, h *Header, by uint16) uint16 {
	if h.Version == 6 && h.Proto == ICMPv6 {
		if len(t) < 4 {
			return 0
		}
		return adjust(t[2:], by)
	}
	return rewriteSum(t, h.Proto, by, false)
}

// quote returns the quote of an ICMP error, nil if there is none.
func quote(b []byte, h *Header) []byte {
	t := b[h.IPLen:]
	if h.FragmentOffset != 0 || len(t) < icmpLen {
		return nil
	}
	switch {
	case h.Version == 4 && h.Proto == ICMP:
		switch t[0] {
		case icmp4Unreachable, icmp4SourceQuench, icmp4Redirect, icmp4Exceeded, icmp4Parameter:
			return t[icmpLen:]
		}
	case h.Version == 6 && h.Proto == ICMPv6 && t[0] < 128: // RFC 4443 section 2.1
		return t[icmpLen:]
	}
	return nil
}

// readQuote reads the headers at the start of a quote.
func readQuote(b []byte) (h Header, ok bool) {
	var err error // of an IPv6 header, of which the addresses are there
	switch {
	case len(b) >= ipv4Len && b[0]>>4 == 4:
		err = h.read4(b)
	case len(b) >= ipv6Len && b[0]>>4 == 6:
		err = h.read6(b)
	default:
		return h, false
	}
	if h.Version == 0 {
		return h, false
	}
	t := b[h.IPLen:]
	if err != nil {
		h.Proto = noNext
	} else if len(t) >= 4 && h.FragmentOffset == 0 && (h.Proto == TCP || h.Proto == UDP) {
		h.SrcPort = binary.BigEndian.Uint16(t)
		h.DstPort = binary.BigEndian.Uint16(t[2:])
	}
	return h, true
}
