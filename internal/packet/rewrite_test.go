package packet

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// Addresses before and after, some with sums that carry.
var (
	before4 = []string{"10.1.2.3", "172.18.0.2", "255.255.0.1", "192.168.255.255"}
	after4  = []string{"10.91.7.9", "203.0.113.255", "255.254.1.1", "1.0.0.0"}
	before6 = []string{"fd00::1:2", "2001:db8:ffff:ffff:ffff:ffff:ffff:fffe", "fd18::2"}
	after6  = []string{"2001:db8:7::9", "fdff:ffff:ffff::1", "::2"}
)

func rewriteSpecs() map[string]spec {
	payload := []byte("some odd payload.")
	return map[string]spec{
		"tcp":                 {proto: TCP, sport: 1, dport: 2, flags: tcpACK, payload: payload},
		"tcp partial":         {proto: TCP, sport: 1, dport: 2, partial: true, payload: payload},
		"udp":                 {proto: UDP, sport: 1, dport: 2, payload: payload},
		"udp partial":         {proto: UDP, sport: 1, dport: 2, partial: true, payload: payload},
		"empty udp":           {proto: UDP},
		"options":             {proto: TCP, options: []byte{0x94, 4, 0, 0}, payload: payload},
		"first fragment":      {proto: UDP, frag: 0x2000, payload: payload},
		"other protocol":      {proto: 132, payload: payload},
		"nothing":             {proto: 99, frag: 0x2001},
		"later fragment":      {proto: 99, frag: 0x0007, payload: payload},
		"ping":                {proto: ICMP, payload: []byte{8, 0, 0, 0, 0, 1, 0, 1, 'x'}},
		"v6 tcp":              {v6: true, proto: TCP, sport: 1, dport: 2, payload: payload},
		"v6 tcp partial":      {v6: true, proto: TCP, sport: 1, dport: 2, partial: true, payload: payload},
		"v6 udp":              {v6: true, proto: UDP, sport: 1, dport: 2, payload: payload},
		"v6 udp partial":      {v6: true, proto: UDP, sport: 1, dport: 2, partial: true, payload: payload},
		"v6 extension":        {v6: true, proto: TCP, ext: destOptions, options: []byte{TCP, 0, 1, 4, 0, 0, 0, 0}, payload: payload},
		"v6 first fragment":   {v6: true, proto: UDP, ext: fragment, options: []byte{UDP, 0, 0, 1, 0, 0, 0, 1}, payload: payload},
		"v6 other protocol":   {v6: true, proto: 132, payload: payload},
		"v6 ping":             {v6: true, proto: ICMPv6, payload: []byte{128, 0, 0, 0, 0, 1, 0, 1, 'x'}},
		"v6 neighbour":        {v6: true, proto: ICMPv6, payload: []byte{135, 0, 0, 0}},
		"v6 later fragment":   {v6: true, proto: 99, ext: fragment, options: []byte{99, 0, 1, 0, 0, 0, 0, 1}, payload: payload},
		"super-packet":        {proto: TCP, flags: tcpACK, partial: true, payload: make([]byte, 60000)},
		"v6 super-packet":     {v6: true, proto: UDP, partial: true, payload: make([]byte, 60000)},
		"v6 ICMP, one byte":   {v6: true, proto: 200, payload: []byte{1}},
		"source quench alone": {proto: ICMP, payload: []byte{4, 0, 0, 0}},
	}
}

// construct builds a packet with all its checksums.
func construct(s spec) []byte {
	if s.proto == ICMP || s.proto == ICMPv6 {
		return sealICMP(s)
	}
	return s.build()
}

// rewriteBoth rewrites both addresses and checks that the header follows.
func rewriteBoth(t *testing.T, p *Packet, src, dst string) {
	t.Helper()
	h := parse(t, p.Data)
	p.RewriteSource(&h, netip.MustParseAddr(src))
	p.RewriteDestination(&h, netip.MustParseAddr(dst))
	if got := parse(t, p.Data); got != h {
		t.Errorf("the header became %+v, the packet has %+v", h, got)
	}
}

func TestRewrite(t *testing.T) {
	for name, s := range rewriteSpecs() {
		before, after := before4, after4
		if s.v6 {
			before, after = before6, after6
		}
		for i, src := range before {
			for j, to := range after {
				s.src, s.dst = src, before[(i+1)%len(before)]
				p := Packet{Data: construct(s)}
				if s.partial {
					p.Flags = Partial
				}
				rewriteBoth(t, &p, to, after[(j+1)%len(after)])
				s.src, s.dst = to, after[(j+1)%len(after)]
				if want := construct(s); !bytes.Equal(p.Data, want) {
					n := min(len(want), 100)
					t.Errorf("%s from %s: becomes\n%x, want\n%x", name, src, p.Data[:n], want[:n])
				}
			}
		}
	}
}

