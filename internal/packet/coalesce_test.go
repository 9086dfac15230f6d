package packet

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
)

// coalesce puts packets in and returns what comes out.
func coalesce(t *testing.T, in []Packet) []Packet {
	t.Helper()
	var outs []Packet
	c := Coalescer{TCP: true, UDP: true, Emit: func(r *Run) {
		outs = append(outs, Packet{bytes.Join(r.Pieces, nil), r.Segment, r.Flags})
	}}
	for i := range in {
		c.Add(&in[i], parse(t, in[i].Data))
	}
	c.Flush()
	return outs
}

func singles(specs ...spec) []Packet {
	var out []Packet
	for _, s := range specs {
		out = append(out, Packet{Data: s.build()})
	}
	return out
}

// What must not be joined is not.
func TestCoalesceKeepsApart(t *testing.T) {
	tcp := spec{proto: TCP, sport: 1, dport: 2, id: 5, frag: 0x4000, ttl: 64, seq: 1000, ack: 9, flags: tcpACK, window: 50, tcpOpts: []byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2}, payload: make([]byte, 100)}
	udp := spec{proto: UDP, sport: 1, dport: 2, id: 5, frag: 0x4000, ttl: 64, payload: make([]byte, 100)}
	tcp6, udp6 := tcp, udp
	tcp6.v6, udp6.v6 = true, true
	noDF := tcp
	noDF.frag = 0
	for name, c := range map[string]struct {
		base   spec
		change func(a, b *spec)
	}{
		"gap":                   {tcp, func(a, b *spec) { b.seq++ }},
		"repetition":            {tcp, func(a, b *spec) { b.seq = a.seq }},
		"acknowledgement":       {tcp, func(a, b *spec) { b.ack++ }},
		"window":                {tcp, func(a, b *spec) { b.window++ }},
		"timestamp":             {tcp, func(a, b *spec) { b.tcpOpts = []byte{1, 1, 8, 10, 0, 0, 0, 2, 0, 0, 0, 2} }},
		"fewer options":         {tcp, func(a, b *spec) { b.tcpOpts = nil }},
		"source port":           {tcp, func(a, b *spec) { b.sport++ }},
		"destination":           {tcp, func(a, b *spec) { b.dst = "192.0.2.78" }},
		"source, IPv6":          {tcp6, func(a, b *spec) { b.src = "fd00::2:2" }},
		"TTL":                   {tcp, func(a, b *spec) { b.ttl-- }},
		"ECN":                   {tcp, func(a, b *spec) { b.tos = 3 }},
		"DF":                    {tcp, func(a, b *spec) { b.frag = 0 }},
		"identification":        {noDF, func(a, b *spec) { b.id++ }},
		"hop limit":             {tcp6, func(a, b *spec) { b.ttl-- }},
		"traffic class":         {tcp6, func(a, b *spec) { b.tos = 4 }},
		"flow label":            {tcp6, func(a, b *spec) { b.flow = 1 }},
		"PSH ends a run":        {tcp, func(a, b *spec) { a.flags |= tcpPSH }},
		"FIN":                   {tcp, func(a, b *spec) { b.flags |= tcpFIN }},
		"CWR":                   {tcp, func(a, b *spec) { a.flags |= tcpCWR }},
		"ECE appears":           {tcp, func(a, b *spec) { b.flags |= tcpECE }},
		"URG":                   {tcp, func(a, b *spec) { a.flags |= tcpURG; b.flags |= tcpURG }},
		"SYN":                   {tcp, func(a, b *spec) { a.flags |= tcpSYN }},
		"no ACK":                {tcp, func(a, b *spec) { a.flags, b.flags = 0, 0 }},
		"larger than the first": {tcp, func(a, b *spec) { b.payload = make([]byte, 101) }},
		"pure acknowledgement":  {tcp, func(a, b *spec) { b.payload = nil }},
		"IPv4 options":          {tcp, func(a, b *spec) { a.options, b.options = make([]byte, 4), make([]byte, 4) }},
		"UDP larger":            {udp, func(a, b *spec) { b.payload = make([]byte, 101) }},
		"UDP port":              {udp, func(a, b *spec) { b.dport++ }},
		"UDP TTL":               {udp6, func(a, b *spec) { b.ttl-- }},
		"UDP empty":             {udp, func(a, b *spec) { a.payload, b.payload = nil, nil }},
		"another protocol": {udp, func(a, b *spec) {
			a.proto, b.proto = 136, 136
			a.payload, b.payload = make([]byte, 108), make([]byte, 108)
		}},
		"IPv6 extension headers": {udp6, func(a, b *spec) { a.options = []byte{UDP, 0, 1, 4, 0, 0, 0, 0}; b.options = a.options }},
	} {
		a := c.base
		b := a
		b.id, b.seq = a.id+1, a.seq+uint32(len(a.payload))
		if got := coalesce(t, singles(a, b)); len(got) != 1 {
			t.Fatalf("%s: the test's own packets are not joined", name)
		}
		c.change(&a, &b)
		in := singles(a, b)
		if d := diff(datas(in), datas(coalesce(t, slices.Clone(in)))); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
	}
}

