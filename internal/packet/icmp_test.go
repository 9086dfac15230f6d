package packet

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
)

var (
	from4 = netip.MustParseAddr("10.9.9.1")
	from6 = netip.MustParseAddr("fd09::1")
)

// checkICMP checks the frame of an error: lengths, addresses, checksums.
func checkICMP(t *testing.T, b, orig []byte, kind, code uint8, rest uint32) {
	t.Helper()
	h := parse(t, b)
	o := parse(t, orig)
	from, limit := from4, 576
	acc := uint32(0)
	if h.Version == 6 {
		from, limit = from6, 1280
		acc = naivePseudo(h.Src, h.Dst, ICMPv6, len(b)-40)
	} else if naive(0, b[:20]) != 0xffff {
		t.Error("the IPv4 header checksum is wrong")
	}
	if h.Src != from || h.Dst != o.Src || h.HopLimit != 64 {
		t.Errorf("from %v to %v with hop limit %d", h.Src, h.Dst, h.HopLimit)
	}
	m := b[h.IPLen:]
	if naive(acc, m) != 0xffff {
		t.Error("the ICMP checksum is wrong")
	}
	if m[0] != kind || m[1] != code || binary.BigEndian.Uint32(m[4:]) != rest {
		t.Errorf("type %d code %d rest %x", m[0], m[1], m[4:8])
	}
	if want := min(len(orig), limit-h.IPLen-8); !bytes.Equal(m[8:], orig[:want]) {
		t.Errorf("quotes %d bytes, want the first %d of the packet", len(m)-8, want)
	}
}

func TestICMP(t *testing.T) {
	for _, n := range []int{0, 1, 100, 1400, 60000} {
		v4 := spec{proto: UDP, ttl: 9, payload: make([]byte, n)}.build()
		checkICMP(t, AppendTooBig(nil, v4, from4, 1330), v4, 3, 4, 1330)
		checkICMP(t, AppendTooBig(nil, v4, from4, 1<<20), v4, 3, 4, 0xffff)
		checkICMP(t, AppendTimeExceeded(nil, v4, from4), v4, 11, 0, 0)
		checkICMP(t, AppendUnreachable(nil, v4, from4, NoRoute), v4, 3, 0, 0)
		checkICMP(t, AppendUnreachable(nil, v4, from4, HostUnreachable), v4, 3, 1, 0)
		checkICMP(t, AppendUnreachable(nil, v4, from4, AdminProhibited), v4, 3, 13, 0)
		v6 := spec{v6: true, proto: UDP, ttl: 9, payload: make([]byte, n)}.build()
		checkICMP(t, AppendTooBig(nil, v6, from6, 1330), v6, 2, 0, 1330)
		checkICMP(t, AppendTimeExceeded(nil, v6, from6), v6, 3, 0, 0)
		checkICMP(t, AppendUnreachable(nil, v6, from6, NoRoute), v6, 1, 0, 0)
		checkICMP(t, AppendUnreachable(nil, v6, from6, HostUnreachable), v6, 1, 3, 0)
		checkICMP(t, AppendUnreachable(nil, v6, from6, AdminProhibited), v6, 1, 1, 0)
	}
	v4 := spec{proto: UDP, ttl: 9}.build()
	if b := AppendTimeExceeded([]byte("kept"), v4, from4); string(b[:4]) != "kept" {
		t.Error("did not append")
	} else {
		checkICMP(t, b[4:], v4, 11, 0, 0)
	}
}

func TestICMPAnswersOnlyWhatItMay(t *testing.T) {
	echo := []byte{8, 0, 0, 0, 0, 1, 0, 1}
	for name, c := range map[string]struct {
		spec spec
		want bool
	}{
		"echo request":           {spec{proto: ICMP, payload: echo}, true},
		"echo reply":             {spec{proto: ICMP, payload: []byte{0, 0, 0, 0}}, true},
		"unreachable":            {spec{proto: ICMP, payload: []byte{3, 4, 0, 0}}, false},
		"redirect":               {spec{proto: ICMP, payload: []byte{5, 1, 0, 0}}, false},
		"time exceeded":          {spec{proto: ICMP, payload: []byte{11, 0, 0, 0}}, false},
		"parameter problem":      {spec{proto: ICMP, payload: []byte{12, 0, 0, 0}}, false},
		"empty ICMP":             {spec{proto: ICMP}, false},
		"first fragment":         {spec{proto: UDP, frag: 0x2000}, true},
		"later fragment":         {spec{proto: 99, frag: 1}, false},
		"from nowhere":           {spec{proto: UDP, src: "0.0.0.0"}, false},
		"from this network":      {spec{proto: UDP, src: "0.1.2.3"}, false},
		"from multicast":         {spec{proto: UDP, src: "224.0.0.1"}, false},
		"from class E":           {spec{proto: UDP, src: "250.0.0.1"}, false},
		"from broadcast":         {spec{proto: UDP, src: "255.255.255.255"}, false},
		"from loopback":          {spec{proto: UDP, src: "127.0.0.1"}, false},
		"to multicast":           {spec{proto: UDP, dst: "239.1.1.1"}, false},
		"to broadcast":           {spec{proto: UDP, dst: "255.255.255.255"}, false},
		"GRE":                    {spec{proto: 47, payload: echo}, true},
		"v6 echo request":        {spec{v6: true, proto: ICMPv6, payload: []byte{128, 0, 0, 0}}, true},
		"v6 unreachable":         {spec{v6: true, proto: ICMPv6, payload: []byte{1, 0, 0, 0}}, false},
		"v6 unknown error":       {spec{v6: true, proto: ICMPv6, payload: []byte{127, 0, 0, 0}}, false},
		"v6 redirect":            {spec{v6: true, proto: ICMPv6, payload: []byte{137, 0, 0, 0}}, false},
		"v6 from nowhere":        {spec{v6: true, proto: UDP, src: "::"}, false},
		"v6 from loopback":       {spec{v6: true, proto: UDP, src: "::1"}, false},
		"v6 from multicast":      {spec{v6: true, proto: UDP, src: "ff02::1"}, false},
		"v6 to multicast":        {spec{v6: true, proto: UDP, dst: "ff02::1"}, false},
		"v6 later fragment":      {spec{v6: true, proto: 99, ext: fragment, options: []byte{99, 0, 1, 0, 0, 0, 0, 1}}, false},
		"v6 error after options": {spec{v6: true, proto: ICMPv6, ext: destOptions, options: []byte{ICMPv6, 0, 1, 4, 0, 0, 0, 0}, payload: []byte{1, 0, 0, 0}}, false},
	} {
		orig := c.spec.build()
		from, other := from4, from6
		if c.spec.v6 {
			from, other = from6, from4
		}
		if got := AppendTimeExceeded(nil, orig, from); (got != nil) != c.want {
			t.Errorf("%s: answered %x, want an answer: %v", name, got, c.want)
		}
		if got := AppendTimeExceeded(nil, orig, other); got != nil {
			t.Errorf("%s: answered from the other IP version", name)
		}
		// Packet too big is for multicast as well (RFC 4443 section 2.4(e.3)).
		want := c.want || name == "v6 to multicast"
		if got := AppendTooBig(nil, orig, from, 1300); (got != nil) != want {
			t.Errorf("%s: too big answered %x, want an answer: %v", name, got, want)
		}
	}
	if AppendTooBig(nil, []byte{0x45, 0}, from4, 1300) != nil {
		t.Error("answered half a packet")
	}
	if AppendTooBig(nil, spec{proto: UDP}.build(), netip.Addr{}, 1300) != nil {
		t.Error("answered from no address")
	}
}