// Whatever the sum is, the one that follows is the one that is computed anew.
func TestRewriteSums(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 20000 {
		s := spec{v6: r.IntN(2) == 0, proto: UDP, payload: randomBytes(r, 2), partial: r.IntN(3) == 0}
		addr := func() string {
			if s.v6 {
				return netip.AddrFrom16([16]byte(randomBytes(r, 16))).String()
			}
			return netip.AddrFrom4([4]byte(randomBytes(r, 4))).String()
		}
		s.src, s.dst = addr(), addr()
		if r.IntN(2) == 0 { // a sum that comes out as zero
			b := s.build()
			s.payload = append(s.payload, b[len(b)-4:len(b)-2]...)
			binary.BigEndian.PutUint16(s.payload[2:], binary.BigEndian.Uint16(s.payload[2:])-4)
		}
		p := Packet{Data: s.build()}
		if s.partial {
			p.Flags = Partial
		}
		src, dst := addr(), addr()
		rewriteBoth(t, &p, src, dst)
		s.src, s.dst = src, dst
		if want := s.build(); !bytes.Equal(p.Data, want) {
			t.Fatalf("becomes %x, want %x", p.Data, want)
		}
	}
}

func TestRewriteWithoutChecksum(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		src, dst := after4[0], after4[1]
		if v6 {
			src, dst = after6[0], after6[1]
		}
		p := Packet{Data: spec{v6: v6, proto: UDP, payload: []byte("x")}.build()}
		at := parse(t, p.Data).IPLen + 6
		p.Data[at], p.Data[at+1] = 0, 0
		rewriteBoth(t, &p, src, dst)
		if p.Data[at] != 0 || p.Data[at+1] != 0 {
			t.Errorf("IPv6: %v: a checksum came into being", v6)
		}
	}
}

// In a later fragment there is payload where the checksum would be.
func TestRewriteLaterFragment(t *testing.T) {
	for _, s := range []spec{
		{proto: TCP, frag: 0x0001},
		{v6: true, proto: TCP, ext: fragment, options: []byte{TCP, 0, 0, 8, 0, 0, 0, 1}},
		{proto: ICMP, frag: 0x2001, payload: icmpError(spec{proto: UDP}, 3, "192.0.2.77", 0)[20:]},
	} {
		src, dst := after4[0], after4[1]
		if s.v6 {
			src, dst = after6[0], after6[1]
		}
		p := Packet{Data: s.build()}
		at := parse(t, p.Data).IPLen
		was := bytes.Clone(p.Data[at:])
		rewriteBoth(t, &p, src, dst)
		if !bytes.Equal(p.Data[at:], was) {
			t.Errorf("%+v: the payload became %x, was %x", s, p.Data[at:], was)
		}
		if !s.v6 && naive(0, p.Data[:at]) != 0xffff {
			t.Errorf("%+v: the header checksum is wrong", s)
		}
	}
}

// UDP-Lite and DCCP have the checksum where UDP has it.
func TestRewriteLesserProtocols(t *testing.T) {
	for _, proto := range []byte{udpLite, dccp} {
		b := spec{v6: true, proto: UDP, payload: []byte("x")}.build()
		sum := naivePseudo(netip.MustParseAddr("fd00::1:2"), netip.MustParseAddr("2001:db8::99"), proto, len(b)-40)
		b[6] = proto
		b[46], b[47] = 0, 0
		binary.BigEndian.PutUint16(b[46:], ^uint16(naive(sum, b[40:])))
		p := Packet{Data: b}
		rewriteBoth(t, &p, after6[0], after6[1])
		sum = naivePseudo(netip.MustParseAddr(after6[0]), netip.MustParseAddr(after6[1]), proto, len(b)-40)
		if naive(sum, b[40:]) != 0xffff {
			t.Errorf("protocol %d: the checksum is wrong", proto)
		}
	}
}

// icmpError is what a router, or the receiver itself, sends about a packet, of
// which cut bytes at the end are not quoted.
func icmpError(about spec, kind byte, from string, cut int) []byte {
	src, _ := about.addrs()
	quote := construct(about)
	quote = quote[:len(quote)-cut]
	s := spec{v6: about.v6, proto: ICMP, src: from, dst: src.String(), payload: append([]byte{kind, 1, 0, 0, 0, 0, 5, 0}, quote...)}
	if s.v6 {
		s.proto = ICMPv6
	}
	return sealICMP(s)
}

