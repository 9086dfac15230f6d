package gateway

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/packet"
)

func TestRouterFromClient(t *testing.T) {
	malformed := udp(a4, web4, "")[:27]
	multicast4, multicast6 := udp(a4, "224.0.0.251", "x"), udp(a6, "ff02::fb", "x")
	tests := []struct {
		name    string
		pkt     []byte
		out     bool   // leaves, as it is
		peer    bool   // reaches client b, with one hop less
		answer  string // to a
		dropped packet.Drop
	}{
		{name: "to the internet", pkt: udp(a4, web4, "x"), out: true},
		{name: "to the internet, IPv6", pkt: udp(a6, web6, "x"), out: true},
		{name: "to a client of the network", pkt: udp(a4, b4, "x"), peer: true},
		{name: "to a client of the network, IPv6", pkt: udp(a6, b6, "x"), peer: true},

		{name: "not a packet", pkt: malformed, dropped: packet.DropMalformed},
		{name: "nothing", pkt: []byte{}, dropped: packet.DropMalformed},

		{name: "another client's source", pkt: udp(b4, web4, "x"), dropped: packet.DropSource},
		{name: "another client's source, IPv6", pkt: udp(b6, web6, "x"), dropped: packet.DropSource},
		{name: "the gateway's source", pkt: udp(gw4, web4, "x"), dropped: packet.DropSource},
		{name: "a source of the internet", pkt: udp("198.51.100.1", web4, "x"), dropped: packet.DropSource},
		{name: "another's source to a client", pkt: udp(c4, b4, "x"), dropped: packet.DropSource},
		{name: "link-local source", pkt: udp("fe80::1", web6, "x"), dropped: packet.DropSource},
		{name: "no source", pkt: udp("0.0.0.0", web4, "x"), dropped: packet.DropSource},
		{name: "its own IPv4 address in IPv6", pkt: udp("::ffff:10.91.0.2", web6, "x"), dropped: packet.DropSource},

		{name: "another network", pkt: udp(a4, c4, "x"), answer: gw4 + " > " + a4 + " icmp 3/1", dropped: packet.DropNoSession},
		{name: "another network, IPv6", pkt: udp(a6, c6, "x"), answer: gw6 + " > " + a6 + " icmp 1/3", dropped: packet.DropNoSession},
		{name: "nobody's address", pkt: udp(a4, free4, "x"), answer: gw4 + " > " + a4 + " icmp 3/1", dropped: packet.DropNoSession},
		{name: "nobody's address, IPv6", pkt: udp(a6, free6, "x"), answer: gw6 + " > " + a6 + " icmp 1/3", dropped: packet.DropNoSession},
		{name: "the pool's first address", pkt: udp(a4, "10.91.0.0", "x"), answer: gw4 + " > " + a4 + " icmp 3/1", dropped: packet.DropNoSession},

		{name: "private", pkt: udp(a4, "192.168.1.1", "x"), answer: gw4 + " > " + a4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "loopback", pkt: udp(a4, "127.0.0.1", "x"), answer: gw4 + " > " + a4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "metadata", pkt: udp(a4, "169.254.169.254", "x"), answer: gw4 + " > " + a4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "IPv4 in IPv6", pkt: udp(a6, "::ffff:203.0.113.10", "x"), answer: gw6 + " > " + a6 + " icmp 1/1", dropped: packet.DropDestination},
		{name: "the gateway's host", pkt: udp(a4, "203.0.113.2", "x"), answer: gw4 + " > " + a4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "the gateway's own address", pkt: udp(a4, gw4, "x"), answer: gw4 + " > " + a4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "the gateway's own address, IPv6", pkt: udp(a6, gw6, "x"), answer: gw6 + " > " + a6 + " icmp 1/1", dropped: packet.DropDestination},
		{name: "multicast", pkt: multicast4, dropped: packet.DropDestination},
		{name: "multicast, IPv6", pkt: multicast6, dropped: packet.DropDestination},

		{name: "the last hop to a client", pkt: withHops(udp(a4, b4, "x"), 1), answer: gw4 + " > " + a4 + " icmp 11/0", dropped: packet.DropHopLimit},
		{name: "the last hop to a client, IPv6", pkt: withHops(udp(a6, b6, "x"), 1), answer: gw6 + " > " + a6 + " icmp 3/0", dropped: packet.DropHopLimit},
		{name: "the last hop out is the kernel's to see", pkt: withHops(udp(a4, web4, "x"), 1), out: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := newRouterLab(t)
			host := netip.MustParseAddr("203.0.113.2")
			l.isHost.Store(&host)
			want := map[string]uint64{}
			if !tt.out && !tt.peer {
				want[tt.dropped.String()] = 1
			}
			before := bytes.Clone(tt.pkt)
			l.a.WritePackets(3, single(tt.pkt))

			var out, peer, answers []string
			for _, p := range l.exits[1].take() { // 3 modulo 2
				out = append(out, describe(p))
				if !bytes.Equal(p.Data, before) {
					t.Errorf("left as % x, was % x", p.Data, before)
				}
			}
			for _, p := range l.sb.take() {
				peer = append(peer, describe(p))
				if !packet.DecrementHopLimit(before) {
					t.Error("passed on without a hop left")
				}
				if !bytes.Equal(p.Data, before) {
					t.Errorf("reached the client as % x, want % x", p.Data, before)
				}
			}
			for _, p := range l.sa.take() {
				answers = append(answers, describe(p))
				if !checksumsHold(p.Data) {
					t.Error("the answer's checksum is wrong")
				}
			}
			if got := len(out) == 1; got != tt.out {
				t.Errorf("left: %v", out)
			}
			if got := len(peer) == 1; got != tt.peer {
				t.Errorf("reached the client: %v", peer)
			}
			if tt.answer == "" && answers != nil || tt.answer != "" && !slices.Equal(answers, []string{tt.answer}) {
				t.Errorf("answers: %q, want %q", answers, tt.answer)
			}
			if diff := cmp.Diff(want, l.drops.Snapshot()); diff != "" {
				t.Errorf("drops (-want +got):\n%s", diff)
			}
			if len(l.sc.take())+len(l.exits[0].take()) > 0 {
				t.Error("somebody else has got something")
			}
		})
	}
}

