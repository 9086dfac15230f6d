package packet

import "encoding/binary"

// ICMP and ICMPv6 echo.
const (
	echoReply4   = 0
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply6   = 129
)

// AnswerEcho makes an echo request (RFC 792, RFC 4443 section 4.1) into the
// reply, in place, and reports whether it was one. h is the packet's header.
// Fragments are none: who pings with more than fits a packet learns nothing from
// the answer.
func AnswerEcho(b []byte, h Header) bool {
	if h.Fragment || !h.Plain() || len(b) < h.IPLen+icmpLen {
		return false
	}
	t := b[h.IPLen:]
	var kind byte
	switch {
	case h.Proto == ICMP && h.Version == 4 && t[0] == echoRequest4 && t[1] == 0:
		kind = echoReply4
		swap(b[12:16], b[16:20])
		// The swap leaves the header's checksum as it is, the hop limit does not.
		was := binary.LittleEndian.Uint16(b[8:])
		b[8] = icmpHopLimit
		adjust(b[10:], change(was, binary.LittleEndian.Uint16(b[8:])))
	case h.Proto == ICMPv6 && h.Version == 6 && t[0] == echoRequest6 && t[1] == 0:
		kind = echoReply6
		swap(b[8:24], b[24:40])
		b[7] = icmpHopLimit
	default:
		return false
	}
	was := binary.LittleEndian.Uint16(t)
	t[0] = kind
	adjust(t[2:], change(was, binary.LittleEndian.Uint16(t)))
	return true
}

func swap(a, b []byte) {
	for i := range a {
		a[i], b[i] = b[i], a[i]
	}
}
