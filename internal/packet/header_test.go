package packet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParse(t *testing.T) {
	v4 := Header{Version: 4, HopLimit: 64, TrafficClass: 0xb9, Src: netip.MustParseAddr("10.1.2.3"), Dst: netip.MustParseAddr("192.0.2.77"), IPLen: 20, HeaderLen: 20}
	v6 := Header{Version: 6, HopLimit: 64, TrafficClass: 0xb9, Src: netip.MustParseAddr("fd00::1:2"), Dst: netip.MustParseAddr("2001:db8::99"), IPLen: 40, HeaderLen: 40}
	with := func(h Header, f func(*Header)) Header { f(&h); return h }
	frag6 := func(next uint8, at uint16) []byte {
		return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16([]byte{next, 0}, at), 7)
	}
	ports := func(n int) func(*Header) {
		return func(h *Header) { h.SrcPort, h.DstPort, h.HeaderLen = 0x1234, 443, h.IPLen+n }
	}
	base := spec{sport: 0x1234, dport: 443, ttl: 64, tos: 0xb9, payload: []byte("0123456789abcdef")}
	for _, c := range []struct {
		name string
		spec func(*spec)
		want Header
	}{
		{"ICMP", func(s *spec) { s.proto = ICMP }, with(v4, func(h *Header) { h.Proto = ICMP })},
		{"TCP", func(s *spec) { s.proto, s.frag = TCP, 0x4000 },
			with(v4, func(h *Header) { h.Proto, h.DontFragment = TCP, true; ports(20)(h) })},
		{"TCP options", func(s *spec) { s.proto, s.tcpOpts = TCP, make([]byte, 40) },
			with(v4, func(h *Header) { h.Proto = TCP; ports(60)(h) })},
		{"IPv4 options", func(s *spec) { s.proto, s.options = UDP, make([]byte, 40) },
			with(v4, func(h *Header) { h.Proto, h.IPLen = UDP, 60; ports(8)(h) })},
		{"first fragment", func(s *spec) { s.proto, s.frag = UDP, 0x2000 },
			with(v4, func(h *Header) { h.Proto, h.Fragment = UDP, true; ports(8)(h) })},
		{"last fragment", func(s *spec) { s.proto, s.frag = 99, 0x0010 },
			with(v4, func(h *Header) { h.Proto, h.Fragment, h.FragmentOffset = 99, true, 128 })},
		{"GRE", func(s *spec) { s.proto = 47 }, with(v4, func(h *Header) { h.Proto = 47 })},
		{"UDP over IPv6", func(s *spec) { s.v6, s.proto = true, UDP },
			with(v6, func(h *Header) { h.Proto = UDP; ports(8)(h) })},
		{"hop-by-hop and destination options", func(s *spec) {
			s.v6, s.proto, s.ext = true, TCP, hopByHop
			s.options = append([]byte{destOptions, 1, 1, 12, 15: 0}, TCP, 0, 1, 4, 0, 0, 0, 0)
		}, with(v6, func(h *Header) { h.Proto, h.IPLen = TCP, 64; ports(20)(h) })},
		{"authentication header", func(s *spec) { s.v6, s.proto, s.ext, s.options = true, 99, authHeader, []byte{99, 4, 23: 0} },
			with(v6, func(h *Header) { h.Proto, h.IPLen, h.HeaderLen = 99, 64, 64 })},
		{"IPv6 first fragment", func(s *spec) { s.v6, s.proto, s.ext, s.options = true, UDP, fragment, frag6(UDP, 1) },
			with(v6, func(h *Header) { h.Proto, h.IPLen, h.Fragment = UDP, 48, true; ports(8)(h) })},
		{"IPv6 atomic fragment", func(s *spec) { s.v6, s.proto, s.ext, s.options = true, UDP, fragment, frag6(UDP, 0) },
			with(v6, func(h *Header) { h.Proto, h.IPLen = UDP, 48; ports(8)(h) })},
		{"IPv6 later fragment of an extension header", func(s *spec) {
			s.v6, s.proto, s.ext, s.options = true, 99, fragment, frag6(destOptions, 0x100)
		}, with(v6, func(h *Header) {
			h.Proto, h.IPLen, h.HeaderLen, h.Fragment, h.FragmentOffset = destOptions, 48, 48, true, 256
		})},
		{"no next header", func(s *spec) { s.v6, s.proto = true, noNext }, with(v6, func(h *Header) { h.Proto = noNext })},
	} {
		s := base
		c.spec(&s)
		got, err := Parse(s.build())
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if d := cmp.Diff(c.want, got, cmpopts.EquateComparable(netip.Addr{})); d != "" {
			t.Errorf("%s:\n%s", c.name, d)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	tcp := spec{proto: TCP, flags: tcpACK, ttl: 64, payload: []byte("x")}.build()
	udp6 := spec{v6: true, proto: UDP, ttl: 64, payload: []byte("x")}.build()
	edit := func(b []byte, at int, v byte) []byte { b = bytes.Clone(b); b[at] = v; return b }
	var chain []byte
	for range maxExtensions {
		chain = append(chain, destOptions, 0, 1, 4, 0, 0, 0, 0)
	}
	chain = append(chain, UDP, 0, 1, 4, 0, 0, 0, 0)
	for name, c := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":                     {nil, errShort},
		"version 5":                 {edit(tcp, 0, 0x55), errVersion},
		"one byte":                  {tcp[:1], errShort},
		"half an IPv4 header":       {tcp[:19], errShort},
		"a byte less":               {tcp[:len(tcp)-1], errLength},
		"a byte more":               {append(bytes.Clone(tcp), 0), errLength},
		"IHL of 4":                  {edit(tcp, 0, 0x44), errHeader},
		"IHL beyond the end":        {edit(spec{proto: 99}.build(), 0, 0x4f), errShort},
		"data offset of 4":          {edit(tcp, 32, 0x40), errHeader},
		"data offset past the end":  {edit(tcp, 32, 0x60), errShort},
		"half a TCP header":         {spec{proto: 99, payload: make([]byte, 19)}.rewrite(9, TCP), errShort},
		"half a UDP header":         {spec{proto: 99, payload: make([]byte, 7)}.rewrite(9, UDP), errShort},
		"IPv6 a byte less":          {udp6[:len(udp6)-1], errLength},
		"IPv6 a byte more":          {append(bytes.Clone(udp6), 0), errLength},
		"half an IPv6 header":       {udp6[:39], errShort},
		"half an extension header":  {spec{v6: true, proto: hopByHop, payload: make([]byte, 7)}.build(), errShort},
		"extension past the end":    {spec{v6: true, proto: hopByHop, payload: []byte{UDP, 9, 15: 0}}.build(), errShort},
		"a chain without end":       {spec{v6: true, proto: UDP, ext: destOptions, options: chain}.build(), errExtensions},
		"half a header in IPv6 TCP": {spec{v6: true, proto: 99, payload: make([]byte, 19)}.rewrite(6, TCP), errShort},
	} {
		if _, err := Parse(c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	// A first fragment may end in the middle of the transport header.
	tiny := spec{proto: 99, frag: 0x2000, payload: make([]byte, 8)}.rewrite(9, TCP)
	if h, err := Parse(tiny); err != nil || h.HeaderLen != h.IPLen || h.SrcPort != 0 {
		t.Errorf("a tiny first fragment: %+v, %v", h, err)
	}
}

// rewrite builds the packet with one byte changed.
func (s spec) rewrite(at int, v byte) []byte {
	b := s.build()
	b[at] = v
	return b
}

func TestFlowHash(t *testing.T) {
	hash := func(s spec) uint32 { b := s.build(); return FlowHash(parse(t, b), b) }
	for _, v6 := range []bool{false, true} {
		s := spec{v6: v6, proto: TCP, flags: tcpACK, sport: 1000, dport: 80, ttl: 64, payload: []byte("a")}
		other := s
		other.seq, other.ttl, other.payload, other.tos, other.flow, other.id = 99, 3, []byte("bc"), 4, 5, 6
		if hash(s) != hash(other) {
			t.Errorf("v6=%v: packets of one flow differ", v6)
		}
		// Neighbouring flows spread over 16 values, of the highest bits and of
		// the lowest.
		high, low := map[uint32]int{}, map[uint32]int{}
		for port := range uint16(1024) {
			s.sport = 32768 + port
			high[hash(s)>>28]++
			low[hash(s)&15]++
		}
		for i := range uint32(16) {
			if high[i] < 32 || low[i] < 32 {
				t.Errorf("v6=%v: of 1024 flows %d have %d above, %d have it below", v6, high[i], i, low[i])
			}
		}
	}
	first := spec{proto: UDP, sport: 5, dport: 6, frag: 0x2000, payload: make([]byte, 16)}
	later := spec{proto: 99, frag: 0x0003, payload: []byte("other bytes here")}
	a, b := first.build(), later.rewrite(9, UDP)
	if FlowHash(parse(t, a), a) != FlowHash(parse(t, b), b) {
		t.Error("the fragments of a datagram differ")
	}
}

func TestDecrementHopLimit(t *testing.T) {
	for ttl := range 256 {
		for _, tos := range []uint8{0, 1, 0xff} {
			for id := 0; id < 0x10000; id += 0x0fff {
				s := spec{proto: UDP, ttl: uint8(ttl), tos: tos, id: uint16(id)}
				got, want := s.build(), s
				ok := DecrementHopLimit(got)
				if want.ttl--; ttl <= 1 {
					want.ttl = uint8(ttl)
				}
				if ok != (ttl > 1) || !bytes.Equal(got, want.build()) {
					t.Fatalf("ttl %d, tos %d, id %d: %v\n%x\n%x", ttl, tos, id, ok, got, want.build())
				}
			}
		}
		s := spec{v6: true, proto: UDP, ttl: uint8(ttl)}
		b := s.build()
		if ok := DecrementHopLimit(b); ok != (ttl > 1) || ok && b[7] != uint8(ttl-1) || !ok && b[7] != uint8(ttl) {
			t.Fatalf("hop limit %d became %d: %v", ttl, b[7], ok)
		}
	}
}
