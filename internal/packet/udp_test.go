package packet

import (
	"bytes"
	"net/netip"
	"testing"
)

func TestAppendUDP(t *testing.T) {
	for _, ends := range [][2]string{{"192.168.1.1:53", "10.91.0.5:40000"}, {"[fe80::1]:53", "[fd12::5]:1"}} {
		from, to := netip.MustParseAddrPort(ends[0]), netip.MustParseAddrPort(ends[1])
		for n := range 1300 {
			payload := bytes.Repeat([]byte{byte(n), 0xff}, n)[:n]
			b := AppendUDP([]byte("kept"), from, to, payload)
			if string(b[:4]) != "kept" {
				t.Fatal("did not append")
			}
			b = b[4:]
			h := parse(t, b)
			if netip.AddrPortFrom(h.Src, h.SrcPort) != from || netip.AddrPortFrom(h.Dst, h.DstPort) != to ||
				h.Proto != UDP || h.HopLimit != 64 || h.DontFragment || !bytes.Equal(b[h.HeaderLen:], payload) {
				t.Fatalf("%d bytes: %+v", n, h)
			}
			if h.Version == 4 && naive(0, b[:20]) != 0xffff {
				t.Errorf("%d bytes: the header's checksum is wrong", n)
			}
			if sum := naive(naivePseudo(h.Src, h.Dst, UDP, len(b)-h.IPLen), b[h.IPLen:]); sum != 0xffff {
				t.Errorf("%d bytes: the checksum is wrong", n)
			}
		}
	}
}

func TestChecksumHolds(t *testing.T) {
	for name, s := range map[string]spec{
		"UDP": {proto: UDP, payload: []byte("odd")}, "TCP": {proto: TCP, payload: []byte("even")},
		"UDP, IPv6": {v6: true, proto: UDP}, "TCP, IPv6": {v6: true, proto: TCP, payload: []byte("x")},
	} {
		b := s.build()
		h := parse(t, b)
		p := Packet{Data: b}
		if !p.ChecksumHolds(h) {
			t.Errorf("%s: a good one does not hold", name)
		}
		b[len(b)-1] ^= 1
		if p.ChecksumHolds(h) {
			t.Errorf("%s: a bad one holds", name)
		}
		for _, f := range []Flags{Partial, Verified} {
			if p := (Packet{Data: b, Flags: f}); !p.ChecksumHolds(h) {
				t.Errorf("%s: the device's word does not count", name)
			}
		}
		if s.proto == UDP {
			b[h.IPLen+6], b[h.IPLen+7] = 0, 0
			if got := p.ChecksumHolds(h); got != !s.v6 {
				t.Errorf("%s without a checksum: %t", name, got)
			}
		}
	}
}
