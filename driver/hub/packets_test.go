package hub

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// Packets for tests, with whole checksums.

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

// udp is a datagram from port 1000.
func udp(src, dst netip.Addr, port uint16, payload string) []byte {
	return udpPacket(netip.AddrPortFrom(src, 1000), netip.AddrPortFrom(dst, port), payload)
}

func udpPacket(src, dst netip.AddrPort, payload string) []byte {
	t := binary.BigEndian.AppendUint16(nil, src.Port())
	t = binary.BigEndian.AppendUint16(t, dst.Port())
	t = binary.BigEndian.AppendUint16(t, uint16(8+len(payload)))
	t = append(append(t, 0, 0), payload...)
	return transport(src.Addr(), dst.Addr(), packet.UDP, 6, t)
}

func tcp(src, dst netip.AddrPort, payload []byte) []byte {
	t := binary.BigEndian.AppendUint16(nil, src.Port())
	t = binary.BigEndian.AppendUint16(t, dst.Port())
	t = append(t, 0, 0, 0, 1, 0, 0, 0, 1, 5<<4, 0x10, 0xff, 0xff, 0, 0, 0, 0)
	return transport(src.Addr(), dst.Addr(), packet.TCP, 16, append(t, payload...))
}

// icmp is an ICMP message of a type that has the same code in both IP versions.
func icmp(src, dst netip.Addr, kind4, kind6 byte, payload []byte) []byte {
	proto, kind := byte(packet.ICMP), kind4
	if src.Is6() {
		proto, kind = packet.ICMPv6, kind6
	}
	return transport(src, dst, proto, 2, append([]byte{kind, 0, 0, 0, 0, 1, 0, 1}, payload...))
}

func ping(src, dst netip.Addr) []byte { return icmp(src, dst, 8, 128, []byte("ping")) }

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

func single(b ...[]byte) (pkts []packet.Packet) {
	for _, p := range b {
		pkts = append(pkts, packet.Packet{Data: p})
	}
	return pkts
}

// describe says what a packet is.
func describe(b []byte) string {
	h, err := packet.Parse(b)
	if err != nil {
		return err.Error()
	}
	if h.Proto != packet.ICMP && h.Proto != packet.ICMPv6 {
		return fmt.Sprintf("%v > %v:%d", h.Src, h.Dst, h.DstPort)
	}
	t := b[h.IPLen:]
	s := fmt.Sprintf("%v > %v icmp %d/%d", h.Src, h.Dst, t[0], t[1])
	if q, ok := packet.Quoted(b, h); ok {
		s += fmt.Sprintf(" about %v > %v:%d", q.Src, q.Dst, q.DstPort)
	}
	return s
}

// A recorder keeps what is sent.
type recorder struct {
	mu     sync.Mutex
	calls  int
	queues []int
	pkts   []packet.Packet
}

func (r *recorder) Send(queue int, pkts []packet.Packet, _ tunnel.Sink) { r.WritePackets(queue, pkts) }

func (r *recorder) WritePackets(queue int, pkts []packet.Packet) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls++
	for _, p := range pkts {
		p.Data = bytes.Clone(p.Data)
		r.pkts = append(r.pkts, p)
		r.queues = append(r.queues, queue)
	}
}

// take returns what was sent since the last time.
func (r *recorder) take() []packet.Packet {
	r.mu.Lock()
	defer r.mu.Unlock()
	pkts := r.pkts
	r.pkts, r.queues, r.calls = nil, nil, 0
	return pkts
}
