package userspace

import (
	"encoding/binary"
	"net/netip"

	"github.com/quicvpn/quicvpn/internal/packet"
)

const (
	echoHeader   = 8
	echoReply4   = 0
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply6   = 129
	hopLimit     = 64
)

// isEcho reports whether a packet is an echo request (RFC 792, RFC 4443 section 4.1).
func isEcho(b []byte, h packet.Header) bool {
	if len(b) < h.IPLen+echoHeader {
		return false
	}
	kind, code := b[h.IPLen], b[h.IPLen+1]
	return code == 0 && (h.Version == 4 && h.Proto == packet.ICMP && kind == echoRequest4 ||
		h.Version == 6 && h.Proto == packet.ICMPv6 && kind == echoRequest6)
}

// appendEcho appends the reply that a socket has received, with the identifier that
// the client chose. It returns nil for what is no reply.
func appendEcho(dst []byte, from netip.Addr, k key, message []byte) []byte {
	reply := byte(echoReply6)
	if from.Is4() {
		reply = echoReply4
	}
	if len(message) < echoHeader || message[0] != reply {
		return nil
	}
	return appendICMP(dst, from, k.from.Addr(), k, reply, message)
}

// appendICMP appends a packet with an echo message of a kind.
func appendICMP(dst []byte, from, to netip.Addr, k key, kind byte, message []byte) []byte {
	start := len(dst)
	var pseudo uint32
	if from.Is4() {
		dst = append(dst, 0x45, 0)
		dst = binary.BigEndian.AppendUint16(dst, uint16(20+len(message)))
		dst = append(dst, 0, 0, 0, 0, hopLimit, packet.ICMP, 0, 0)
		dst = append(dst, from.AsSlice()...)
		dst = append(dst, to.AsSlice()...)
		binary.BigEndian.PutUint16(dst[start+10:], ^checksum(dst[start:], 0))
	} else {
		dst = append(dst, 0x60, 0, 0, 0)
		dst = binary.BigEndian.AppendUint16(dst, uint16(len(message)))
		dst = append(dst, packet.ICMPv6, hopLimit)
		dst = append(dst, from.AsSlice()...)
		dst = append(dst, to.AsSlice()...)
		pseudo = uint32(checksum(dst[start+8:], 0)) + packet.ICMPv6 + uint32(len(message))
	}
	t := len(dst)
	dst = append(dst, message...)
	dst[t], dst[t+2], dst[t+3] = kind, 0, 0
	binary.BigEndian.PutUint16(dst[t+4:], k.from.Port())
	binary.BigEndian.PutUint16(dst[t+2:], ^checksum(dst[t:], pseudo))
	return dst
}

// checksum returns the sum of RFC 1071, not inverted.
func checksum(b []byte, sum uint32) uint16 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
