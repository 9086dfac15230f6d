package packet

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// cut collects the fragments and scribbles on what it was lent.
func cut(b []byte, mtu int) (out [][]byte, ok bool) {
	ok = FragmentIPv4(b, mtu, func(f []byte) {
		out = append(out, bytes.Clone(f))
		clear(f)
	})
	return out, ok
}

func TestFragmentIPv4(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	// Record route is not copied, the router alert is (RFC 2113).
	options := []byte{7, 7, 4, 0, 0, 0, 0, 1, 0x94, 4, 0, 0}
	copied := []byte{0x94, 4, 0, 0}
	for range 2000 {
		s := spec{proto: UDP, ttl: 64, tos: 3, id: 77, payload: randomBytes(r, r.IntN(4000))}
		if r.IntN(2) == 0 {
			s.options = options
		}
		if r.IntN(4) == 0 { // itself a fragment, with more to come
			s.proto, s.frag = 99, 0x2000|3
			s.payload = s.payload[:len(s.payload)&^7]
		}
		mtu := 68 + r.IntN(1500)
		orig := s.build()
		frags, ok := cut(bytes.Clone(orig), mtu)
		if !ok {
			t.Fatalf("%d bytes at %d refused", len(orig), mtu)
		}
		if len(orig) <= mtu {
			if len(frags) != 1 || !bytes.Equal(frags[0], orig) {
				t.Fatalf("%d bytes at %d changed", len(orig), mtu)
			}
			continue
		}
		whole := parse(t, orig)
		var payload []byte
		at := whole.FragmentOffset
		for i, f := range frags {
			h := parse(t, f)
			last := i == len(frags)-1
			more := f[6]&0x20 != 0
			if h.FragmentOffset != at || more != (!last || whole.Fragment) || len(f) > mtu ||
				!last && (len(f)-h.IPLen)%8 != 0 || naive(0, f[:h.IPLen]) != 0xffff {
				t.Fatalf("fragment %d of %d at %d: %x", i, len(orig), mtu, f[:h.IPLen])
			}
			if !last && len(f) < mtu-7 {
				t.Fatalf("fragment %d wastes room: %d of %d", i, len(f), mtu)
			}
			want := s.options
			if i > 0 && want != nil {
				want = copied
			}
			if !bytes.Equal(f[20:h.IPLen], want) || !bytes.Equal(f[8:10], orig[8:10]) || !bytes.Equal(f[4:6], orig[4:6]) || f[1] != orig[1] {
				t.Fatalf("fragment %d has header %x, want options %x", i, f[:h.IPLen], want)
			}
			at += len(f) - h.IPLen
			payload = append(payload, f[h.IPLen:]...)
		}
		if !bytes.Equal(payload, orig[whole.IPLen:]) {
			t.Fatal("the payload changed")
		}
	}
}

func TestFragmentIPv4Refuses(t *testing.T) {
	big := make([]byte, 3000)
	for name, c := range map[string]struct {
		b   []byte
		mtu int
	}{
		"don't fragment":  {spec{proto: UDP, frag: 0x4000, payload: big}.build(), 1400},
		"IPv6":            {spec{v6: true, proto: UDP, payload: big}.build(), 1400},
		"no room":         {spec{proto: UDP, payload: big}.build(), 27},
		"half a packet":   {spec{proto: UDP, payload: big}.build()[:100], 68},
		"beyond 64 KiB":   {spec{proto: 99, frag: 0x1fff, payload: big}.build(), 1400},
		"no room, option": {spec{proto: UDP, options: make([]byte, 40), payload: big}.build(), 67},
	} {
		if f, ok := cut(c.b, c.mtu); ok || f != nil {
			t.Errorf("%s: cut into %d", name, len(f))
		}
	}
}

// Options that lie about their length end the copying, not the program.
func TestFragmentIPv4WithBrokenOptions(t *testing.T) {
	for _, options := range [][]byte{{0x94, 0, 0, 0}, {0x94, 1, 0, 0}, {0x94, 5, 0, 0}, {1, 1, 1, 0x94}, {0x94, 3, 9, 0x94}} {
		frags, ok := cut(spec{proto: UDP, options: options, payload: make([]byte, 200)}.build(), 100)
		if !ok || len(frags) != 3 {
			t.Fatalf("options %x: %d fragments, %v", options, len(frags), ok)
		}
		for _, f := range frags {
			parse(t, f)
		}
	}
}