// An error about a packet becomes the error about the rewritten packet, wherever
// its quote is cut off.
func TestRewriteErrors(t *testing.T) {
	for name, s := range rewriteSpecs() {
		if len(s.payload) > 100 || s.partial {
			continue // what leaves the machine is not
		}
		kinds := []byte{3, 4, 5, 11, 12}
		other, inside, outside := "192.0.2.77", "172.18.0.2", "10.91.7.9"
		if s.v6 {
			kinds = []byte{1, 2, 3, 4, 100}
			other, inside, outside = "2001:db8::99", "fd18::2", "2001:db8:7::9"
		}
		kind := kinds[len(name)%len(kinds)]
		whole := construct(s)
		h := parse(t, whole)
		headers := h.IPLen
		if s.v6 {
			headers = 40
		}
		for cut := range len(whole) - headers + 1 {
			if left := len(whole) - cut; s.proto == TCP && left == h.IPLen+17 || s.proto == UDP && left == h.IPLen+7 || s.proto == ICMPv6 && left == h.IPLen+3 {
				continue // half a checksum, which nobody can read
			}
			// To the sender, by a router.
			s.src, s.dst = outside, other
			p := Packet{Data: icmpError(s, kind, other, cut)}
			h := parse(t, p.Data)
			p.RewriteDestination(&h, netip.MustParseAddr(inside))
			s.src = inside
			if want := icmpError(s, kind, other, cut); !bytes.Equal(p.Data, want) {
				t.Errorf("%s, type %d, cut by %d: becomes\n%x, want\n%x", name, kind, cut, p.Data, want)
			}
			// By the receiver.
			s.src, s.dst = other, inside
			p = Packet{Data: icmpError(s, kind, inside, cut)}
			h = parse(t, p.Data)
			p.RewriteSource(&h, netip.MustParseAddr(outside))
			s.dst = outside
			if want := icmpError(s, kind, outside, cut); !bytes.Equal(p.Data, want) {
				t.Errorf("%s, type %d, cut by %d: goes out as\n%x, want\n%x", name, kind, cut, p.Data, want)
			}
		}
	}
}

// What a quote says of somebody else, or is no quote, stays as it is.
func TestRewriteLeavesQuotes(t *testing.T) {
	to4, to6 := netip.MustParseAddr("172.18.0.2"), netip.MustParseAddr("fd18::2")
	stranger := icmpError(spec{proto: UDP, src: "10.91.7.9"}, 3, "192.0.2.77", 0)
	copy(stranger[16:20], []byte{10, 91, 7, 8})
	wrongVersion := sealICMP(spec{proto: ICMP, dst: "10.91.7.9", payload: append([]byte{3, 1, 0, 0, 0, 0, 0, 0}, spec{v6: true, proto: UDP}.build()...)})
	for name, b := range map[string][]byte{
		"of another's packet":    stranger,
		"of another IP version":  wrongVersion,
		"too short":              sealICMP(spec{proto: ICMP, payload: []byte{3, 1, 0, 0, 0, 0, 0, 0, 0x45, 0}}),
		"without a header":       sealICMP(spec{proto: ICMP, payload: []byte{11, 0, 0, 0}}),
		"of no version":          sealICMP(spec{proto: ICMP, payload: make([]byte, 80)}),
		"with half its options":  sealICMP(spec{proto: ICMP, payload: append([]byte{3, 1, 0, 0, 0, 0, 0, 0, 0x4f}, make([]byte, 30)...)}),
		"IPv6 too short":         sealICMP(spec{v6: true, proto: ICMPv6, payload: []byte{1, 1, 0, 0, 0, 0, 0, 0, 0x60, 0}}),
		"a header length of two": sealICMP(spec{proto: ICMP, payload: append([]byte{3, 1, 0, 0, 0, 0, 0, 0, 0x42}, make([]byte, 30)...)}),
	} {
		h := parse(t, b)
		was := bytes.Clone(b[h.IPLen+4:])
		p := Packet{Data: b}
		if h.Version == 4 {
			p.RewriteDestination(&h, to4)
		} else {
			p.RewriteDestination(&h, to6)
		}
		if !bytes.Equal(b[h.IPLen+4:], was) {
			t.Errorf("%s: the quote became %x, was %x", name, b[h.IPLen+4:], was)
		}
		if sums(b, &h)[1] != 0xffff && name != "of another's packet" {
			t.Errorf("%s: the ICMP checksum is wrong", name)
		}
	}
}

