package packet

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func parse(t *testing.T, b []byte) Header {
	t.Helper()
	h, err := Parse(b)
	if err != nil {
		t.Fatalf("parse %x: %v", b, err)
	}
	return h
}

func split(t *testing.T, p Packet, segment int) [][]byte {
	t.Helper()
	var s Splitter
	s.Reset(&p, parse(t, p.Data), segment)
	var out [][]byte
	for b := s.Next(); b != nil; b = s.Next() {
		out = append(out, bytes.Clone(b))
		clear(b) // what is handed out may be written to
	}
	return out
}

// diff is cmp.Diff, quick where there is no difference.
func diff(want, got [][]byte) string {
	if slices.EqualFunc(want, got, bytes.Equal) {
		return ""
	}
	return cmp.Diff(want, got)
}

// What a splitter cuts is what the description of every segment says, and what
// a coalescer makes of it is the super-packet again.
func TestSplitThenCoalesce(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 3000 {
		s, size := randomSpec(r)
		super := Packet{Data: s.build(), Segment: uint16(size), Flags: Partial}
		want := s.segments(size)
		got := split(t, Packet{Data: bytes.Clone(super.Data), Segment: super.Segment, Flags: super.Flags}, 0)
		if d := diff(want, got); d != "" {
			t.Fatalf("case %d, %+v in segments of %d:\n%s", i, s, size, d)
		}
		var outs []Packet
		c := Coalescer{TCP: true, UDP: true, Emit: func(r *Run) {
			outs = append(outs, Packet{bytes.Join(r.Pieces, nil), r.Segment, r.Flags})
		}}
		for j := range got {
			p := Packet{Data: got[j]}
			c.Add(&p, parse(t, p.Data))
		}
		c.Flush()
		if len(outs) != 1 || !bytes.Equal(outs[0].Data, super.Data) || outs[0].Segment != super.Segment || outs[0].Flags != super.Flags {
			t.Fatalf("case %d, %+v coalesced from segments of %d:\n%s", i, s, size, cmp.Diff([]Packet{super}, outs))
		}
	}
}

func TestSplitCases(t *testing.T) {
	payload := bytes.Repeat([]byte("quic"), 1000)
	hop := []byte{TCP, 0, 1, 4, 0, 0, 0, 0}
	hopUDP := []byte{UDP, 0, 1, 4, 0, 0, 0, 0}
	for name, s := range map[string]spec{
		"fin and psh on the last, cwr on the first": {proto: TCP, flags: tcpACK | tcpPSH | tcpFIN | tcpCWR, ttl: 64},
		"sequence number wraps":                     {proto: TCP, seq: 0xffffff00, flags: tcpACK, ttl: 64},
		"identification wraps":                      {proto: UDP, id: 0xffff, ttl: 64},
		"IPv4 options":                              {proto: TCP, options: []byte{0x94, 4, 0, 0}, flags: tcpACK, ttl: 64},
		"IPv6 hop-by-hop, TCP":                      {v6: true, proto: TCP, ext: 0, options: hop, flags: tcpACK, ttl: 64},
		"IPv6 hop-by-hop, UDP":                      {v6: true, proto: UDP, ext: 0, options: hopUDP, ttl: 64},
		"urgent":                                    {proto: TCP, flags: tcpACK | tcpURG, urgent: 7, ttl: 64},
		"all ones":                                  {proto: TCP, src: "223.255.255.255", dst: "223.255.255.254", sport: 0xffff, dport: 0xffff, seq: 0xffffffff, ack: 0xffffffff, tos: 0xff, window: 0xffff, flags: tcpACK, id: 0xffff, ttl: 255},
	} {
		for _, size := range []int{1, 7, 536, 1348, 3999} {
			for _, partial := range []bool{true, false} {
				s.payload, s.partial = payload, partial
				p := Packet{Data: s.build(), Segment: uint16(size)}
				if partial {
					p.Flags = Partial
				}
				if d := diff(s.segments(size), split(t, p, 0)); d != "" {
					t.Errorf("%s, segments of %d:\n%s", name, size, d)
				}
			}
		}
	}
}

