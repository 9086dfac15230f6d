package packet

import (
	"bytes"
	"testing"
)

// echo builds an echo request, or what has another type, from a to b.
func echo(v6 bool, a, b string, kind byte, ttl uint8, payload []byte) []byte {
	s := spec{v6: v6, proto: ICMP, src: a, dst: b, ttl: ttl}
	if v6 {
		s.proto = ICMPv6
	}
	s.payload = append([]byte{kind, 0, 0, 0, 0, 7, 0, 9}, payload...)
	return sealICMP(s)
}

func TestAnswerEcho(t *testing.T) {
	for _, size := range []int{0, 1, 56, 1272} {
		payload := bytes.Repeat([]byte{0xa5}, size)
		for _, c := range []struct {
			v6             bool
			a, b           string
			request, reply byte
		}{
			{false, "10.1.2.3", "10.1.0.1", 8, 0},
			{true, "fd00::2", "fd00::1", 128, 129},
		} {
			got := echo(c.v6, c.a, c.b, c.request, 1, payload)
			if !AnswerEcho(got, parse(t, got)) {
				t.Errorf("%s: a ping of %d bytes is not answered", c.a, size)
			}
			if want := echo(c.v6, c.b, c.a, c.reply, 64, payload); !bytes.Equal(got, want) {
				t.Errorf("%s: answers\n%x, want\n%x", c.a, got, want)
			}
		}
	}
	fragment := echo(false, "10.1.2.3", "10.1.0.1", 8, 1, make([]byte, 64))
	fragment[6] = 0x20 // more to come
	coded := echo(true, "fd00::2", "fd00::1", 128, 1, nil)
	coded[41] = 1
	for name, b := range map[string][]byte{
		"a fragment":         fragment,
		"another code":       coded,
		"a reply":            echo(false, "10.1.2.3", "10.1.0.1", 0, 1, nil),
		"a reply, IPv6":      echo(true, "fd00::2", "fd00::1", 129, 1, nil),
		"half a header":      spec{proto: ICMP, payload: []byte{8, 0, 0, 0}}.build(),
		"ICMP in IPv6":       spec{v6: true, proto: ICMP, payload: []byte{8, 0, 0, 0, 0, 0, 0, 0}}.build(),
		"UDP that looks so":  spec{proto: UDP, sport: 8 << 8}.build(),
		"ICMPv6 within IPv4": spec{proto: ICMPv6, payload: []byte{128, 0, 0, 0, 0, 0, 0, 0}}.build(),
	} {
		was := bytes.Clone(b)
		if AnswerEcho(b, parse(t, b)) || !bytes.Equal(b, was) {
			t.Errorf("%s is answered", name)
		}
	}
}