func withHops(b []byte, n byte) []byte {
	if b[0]>>4 == 6 {
		b[7] = n
		return b
	}
	b[8] = n
	b[10], b[11] = 0, 0
	sum := ^onesSum(b[:20], 0)
	b[10], b[11] = byte(sum>>8), byte(sum)
	return b
}

func TestRouterWithoutIPv6Exit(t *testing.T) {
	l := newRouterLab(t)
	l.router.cfg.exit6 = false
	l.a.WritePackets(0, single(udp(a6, web6, "x"), udp(a4, web4, "x"), udp(a6, b6, "x")))
	if got := l.sa.take(); len(got) != 1 || describe(got[0]) != gw6+" > "+a6+" icmp 1/0" {
		t.Errorf("answered with %d packets", len(got))
	}
	if n := len(l.exits[0].take()); n != 1 {
		t.Errorf("%d packets left", n)
	}
	if n := len(l.sb.take()); n != 1 {
		t.Errorf("%d packets reached the other client", n)
	}
}

func TestRouterAllowList(t *testing.T) {
	l := newRouterLab(t)
	p, s := l.join(t, 7, "one", "10.91.0.7", "fd12::7", prefixes("198.51.100.0/24 192.168.5.0/24")...)
	p.WritePackets(0, single(
		udp("10.91.0.7", "198.51.100.9", "x"), udp("10.91.0.7", "192.168.5.1", "x"), // listed
		udp("10.91.0.7", b4, "x"), // of its network
		udp("10.91.0.7", web4, "x"), udp("10.91.0.7", c4, "x"),
	))
	if n := len(l.exits[0].take()); n != 2 {
		t.Errorf("%d packets left, want those to the listed destinations", n)
	}
	if n := len(l.sb.take()); n != 1 {
		t.Errorf("%d packets reached the client of its network", n)
	}
	if n := len(s.take()); n != 2 {
		t.Errorf("%d answers, want one for each of the others", n)
	}
}