// With a routing header the transport checksum is that of the last destination,
// which only the sender's partial sum tells.
func TestSplitKeepsTheSendersPseudoHeader(t *testing.T) {
	s := spec{v6: true, proto: UDP, dst: "2001:db8::1", ttl: 9, payload: bytes.Repeat([]byte{1, 2, 3}, 900), partial: true}
	final := s
	final.dst = "2001:db8::2"
	rh := append([]byte{UDP, 2, 0, 1, 0, 0, 0, 0}, final.build()[24:40]...)
	s.options, s.ext = rh, routing
	p := Packet{Data: s.build(), Segment: 1000, Flags: Partial}
	copy(p.Data[64+6:], final.build()[40+6:40+8])
	got := split(t, p, 0)
	want := final.segments(1000)
	if len(got) != len(want) {
		t.Fatalf("%d segments, want %d", len(got), len(want))
	}
	for i := range got {
		if d := cmp.Diff(want[i][40:], got[i][64:]); d != "" {
			t.Errorf("segment %d:\n%s", i, d)
		}
	}
}

func TestSplitSmallerForAPathThatShrank(t *testing.T) {
	tcp := spec{proto: TCP, flags: tcpACK | tcpPSH, ttl: 64, partial: true, payload: bytes.Repeat([]byte{7}, 5000)}
	if d := diff(tcp.segments(1200), split(t, Packet{tcp.build(), 1400, Partial}, 1200)); d != "" {
		t.Errorf("a super-packet:\n%s", d)
	}
	if d := diff(tcp.segments(1400), split(t, Packet{tcp.build(), 1400, Partial}, 1500)); d != "" {
		t.Errorf("segments must not grow:\n%s", d)
	}
	tcp.payload = tcp.payload[:1400]
	if d := diff(tcp.segments(1200), split(t, Packet{tcp.build(), 0, Partial}, 1200)); d != "" {
		t.Errorf("a single packet:\n%s", d)
	}
	udp := spec{proto: UDP, ttl: 64, partial: true, payload: bytes.Repeat([]byte{7}, 5000)}
	if d := diff(udp.segments(1400), split(t, Packet{udp.build(), 1400, Partial}, 1200)); d != "" {
		t.Errorf("datagrams are their sender's:\n%s", d)
	}
}

func TestSplitOfWhatIsWhole(t *testing.T) {
	for name, s := range map[string]spec{
		"TCP":               {proto: TCP, flags: tcpACK, ttl: 64, payload: []byte("hello")},
		"UDP":               {proto: UDP, ttl: 64, payload: []byte("hello")},
		"SYN with data":     {proto: TCP, flags: tcpSYN, ttl: 64, payload: []byte("hello")},
		"ICMP":              {proto: ICMP, ttl: 64, payload: []byte("hello, world")},
		"no payload":        {proto: TCP, flags: tcpACK, ttl: 64},
		"fragment, no cut":  {proto: 99, frag: 0x2000, ttl: 64, payload: []byte("hello")},
		"fragment, offset":  {proto: 99, frag: 0x0004, ttl: 64, payload: []byte("hello")},
		"UDP over IPv6":     {v6: true, proto: UDP, ttl: 64, payload: []byte("hello")},
		"unknown transport": {v6: true, proto: 132, ttl: 64, payload: []byte("hello")},
	} {
		full := s.build()
		s.partial = s.proto == TCP || s.proto == UDP
		for _, segment := range []uint16{0, 5, 2000} {
			p := Packet{Data: s.build(), Segment: segment}
			if s.partial {
				p.Flags = Partial
			}
			if d := diff([][]byte{full}, split(t, p, 0)); d != "" {
				t.Errorf("%s, segment %d:\n%s", name, segment, d)
			}
		}
	}
}