func TestQuoted(t *testing.T) {
	for _, tt := range []struct {
		name     string
		b        []byte
		is       bool
		proto    uint8
		src, dst uint16
	}{
		{"tcp", icmpError(spec{proto: TCP, sport: 7, dport: 8}, 3, "192.0.2.1", 12), true, TCP, 7, 8},
		{"udp", icmpError(spec{v6: true, proto: UDP, sport: 7, dport: 8}, 1, "2001:db8::1", 0), true, UDP, 7, 8},
		{"half a port", icmpError(spec{proto: UDP, sport: 7, dport: 8}, 3, "192.0.2.1", 5), true, UDP, 0, 0},
		{"fragment", icmpError(spec{proto: 99, frag: 7, payload: []byte{0, 7, 0, 8}}, 3, "192.0.2.1", 0), true, 99, 0, 0},
		{"half an extension header", icmpError(spec{v6: true, proto: UDP, ext: destOptions, options: []byte{UDP, 0, 1, 4, 0, 0, 0, 0}}, 1, "2001:db8::1", 12), true, noNext, 0, 0},
		{"a ping", echo(false, "10.1.2.3", "10.1.0.1", 8, 64, make([]byte, 40)), false, 0, 0, 0},
		{"udp itself", spec{proto: UDP, payload: make([]byte, 40)}.build(), false, 0, 0, 0},
	} {
		q, ok := Quoted(tt.b, parse(t, tt.b))
		if ok != tt.is || ok && (q.Proto != tt.proto || q.SrcPort != tt.src || q.DstPort != tt.dst) {
			t.Errorf("%s: quotes %+v, %v", tt.name, q, ok)
		}
	}
}

// sums are the folded sums over an IPv4 header and over a transport header with
// its pseudo-header: 0xffff where the checksum is right.
func sums(b []byte, h *Header) (s [2]uint32) {
	if h.Version == 4 {
		s[0] = naive(0, b[:h.IPLen])
	}
	acc := uint32(0)
	if h.Proto != ICMP {
		acc = naivePseudo(h.Src, h.Dst, h.Proto, len(b)-h.IPLen)
	}
	s[1] = naive(acc, b[h.IPLen:])
	for i, v := range s {
		if v == 0 {
			s[i] = 0xffff
		}
	}
	return s
}

// summed reports whether a packet has a transport checksum.
func summed(b []byte, h *Header) bool {
	t := b[h.IPLen:]
	switch {
	case h.FragmentOffset != 0:
		return false
	case h.Proto == ICMP && h.Version == 4, h.Proto == ICMPv6 && h.Version == 6:
		return len(t) >= 4
	case h.Proto == TCP:
		return len(t) >= 18
	case h.Proto == UDP:
		return len(t) >= 8 && (t[6] != 0 || t[7] != 0)
	}
	return (h.Proto == udpLite || h.Proto == dccp) && len(t) >= 8
}

// Whatever comes in: nothing but addresses and checksums changes, right sums stay
// right and wrong ones as wrong as they were, and the way back leads back.
func FuzzRewrite(f *testing.F) {
	for _, s := range rewriteSpecs() {
		f.Add(construct(s), true, s.partial, uint64(1)<<40, uint64(2))
		if !s.partial && len(s.payload) < 100 {
			f.Add(icmpError(s, 3, s.dst, 0), false, false, uint64(1), uint64(1)<<63)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, source, partial bool, high, low uint64) {
		b = exactly(b)
		h, err := Parse(b)
		if err != nil || h.FragmentOffset == 0 && h.IPLen == len(b) {
			return
		}
		p := Packet{Data: b}
		if partial && !h.Fragment && h.transport() {
			p.Flags = Partial
		}
		var to netip.Addr
		if h.Version == 4 {
			to = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(low))))
		} else {
			to = netip.AddrFrom16([16]byte(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, high), low)))
		}
		was, before := bytes.Clone(b), h
		if q, ok := Quoted(b, h); ok && (q.Src == to || q.Dst == to) {
			return // on the way back it would look like one that was changed
		}
		rewrite, from := p.RewriteDestination, h.Dst
		if source {
			rewrite, from = p.RewriteSource, h.Src
		}
		rewrite(&h, to)
		if again, err := Parse(b); err != nil || again != h {
			t.Fatalf("%x became %x: %+v, %v; want %+v", was, b, again, err, h)
		}
		if p.Flags == 0 && summed(was, &before) && sums(was, &before) != sums(b, &h) {
			t.Errorf("%x became %x: sums %x, were %x", was, b, sums(b, &h), sums(was, &before))
		}
		rewrite(&h, from)
		if h != before {
			t.Errorf("%+v became %+v", before, h)
		}
		for i := 0; i+1 < len(b); i += 2 {
			x, y := binary.BigEndian.Uint16(was[i:]), binary.BigEndian.Uint16(b[i:])
			if x != y && x+y != 0xffff || x != y && x != 0 && y != 0 { // two forms of zero
				t.Fatalf("%x comes back as %x", was, b)
			}
		}
	})
}
