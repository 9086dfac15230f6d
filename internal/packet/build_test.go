package packet

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
)

// A spec describes a packet for the tests.
type spec struct {
	v6       bool
	proto    uint8
	options  []byte // IPv4 options, or IPv6 extension headers that start with proto ext
	ext      uint8
	src, dst string
	sport    uint16
	dport    uint16
	id       uint16
	frag     uint16 // flags and offset
	ttl      uint8
	tos      uint8
	flow     uint32 // IPv6 flow label
	seq, ack uint32
	flags    uint8
	window   uint16
	urgent   uint16
	tcpOpts  []byte
	payload  []byte
	partial  bool
}

// naive is RFC 1071 word by word, to hold the fast one against.
func naive(acc uint32, b []byte) uint32 {
	for i := 0; i < len(b); i++ {
		if i%2 == 0 {
			acc += uint32(b[i]) << 8
		} else {
			acc += uint32(b[i])
		}
		acc = acc>>16 + acc&0xffff
	}
	return acc
}

func naivePseudo(src, dst netip.Addr, proto uint8, n int) uint32 {
	acc := naive(0, src.AsSlice())
	acc = naive(acc, dst.AsSlice())
	return naive(acc, []byte{0, proto, byte(n >> 8), byte(n)})
}

func (s spec) addrs() (netip.Addr, netip.Addr) {
	src, dst := s.src, s.dst
	if src == "" {
		src = "10.1.2.3"
		if s.v6 {
			src = "fd00::1:2"
		}
	}
	if dst == "" {
		dst = "192.0.2.77"
		if s.v6 {
			dst = "2001:db8::99"
		}
	}
	return netip.MustParseAddr(src), netip.MustParseAddr(dst)
}

func (s spec) build() []byte {
	src, dst := s.addrs()
	var t []byte
	at := 0
	switch s.proto {
	case TCP:
		t = binary.BigEndian.AppendUint16(t, s.sport)
		t = binary.BigEndian.AppendUint16(t, s.dport)
		t = binary.BigEndian.AppendUint32(t, s.seq)
		t = binary.BigEndian.AppendUint32(t, s.ack)
		t = append(t, byte((20+len(s.tcpOpts))/4)<<4, s.flags)
		t = binary.BigEndian.AppendUint16(t, s.window)
		t = append(t, 0, 0)
		t = binary.BigEndian.AppendUint16(t, s.urgent)
		t = append(t, s.tcpOpts...)
		at = 16
	case UDP:
		t = binary.BigEndian.AppendUint16(t, s.sport)
		t = binary.BigEndian.AppendUint16(t, s.dport)
		t = binary.BigEndian.AppendUint16(t, uint16(8+len(s.payload)))
		t = append(t, 0, 0)
		at = 6
	}
	t = append(t, s.payload...)
	if at > 0 {
		acc := naivePseudo(src, dst, s.proto, len(t))
		v := uint16(acc)
		if !s.partial {
			v = ^uint16(naive(acc, t))
			if v == 0 && s.proto == UDP {
				v = 0xffff
			}
		}
		binary.BigEndian.PutUint16(t[at:], v)
	}
	var b []byte
	if s.v6 {
		first := s.proto
		if len(s.options) > 0 {
			first = s.ext
		}
		b = binary.BigEndian.AppendUint32(b, 6<<28|uint32(s.tos)<<20|s.flow)
		b = binary.BigEndian.AppendUint16(b, uint16(len(s.options)+len(t)))
		b = append(b, first, s.ttl)
		b = append(b, src.AsSlice()...)
		b = append(b, dst.AsSlice()...)
		b = append(b, s.options...)
		return append(b, t...)
	}
	b = append(b, 0x45+byte(len(s.options)/4), s.tos)
	b = binary.BigEndian.AppendUint16(b, uint16(20+len(s.options)+len(t)))
	b = binary.BigEndian.AppendUint16(b, s.id)
	b = binary.BigEndian.AppendUint16(b, s.frag)
	b = append(b, s.ttl, s.proto, 0, 0)
	b = append(b, src.AsSlice()...)
	b = append(b, dst.AsSlice()...)
	b = append(b, s.options...)
	binary.BigEndian.PutUint16(b[10:], ^uint16(naive(0, b)))
	return append(b, t...)
}

// sealICMP builds a packet of ICMP or ICMPv6 and computes its checksum.
func sealICMP(s spec) []byte {
	b := s.build()
	t := b[len(b)-len(s.payload):]
	t[2], t[3] = 0, 0
	acc := uint32(0)
	if s.proto == ICMPv6 {
		src, dst := s.addrs()
		acc = naivePseudo(src, dst, ICMPv6, len(t))
	}
	binary.BigEndian.PutUint16(t[2:], ^uint16(naive(acc, t)))
	return b
}

// segments is a splitter that is obviously right: it builds every segment from
// the description of the whole.
func (s spec) segments(size int) [][]byte {
	var out [][]byte
	for off := 0; off < len(s.payload); off += size {
		p := s
		p.partial = false
		p.payload = s.payload[off:min(off+size, len(s.payload))]
		p.id = s.id + uint16(off/size)
		p.seq = s.seq + uint32(off)
		if off > 0 {
			p.flags &^= tcpCWR
		}
		if off+size < len(s.payload) {
			p.flags &^= tcpFIN | tcpPSH
		}
		out = append(out, p.build())
	}
	return out
}

func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// randomSpec describes a super-packet that can be joined again.
func randomSpec(r *rand.Rand) (spec, int) {
	s := spec{
		v6: r.IntN(2) == 0, proto: TCP, sport: uint16(r.Uint32()), dport: uint16(r.Uint32()),
		id: uint16(r.Uint32()), ttl: uint8(1 + r.IntN(255)), tos: uint8(r.Uint32()),
		flow: r.Uint32() & 0xfffff, seq: r.Uint32(), ack: r.Uint32(), flags: tcpACK,
		window: uint16(r.Uint32()), partial: true,
	}
	if r.IntN(2) == 0 {
		s.frag = 0x4000
	}
	if r.IntN(2) == 0 {
		s.flags |= tcpPSH
	}
	if r.IntN(4) == 0 {
		s.flags |= tcpECE
	}
	s.tcpOpts = randomBytes(r, 4*r.IntN(11))
	if r.IntN(3) == 0 {
		s.proto = UDP
	}
	size := 1 + r.IntN(1500)
	s.payload = randomBytes(r, size+1+r.IntN(min(size*(maxPieces-1), 65000-size)))
	return s, size
}