func TestRouterPassesSuperPackets(t *testing.T) {
	l := newRouterLab(t)
	src := netip.AddrPortFrom(netip.MustParseAddr(a4), 1000)
	super := func(dst string, n int) packet.Packet {
		b := tcpPacket(src, netip.AddrPortFrom(netip.MustParseAddr(dst), 80), 1, 1, 0x10, make([]byte, n))
		return packet.Packet{Data: b, Segment: 1000, Flags: packet.Partial}
	}
	l.a.WritePackets(0, []packet.Packet{super(b4, 50_000), super(b4, 3000), super(web4, 60_000)})
	for _, tt := range []struct {
		got  []packet.Packet
		want []int
	}{{l.sb.take(), []int{50_040, 3040}}, {l.exits[0].take(), []int{60_040}}} {
		var sizes []int
		for _, p := range tt.got {
			sizes = append(sizes, len(p.Data))
			if p.Segment != 1000 || p.Flags != packet.Partial {
				t.Errorf("arrived with segments of %d bytes and flags %d", p.Segment, p.Flags)
			}
		}
		if !slices.Equal(sizes, tt.want) {
			t.Errorf("arrived: %d, want %d", sizes, tt.want)
		}
	}
	// What a peer claims is not believed.
	lies := super(b4, 3000)
	lies.Segment = 10
	l.a.WritePackets(0, []packet.Packet{lies})
	if n := l.drops.Snapshot()["malformed"]; n != 1 || len(l.sb.take()) != 0 {
		t.Errorf("a super-packet with segments of 10 bytes passed; %d dropped", n)
	}
}

// Packets with the same way stay together, so that they can be coalesced.
func TestRouterKeepsBatches(t *testing.T) {
	l := newRouterLab(t)
	var pkts []packet.Packet
	for range 10 {
		pkts = append(pkts, single(udp(a4, web4, "x"), udp(a6, web6, "y"), udp(a4, "198.51.100.1", "z"))...)
	}
	for range 10 {
		pkts = append(pkts, single(udp(a4, b4, "x"), udp(a6, b6, "y"))...)
	}
	l.a.WritePackets(0, pkts)
	if l.exits[0].calls != 1 || len(l.exits[0].pkts) != 30 {
		t.Errorf("%d packets left in %d writes, want 30 in 1", len(l.exits[0].pkts), l.exits[0].calls)
	}
	if l.sb.calls != 1 || len(l.sb.pkts) != 20 {
		t.Errorf("%d packets reached the client in %d calls, want 20 in 1", len(l.sb.pkts), l.sb.calls)
	}
}

func TestRouterFromKernel(t *testing.T) {
	l := newRouterLab(t)
	l.fromKernel(1, single(
		udp(web4, a4, "1"), udp(web6, a6, "2"), udp(web4, b4, "3"), udp(web4, free4, "4"),
		[]byte{0x45}, udp(web4, a4, "5"), udp(web4, "198.51.100.77", "6"), udp(web6, c6, "7"),
	))
	for name, tt := range map[string]struct {
		s    *fakeSession
		want string
	}{"a": {l.sa, "125"}, "b": {l.sb, "3"}, "c": {l.sc, "7"}} {
		got := ""
		for i, p := range tt.s.pkts {
			got += string(p.Data[len(p.Data)-1:])
			if tt.s.queues[i] != 1 {
				t.Errorf("%s got a packet on queue %d", name, tt.s.queues[i])
			}
		}
		if got != tt.want {
			t.Errorf("%s got %q, want %q", name, got, tt.want)
		}
	}
	if l.sa.calls != 2 {
		t.Errorf("a's packets came in %d calls, want 2", l.sa.calls)
	}
	want := map[string]uint64{"no-session": 2, "malformed": 1}
	if diff := cmp.Diff(want, l.drops.Snapshot()); diff != "" {
		t.Errorf("drops (-want +got):\n%s", diff)
	}
}

