package packet

import (
	"encoding/binary"
	"net/netip"
)

// An Unreachable says why a destination is unreachable, for both IP versions.
type Unreachable uint8

const (
	NoRoute         Unreachable = iota // RFC 792 code 0, RFC 4443 code 0
	HostUnreachable                    // RFC 792 code 1, RFC 4443 code 3
	AdminProhibited                    // RFC 1812 code 13, RFC 4443 code 1
	PortUnreachable                    // RFC 792 code 3, RFC 4443 code 4
)

const (
	icmp4Unreachable  = 3
	icmp4SourceQuench = 4
	icmp4Redirect     = 5
	icmp4Exceeded     = 11
	icmp4Parameter    = 12
	icmp6Unreachable  = 1
	icmp6TooBig       = 2
	icmp6Exceeded     = 3
	icmp6Redirect     = 137

	icmpLen        = 8
	icmpHopLimit   = 64
	icmpPrecedence = 0xc0 // internetwork control, RFC 1812 section 4.3.2.5

	// The longest errors: RFC 1812 section 4.3.2.3, RFC 4443 section 2.4(c).
	maxICMP4 = 576
	maxICMP6 = 1280
)

// AppendTooBig appends the ICMP error that tells the sender of orig the largest
// packet which the path carries: fragmentation needed (RFC 1191 section 4) or
// packet too big (RFC 4443 section 3.2).
//
// Like the other Append functions it returns nil where orig must not be
// answered: ICMP errors, fragments other than the first, packets whose source
// is not one host, packets to many hosts (RFC 1122 section 3.2.2, RFC 4443
// section 2.4(e)), and packets of another IP version than from. To limit their
// rate is the caller's part. They quote no more of a super-packet than of a
// packet, so that it can be given whole.
func AppendTooBig(dst, orig []byte, from netip.Addr, mtu int) []byte {
	if from.Is4() {
		return appendICMP(dst, orig, from, icmp4Unreachable, 4, uint32(min(max(mtu, 0), 0xffff)))
	}
	return appendICMP(dst, orig, from, icmp6TooBig, 0, uint32(max(mtu, 0)))
}

// AppendTimeExceeded appends the ICMP error for a hop limit that ran out.
func AppendTimeExceeded(dst, orig []byte, from netip.Addr) []byte {
	if from.Is4() {
		return appendICMP(dst, orig, from, icmp4Exceeded, 0, 0)
	}
	return appendICMP(dst, orig, from, icmp6Exceeded, 0, 0)
}

// AppendUnreachable appends the ICMP error destination unreachable.
func AppendUnreachable(dst, orig []byte, from netip.Addr, why Unreachable) []byte {
	if from.Is4() {
		return appendICMP(dst, orig, from, icmp4Unreachable, [...]uint8{0, 1, 13, 3}[why], 0)
	}
	return appendICMP(dst, orig, from, icmp6Unreachable, [...]uint8{0, 3, 1, 4}[why], 0)
}

// appendICMP appends an error whose last four header bytes are rest.
func appendICMP(dst, orig []byte, from netip.Addr, kind, code uint8, rest uint32) []byte {
	h, err := Parse(orig)
	if err != nil || !answerable(orig, &h, kind) {
		return nil
	}
	start := len(dst)
	if h.Version == 4 {
		if !from.Is4() {
			return nil
		}
		quote := orig[:min(len(orig), maxICMP4-ipv4Len-icmpLen)]
		dst = append(dst, 0x45, icmpPrecedence)
		dst = binary.BigEndian.AppendUint16(dst, uint16(ipv4Len+icmpLen+len(quote)))
		dst = append(dst, 0, 0, 0x40, 0, icmpHopLimit, ICMP, 0, 0)
		dst = append(dst, from.AsSlice()...)
		dst = append(dst, h.Src.AsSlice()...)
		setIPv4Checksum(dst[start:], ipv4Len)
		dst = append(dst, kind, code, 0, 0)
		dst = binary.BigEndian.AppendUint32(dst, rest)
		dst = append(dst, quote...)
		t := dst[start+ipv4Len:]
		putSum(t[2:], ^fold(sum(t, 0)))
		return dst
	}
	if !from.Is6() || from.Is4In6() {
		return nil
	}
	quote := orig[:min(len(orig), maxICMP6-ipv6Len-icmpLen)]
	dst = append(dst, 0x60, 0, 0, 0)
	dst = binary.BigEndian.AppendUint16(dst, uint16(icmpLen+len(quote)))
	dst = append(dst, ICMPv6, icmpHopLimit)
	dst = append(dst, from.AsSlice()...)
	dst = append(dst, h.Src.AsSlice()...)
	dst = append(dst, kind, code, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, rest)
	dst = append(dst, quote...)
	b := dst[start:]
	t := b[ipv6Len:]
	putSum(t[2:], ^fold(sum(t, pseudo(b, ICMPv6, len(t)))))
	return dst
}

// answerable reports whether a packet may be answered with an error of a kind.
func answerable(b []byte, h *Header, kind uint8) bool {
	if h.FragmentOffset != 0 || h.Src.IsUnspecified() || h.Src.IsMulticast() || h.Src.IsLoopback() {
		return false
	}
	t := b[h.IPLen:]
	if h.Version == 4 {
		src, dst := h.Src.As4(), h.Dst.As4()
		if src[0] == 0 || src[0] >= 240 || dst[0] >= 224 {
			return false
		}
		return h.Proto != ICMP || len(t) > 0 && icmp4Query(t[0])
	}
	// RFC 4443 section 2.4(e.3): path MTU discovery is for multicast too.
	if h.Dst.IsMulticast() && kind != icmp6TooBig {
		return false
	}
	return h.Proto != ICMPv6 || len(t) > 0 && t[0] >= 128 && t[0] != icmp6Redirect
}

// icmp4Query reports whether an ICMP type is a question or its answer: echo,
// router discovery, timestamp, information, address mask, extended echo. What
// is not known to be one may be an error.
func icmp4Query(t uint8) bool {
	switch t {
	case 0, 8, 9, 10, 13, 14, 15, 16, 17, 18, 42, 43:
		return true
	}
	return false
}
