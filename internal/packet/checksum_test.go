package packet

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
)

func TestSum(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	buf := randomBytes(r, 3000)
	ones := bytes.Repeat([]byte{0xff}, 3000)
	for n := 0; n < len(buf); n++ {
		for _, b := range [][]byte{buf[:n], ones[:n], buf[len(buf)-n:]} {
			var got [2]byte
			putSum(got[:], fold(sum(b, 0)))
			if want := uint16(naive(0, b)); binary.BigEndian.Uint16(got[:]) != want {
				t.Fatalf("%d bytes: %x, want %x", n, got, want)
			}
		}
	}
}

func TestCompleteChecksum(t *testing.T) {
	for i, s := range []spec{
		{proto: TCP, flags: tcpSYN, payload: []byte("odd")},
		{proto: UDP, payload: []byte("even")},
		{v6: true, proto: TCP, tcpOpts: make([]byte, 12)},
		{v6: true, proto: UDP, payload: make([]byte, 1452)},
		{proto: UDP, options: []byte{1, 1, 1, 1}, payload: []byte("x")},
	} {
		want := s.build()
		s.partial = true
		p := Packet{Data: s.build(), Flags: Partial | Verified}
		p.CompleteChecksum(parse(t, p.Data))
		if !bytes.Equal(p.Data, want) || p.Flags != Verified {
			t.Errorf("%d: %x flags %b, want %x", i, p.Data, p.Flags, want)
		}
		p.SetPartial(parse(t, p.Data))
		if !bytes.Equal(p.Data, s.build()) || p.Flags != Partial|Verified {
			t.Errorf("%d made partial: %x flags %b, want %x", i, p.Data, p.Flags, s.build())
		}
		whole := Packet{Data: bytes.Clone(want)}
		whole.CompleteChecksum(parse(t, want))
		if !bytes.Equal(whole.Data, want) {
			t.Errorf("%d: a full checksum was changed", i)
		}
		h := parse(t, want)
		if !validChecksum(want, &h) {
			t.Errorf("%d: a right checksum is refused", i)
		}
		want[len(want)-1] ^= 1
		if validChecksum(want, &h) {
			t.Errorf("%d: a wrong checksum passes", i)
		}
	}
}

// A UDP checksum that comes out as zero is written as all ones.
func TestUDPChecksumOfZero(t *testing.T) {
	s := spec{proto: UDP, payload: []byte{0, 0}}
	b := s.build()
	copy(s.payload, b[26:28]) // the payload takes what the sum lacked
	if b = s.build(); b[26] != 0xff || b[27] != 0xff {
		t.Fatalf("the test's packet has checksum %x", b[26:28])
	}
	s.partial = true
	p := Packet{Data: s.build(), Flags: Partial}
	p.CompleteChecksum(parse(t, p.Data))
	if !bytes.Equal(p.Data, b) {
		t.Errorf("checksum %x, want ffff", p.Data[26:28])
	}
	s.payload = append(make([]byte, 0, 4), s.payload...)
	s.payload = append(s.payload, s.payload...)
	if got := split(t, Packet{s.build(), 2, Partial}, 0); !bytes.Equal(got[0], b) {
		t.Errorf("split off: %x, want %x", got[0], b)
	}
}
