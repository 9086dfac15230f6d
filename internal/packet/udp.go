package packet

import (
	"encoding/binary"
	"net/netip"
)

// udpHopLimit is that of datagrams that start here.
const udpHopLimit = 64

// AppendUDP appends a datagram between addresses of one IP version. Routers may
// fragment one of IPv4. Its payload is at most 65,507 bytes long.
func AppendUDP(dst []byte, from, to netip.AddrPort, payload []byte) []byte {
	start := len(dst)
	n := udpLen + len(payload)
	if from.Addr().Is4() {
		dst = append(dst, 0x45, 0)
		dst = binary.BigEndian.AppendUint16(dst, uint16(ipv4Len+n))
		dst = append(dst, 0, 0, 0, 0, udpHopLimit, UDP, 0, 0)
	} else {
		dst = append(dst, 0x60, 0, 0, 0)
		dst = binary.BigEndian.AppendUint16(dst, uint16(n))
		dst = append(dst, UDP, udpHopLimit)
	}
	dst = append(dst, from.Addr().AsSlice()...)
	dst = append(dst, to.Addr().AsSlice()...)
	b := len(dst)
	dst = binary.BigEndian.AppendUint16(dst, from.Port())
	dst = binary.BigEndian.AppendUint16(dst, to.Port())
	dst = binary.BigEndian.AppendUint16(dst, uint16(n))
	dst = append(dst, 0, 0)
	dst = append(dst, payload...)
	if from.Addr().Is4() {
		setIPv4Checksum(dst[start:], ipv4Len)
	}
	putSum(dst[b+6:], finish(sum(dst[b:], pseudo(dst[start:], UDP, n)), UDP))
	return dst
}

// ChecksumHolds reports whether a TCP or UDP packet that is no fragment is as its
// sender made it, as far as its checksum tells: a device may have checked that or
// left it to others to write, and IPv4 knows datagrams without (RFC 768).
func (p *Packet) ChecksumHolds(h Header) bool {
	t := p.Data[h.IPLen:]
	none := h.Version == 4 && h.Proto == UDP && t[6] == 0 && t[7] == 0
	return p.Flags&(Partial|Verified) != 0 || none || validChecksum(p.Data, &h)
}
