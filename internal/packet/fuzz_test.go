package packet

import (
	"bytes"
	"net/netip"
	"testing"
)

func seeds(f *testing.F) {
	payload := bytes.Repeat([]byte("payload "), 200)
	for _, s := range []spec{
		{proto: TCP, flags: tcpACK | tcpPSH, payload: payload, tcpOpts: make([]byte, 12)},
		{proto: UDP, payload: payload},
		{v6: true, proto: TCP, flags: tcpACK, payload: payload},
		{v6: true, proto: UDP, payload: payload, ext: hopByHop, options: []byte{UDP, 0, 1, 4, 0, 0, 0, 0}},
		{v6: true, proto: 99, ext: fragment, options: []byte{99, 0, 1, 1, 0, 0, 0, 1}, payload: payload},
		{proto: UDP, frag: 0x2000, options: []byte{0x94, 4, 0, 0}, payload: payload},
		{proto: ICMP, payload: []byte{8, 0, 0, 0, 0, 0, 0, 0}},
	} {
		f.Add(s.build(), uint16(700), uint8(1), uint16(600))
		f.Add(s.build(), uint16(0), uint8(0), uint16(0))
	}
}

// exactly returns a copy of b with nothing behind it, so that a read past its
// end is caught.
func exactly(b []byte) []byte {
	c := make([]byte, len(b))
	copy(c, b)
	return c
}

// Whatever a peer sends: nothing panics, lengths stay within the packet, and
// what is split comes out as packets that are whole.
func FuzzPacket(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte, segment uint16, flags uint8, smaller uint16) {
		b = exactly(b)
		h, err := Parse(b)
		if err != nil {
			if AppendTimeExceeded(nil, b, from4) != nil || FragmentIPv4(b, int(smaller), func([]byte) {}) {
				t.Fatal("works on what it does not parse")
			}
			return
		}
		if h.IPLen > h.HeaderLen || h.HeaderLen > len(b) || h.IPLen < 20 {
			t.Fatalf("lengths out of range: %+v", h)
		}
		FlowHash(h, b)
		for _, from := range []netip.Addr{from4, from6} {
			if e := AppendTooBig(nil, b, from, int(smaller)); e != nil {
				if eh, err := Parse(e); err != nil || eh.Dst != h.Src || len(e) > 1280 {
					t.Fatalf("answers %x: %v", e, err)
				}
			}
		}
		cutUp(t, exactly(b), int(smaller))

		p := Packet{Data: exactly(b), Segment: segment, Flags: Flags(flags)}
		checked := p.Check(h) == nil
		var s Splitter
		s.Reset(&p, h, int(smaller))
		n, total := 0, 0
		for seg := s.Next(); seg != nil; seg = s.Next() {
			sh, err := Parse(seg)
			if err != nil {
				t.Fatalf("segment %d: %v", n, err)
			}
			if sh.Src != h.Src || sh.Dst != h.Dst || sh.Proto != h.Proto || sh.SrcPort != h.SrcPort {
				t.Fatalf("segment %d is another flow's: %+v", n, sh)
			}
			total += len(seg) - sh.HeaderLen
			n++
		}
		if total != len(b)-h.HeaderLen {
			t.Fatalf("%d bytes of payload became %d", len(b)-h.HeaderLen, total)
		}
		if checked && smaller == 0 && n > MaxSegments {
			t.Fatalf("%d segments", n)
		}
	})
}

func cutUp(t *testing.T, b []byte, mtu int) {
	h, _ := Parse(b)
	total := 0
	if FragmentIPv4(b, mtu, func(f []byte) {
		fh, err := Parse(f)
		if err != nil && len(f) > mtu {
			t.Fatalf("fragment of %d bytes at %d: %v", len(f), mtu, err)
		}
		if err == nil {
			total += len(f) - fh.IPLen
		}
	}) && total > len(b)-h.IPLen {
		t.Fatalf("%d bytes of payload became %d", len(b)-h.IPLen, total)
	}
}

// The coalescer gets packets cut out of hostile bytes, and lets each out once.
func FuzzCoalescer(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte, segment uint16, flags uint8, at uint16) {
		var in []Packet
		out := 0
		c := Coalescer{TCP: true, UDP: true, Emit: func(r *Run) {
			out += len(r.Packets)
			b := bytes.Join(r.Pieces, nil)
			h, err := Parse(b)
			if err != nil {
				t.Fatalf("lets out %x: %v", b, err)
			}
			if len(r.Packets) > 1 && (r.Segment == 0 || len(b)-h.HeaderLen <= int(r.Segment)) {
				t.Fatalf("%d packets in segments of %d make %d", len(r.Packets), r.Segment, len(b))
			}
		}}
		// The same packet again and again, with one word changed at each turn.
		h, err := Parse(b)
		if err != nil {
			return
		}
		for i := range 8 {
			p := exactly(b)
			if int(at)+4 <= len(p) {
				p[at+3] += byte(i)
				p[at+2] += byte(i) * byte(len(b)-h.HeaderLen)
			}
			if h, err := Parse(p); err == nil {
				in = append(in, Packet{Data: p, Segment: segment * uint16(i%2), Flags: Flags(flags)})
				c.Add(&in[len(in)-1], h)
			}
		}
		c.Flush()
		if out != len(in) {
			t.Fatalf("%d went in, %d came out", len(in), out)
		}
	})
}
