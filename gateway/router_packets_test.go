package gateway

import (
	"encoding/binary"
	"net/netip"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// Packets for tests, with whole checksums.

func ip4(src, dst string, proto byte, payload []byte) []byte {
	return ipPacket(netip.MustParseAddr(src), netip.MustParseAddr(dst), proto, payload)
}

func ipPacket(src, dst netip.Addr, proto byte, payload []byte) []byte {
	var b []byte
	if src.Is4() {
		b = append(b, 0x45, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(20+len(payload)))
		b = append(b, 0, 0, 0x40, 0, 64, proto, 0, 0)
		b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
		binary.BigEndian.PutUint16(b[10:], ^onesSum(b, 0))
		return append(b, payload...)
	}
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(payload)))
	b = append(b, proto, 64)
	b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
	return append(b, payload...)
}

// transport fills in the checksum at an offset of a transport header and makes
// an IP packet of it.
func transport(src, dst netip.Addr, proto byte, sumAt int, t []byte) []byte {
	sum := uint32(0)
	if proto != packet.ICMP {
		pseudo := append(src.AsSlice(), dst.AsSlice()...)
		sum = uint32(onesSum(pseudo, uint32(proto)+uint32(len(t))))
	}
	binary.BigEndian.PutUint16(t[sumAt:], ^onesSum(t, sum))
	return ipPacket(src, dst, proto, t)
}

func udpPacket(src, dst netip.AddrPort, payload []byte) []byte {
	t := binary.BigEndian.AppendUint16(nil, src.Port())
	t = binary.BigEndian.AppendUint16(t, dst.Port())
	t = binary.BigEndian.AppendUint16(t, uint16(8+len(payload)))
	t = append(append(t, 0, 0), payload...)
	return transport(src.Addr(), dst.Addr(), packet.UDP, 6, t)
}

func tcpPacket(src, dst netip.AddrPort, seq, ack uint32, flags byte, payload []byte) []byte {
	t := binary.BigEndian.AppendUint16(nil, src.Port())
	t = binary.BigEndian.AppendUint16(t, dst.Port())
	t = binary.BigEndian.AppendUint32(t, seq)
	t = binary.BigEndian.AppendUint32(t, ack)
	t = append(t, 5<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
	return transport(src.Addr(), dst.Addr(), packet.TCP, 16, append(t, payload...))
}

const (
	echoReply4   = 0
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply6   = 129
)

func echoPacket(src, dst netip.Addr, id, seq uint16, payload []byte) []byte {
	proto, kind := byte(packet.ICMP), byte(echoRequest4)
	if src.Is6() {
		proto, kind = packet.ICMPv6, echoRequest6
	}
	t := []byte{kind, 0, 0, 0}
	t = binary.BigEndian.AppendUint16(t, id)
	t = binary.BigEndian.AppendUint16(t, seq)
	return transport(src, dst, proto, 2, append(t, payload...))
}

// onesSum is the folded sum of RFC 1071.
func onesSum(b []byte, sum uint32) uint16 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// checksumsHold verifies the checksums of an IP packet with one transport header.
func checksumsHold(b []byte) bool {
	h, err := packet.Parse(b)
	if err != nil {
		return false
	}
	if h.Version == 4 && onesSum(b[:h.IPLen], 0) != 0xffff {
		return false
	}
	sum := uint32(0)
	if h.Proto != packet.ICMP {
		pseudo := append(h.Src.AsSlice(), h.Dst.AsSlice()...)
		sum = uint32(onesSum(pseudo, uint32(h.Proto)+uint32(len(b)-h.IPLen)))
	}
	return onesSum(b[h.IPLen:], sum) == 0xffff
}

func swap(a, b []byte) {
	for i := range a {
		a[i], b[i] = b[i], a[i]
	}
}