func datas(ps []Packet) [][]byte {
	var out [][]byte
	for _, p := range ps {
		out = append(out, p.Data)
	}
	return out
}

// A checksum that is wrong, or none, must not be made right by joining.
func TestCoalesceKeepsWrongChecksums(t *testing.T) {
	for _, base := range []spec{
		{proto: TCP, flags: tcpACK, ttl: 64, frag: 0x4000, payload: make([]byte, 100)},
		{proto: UDP, ttl: 64, frag: 0x4000, payload: make([]byte, 100)},
		{v6: true, proto: TCP, flags: tcpACK, ttl: 64, payload: make([]byte, 100)},
	} {
		next := base
		next.seq, next.id = 100, 1
		for _, at := range []int{-1, 10, 26, 50} {
			for which := range 2 {
				in := singles(base, next)
				b := in[which].Data
				switch {
				case at >= 0:
					b[at] ^= 0x10
				case base.proto == UDP:
					b[26], b[27] = 0, 0
				}
				want := 2
				if at < 0 && base.proto == TCP {
					want = 1 // unchanged: joined
				}
				if at == 26 && base.v6 || at == 10 && base.v6 {
					want = 2 // an address: another flow, and a wrong sum
				}
				if got := coalesce(t, in); len(got) != want {
					t.Errorf("%+v: byte %d of packet %d: %d come out, want %d", base, at, which, len(got), want)
				}
			}
		}
	}
}

func TestCoalesceBounds(t *testing.T) {
	s := spec{proto: TCP, flags: tcpACK, frag: 0x4000, ttl: 64, payload: make([]byte, 9000)}
	var in []spec
	for i := range 20 {
		s.seq, s.id = uint32(9000*i), uint16(i)
		in = append(in, s)
	}
	for i, p := range coalesce(t, singles(in...)) {
		if len(p.Data) > 65535 || len(p.Data) < 9000*6 && i < 2 {
			t.Errorf("%d bytes", len(p.Data))
		}
	}
	s.payload = make([]byte, 10)
	in = in[:0]
	for i := range 2*maxPieces + 1 {
		s.seq, s.id = uint32(10*i), uint16(i)
		in = append(in, s)
	}
	got := coalesce(t, singles(in...))
	if len(got) != 3 || len(got[0].Data) != 40+10*maxPieces || got[2].Segment != 0 {
		t.Errorf("%d come out of %d", len(got), len(in))
	}
}

// Many flows at once, with everything among them that may come: every flow's
// packets come out in their order, whole and unchanged once split again.
func TestCoalesceKeepsOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 100 {
		flows := make([]spec, 1+r.IntN(40))
		for i := range flows {
			flows[i], _ = randomSpec(r)
			flows[i].partial = false
			flows[i].frag = 0
		}
		in := make([]Packet, 0, 400)
		want := map[uint32][][]byte{}
		for len(in) < cap(in) {
			f := &flows[r.IntN(len(flows))]
			for range 1 + r.IntN(5) {
				f.payload = randomBytes(r, []int{100, 100, 100, 60, 0}[r.IntN(5)])
				f.flags = []uint8{tcpACK, tcpACK, tcpACK | tcpPSH, tcpACK | tcpFIN}[r.IntN(4)]
				b := f.build()
				f.seq += uint32(len(f.payload))
				f.id++
				in = append(in, Packet{Data: b})
				key := FlowHash(parse(t, b), b)
				want[key] = append(want[key], bytes.Clone(b))
			}
		}
		got := map[uint32][][]byte{}
		joined := 0
		for _, p := range coalesce(t, in) {
			key := FlowHash(parse(t, p.Data), p.Data)
			if p.Segment != 0 {
				joined++
			}
			got[key] = append(got[key], split(t, p, 0)...)
		}
		for key := range want {
			if d := diff(want[key], got[key]); d != "" {
				t.Fatal(d)
			}
		}
		if joined == 0 {
			t.Fatal("nothing was joined")
		}
	}
}

// A super-packet or a fragment does not overtake what is held back.
func TestCoalesceFlushesBeforeWhatItCannotJoin(t *testing.T) {
	one := spec{proto: UDP, sport: 1, dport: 2, ttl: 64, payload: make([]byte, 100)}
	super := one
	super.payload, super.partial = make([]byte, 300), true
	frag := one
	frag.frag = 0x2000
	for _, p := range []Packet{{super.build(), 100, Partial}, {Data: frag.build()}, {Data: spec{proto: 99, frag: 3}.rewrite(9, UDP)}} {
		in := append(singles(one), p)
		if d := diff(datas(in), datas(coalesce(t, slices.Clone(in)))); d != "" {
			t.Error(d)
		}
	}
}

func TestCoalesceWithoutOffload(t *testing.T) {
	a := spec{proto: TCP, flags: tcpACK, frag: 0x4000, ttl: 64, payload: make([]byte, 100)}
	b := a
	b.seq, b.id = 100, 1
	n := 0
	c := Coalescer{Emit: func(r *Run) { n++ }}
	for _, p := range singles(a, b) {
		c.Add(&p, parse(t, p.Data))
	}
	if n != 2 {
		t.Errorf("%d came out before the flush", n)
	}
}
