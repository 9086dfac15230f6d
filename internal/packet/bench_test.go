package packet

import (
	"bytes"
	"net/netip"
	"strconv"
	"testing"
)

func BenchmarkSum(b *testing.B) {
	for _, n := range []int{40, 1400, 65000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			buf := bytes.Repeat([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, n/10)
			b.SetBytes(int64(n))
			for b.Loop() {
				sum(buf, 0)
			}
		})
	}
}

func BenchmarkParse(b *testing.B) {
	for _, s := range []spec{{proto: TCP}, {v6: true, proto: UDP}} {
		b.Run("v6="+strconv.FormatBool(s.v6), func(b *testing.B) {
			p := s.build()
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(p); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkSplitCoalesce is a super-packet's way through a peer that carries
// single packets only: bytes a second of payload, allocations a super-packet.
func BenchmarkSplitCoalesce(b *testing.B) {
	s := spec{proto: TCP, flags: tcpACK, frag: 0x4000, ttl: 64, tcpOpts: make([]byte, 12), partial: true, payload: make([]byte, 1348*48)}
	orig := s.build()
	data := make([]byte, len(orig))
	pkts := make([]Packet, 64)
	arena := make([]byte, 1500*64)
	runs := 0
	var sp Splitter
	c := Coalescer{TCP: true, Emit: func(r *Run) { runs++ }}
	b.SetBytes(int64(len(s.payload)))
	b.ReportAllocs()
	for b.Loop() {
		copy(data, orig)
		p := Packet{Data: data, Segment: 1348, Flags: Partial}
		h, err := Parse(p.Data)
		if err != nil {
			b.Fatal(err)
		}
		sp.Reset(&p, h, 0)
		n := 0
		for seg := sp.Next(); seg != nil; seg = sp.Next() {
			at := arena[n*1500:]
			pkts[n] = Packet{Data: at[:copy(at, seg)]}
			n++
		}
		for i := range pkts[:n] {
			h, err := Parse(pkts[i].Data)
			if err != nil {
				b.Fatal(err)
			}
			c.Add(&pkts[i], h)
		}
		c.Flush()
	}
	if runs != b.N {
		b.Fatalf("%d runs of %d super-packets", runs, b.N)
	}
}

func BenchmarkRewrite(b *testing.B) {
	quoted := icmpError(spec{proto: TCP, src: "10.0.0.1"}, 3, "192.0.2.1", 0)
	for _, c := range []struct {
		name string
		p    Packet
		to   [2]netip.Addr
	}{
		{"tcp", Packet{Data: spec{proto: TCP}.build()}, [2]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.91.7.9")}},
		{"v6 super-packet", Packet{Data: spec{v6: true, proto: TCP, partial: true, payload: make([]byte, 60000)}.build(), Segment: 1400, Flags: Partial},
			[2]netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd91::7:9")}},
		{"error", Packet{Data: quoted}, [2]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.91.7.9")}},
	} {
		b.Run(c.name, func(b *testing.B) {
			h, err := Parse(c.p.Data)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				c.p.RewriteDestination(&h, c.to[i&1])
				i++
			}
		})
	}
}