func TestRouterReturnsTooBig(t *testing.T) {
	l := newRouterLab(t)
	l.sb.tooBig = 1300
	l.a.WritePackets(1, single(udp(a4, b4, "x")))
	if got := l.sa.take(); len(got) != 1 || describe(got[0]) != gw4+" > "+a4+" icmp 3/4" {
		t.Errorf("the sender in the network got %d answers", len(got))
	}
	l.fromKernel(1, single(udp(web4, b4, "x")))
	if got := l.exits[1].take(); len(got) != 1 || describe(got[0]) != gw4+" > "+web4+" icmp 3/4" {
		t.Errorf("the sender in the internet got %d answers", len(got))
	}
}

func TestRouterDoesNotAllocate(t *testing.T) {
	l := newRouterLab(t)
	quiet := &quietSession{}
	l.router.cfg.exits[0] = quiet
	hosta, _ := l.attachAs(t, hostA, prefix("172.18.0.0/16"))
	hostb, _ := l.attachAs(t, hostB, prefix("172.19.0.0/16"), prefix("fd19::/64"))
	for _, p := range []*port{l.a, l.b, hosta, hostb} {
		p.session = quiet
	}
	hosts := single(udp("10.91.9.7", web4, "x"), udp("fd12::907", "fd12::807", "x"), udp("172.18.0.2", "172.19.0.2", "x"), udp("fd12::907", "fd19::2", "x"))
	out := single(udp(a4, web4, "x"), udp(a6, web6, "x"), udp(a4, b4, "x"), udp(a6, b6, "x"))
	ping := single(echoPacket(netip.MustParseAddr(a4), netip.MustParseAddr(gw4), 1, 1, nil))
	refused := single(udp(a4, "10.0.0.1", "x"), udp(a6, c6, "x"))
	in := single(udp(web4, a4, "x"), udp(web6, b6, "x"))
	for range 2 * packet.AnswerBurst { // from here on only some are answered
		l.a.WritePackets(0, refused)
	}
	if n := testing.AllocsPerRun(50, func() {
		for i := range out { // hops are used up
			withHops(out[i].Data, 64)
		}
		for i := range hosts {
			withHops(hosts[i].Data, 64)
		}
		hosta.WritePackets(0, hosts)
		l.a.WritePackets(0, out)
		l.a.WritePackets(0, ping)
		swap(ping[0].Data[12:16], ping[0].Data[16:20]) // the reply into a request
		ping[0].Data[20] = echoRequest4
		l.a.WritePackets(0, refused)
		l.fromKernel(0, in)
	}); n != 0 {
		t.Errorf("%v allocations a round", n)
	}
}

func BenchmarkRouter(b *testing.B) {
	l := newRouterLab(b)
	quiet := &quietSession{}
	l.router.cfg.exits[0] = quiet
	l.a.session, l.b.session = quiet, quiet
	var pkts []packet.Packet
	for i := range 64 { // of so many flows
		pkts = append(pkts, single(udpPacket(
			netip.AddrPortFrom(netip.MustParseAddr(a4), 1000), netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), 53), nil))...)
	}
	b.Run("out", func(b *testing.B) {
		for b.Loop() {
			l.a.WritePackets(0, pkts)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(pkts)), "ns/packet")
	})
	for i := range pkts {
		swap(pkts[i].Data[12:16], pkts[i].Data[16:20])
	}
	b.Run("in", func(b *testing.B) {
		for b.Loop() {
			l.fromKernel(0, pkts)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(pkts)), "ns/packet")
	})
}
