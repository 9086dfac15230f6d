package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A namesLab is a router that answers for name servers. The one that it asks
// knows of no name but "private.test", and is silent on those that begin so.
type namesLab struct {
	*routerLab
	names *names
}

func newNamesLab(t testing.TB) *namesLab {
	t.Helper()
	l := &namesLab{routerLab: newRouterLab(t)}
	var err error
	l.names, err = openNames(namesConfig{servers: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")},
		dial: dialNames, router: l.router, log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l.router.cfg.names = l.names.take
	t.Cleanup(func() {
		if err := l.names.close(); err != nil {
			t.Error(err)
		}
		if l.names.queries.used != 0 || l.names.conns.used != 0 {
			t.Errorf("%d queries and %d connections are left", l.names.queries.used, l.names.conns.used)
		}
	})
	return l
}

// dialNames connects to a name server that is not there.
func dialNames(_ context.Context, network, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	go func() {
		defer theirs.Close()
		buf := make([]byte, 1<<16)
		for {
			n, err := theirs.Read(buf)
			if err != nil {
				return
			}
			m := new(dns.Msg)
			if network == "udp" && m.Unpack(buf[:n]) == nil && !strings.HasPrefix(m.Question[0].Name, "silent") {
				r := new(dns.Msg).SetRcode(m, dns.RcodeNameError)
				if m.Question[0].Name == "private.test." && m.Question[0].Qtype == dns.TypeA {
					r.Rcode = dns.RcodeSuccess
					r.Answer = append(r.Answer, &dns.A{Hdr: dns.RR_Header{Name: "private.test.", Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(10, 0, 0, 1)})
				}
				b, err := r.Pack()
				if err == nil {
					_, err = theirs.Write(b)
				}
				if err != nil {
					return
				}
			}
		}
	}()
	return ours, nil
}

// private is what clients have for a name server.
var private = netip.MustParseAddrPort("192.168.1.1:53")

func question(t testing.TB, name string) []byte {
	t.Helper()
	b, err := new(dns.Msg).SetQuestion(name, dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// query returns a query from a client to what may be a name server.
func query(t testing.TB, src, dst string) []byte {
	t.Helper()
	return udp(src, dst, string(question(t, "a.test.")))
}

func TestNamesStandsFor(t *testing.T) {
	l := newNamesLab(t)
	host4, host6 := netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8:3::2")
	isHost := l.router.cfg.isHost
	l.router.cfg.isHost = func(ip netip.Addr) bool { return ip == host4 || ip == host6 || isHost(ip) }
	lan, _ := l.join(t, 7, "one", "10.91.0.7", "fd12::7", prefixes("192.168.1.0/24 fd00:1::/64")...)
	all, _ := l.join(t, 8, "one", "10.91.0.8", "fd12::8")
	all.names = tunnel.NamesAll
	off, _ := l.join(t, 9, "one", "10.91.0.10", "fd12::10")
	off.names = tunnel.NamesOff
	for _, tt := range []struct {
		from     *port
		dst      string
		answered bool
		why      string // else
	}{
		{l.a, "192.168.1.1", true, ""},
		{l.a, "10.0.0.2", true, ""},
		{l.a, "172.16.0.23", true, ""},
		{l.a, "100.100.2.136", true, ""},
		{l.a, "127.0.0.53", true, ""},
		{l.a, "169.254.169.253", true, ""},
		{l.a, "168.63.129.16", true, ""},
		{l.a, "203.0.113.2", true, ""}, // the host
		{l.a, gw4, true, ""},
		{l.a, "fd00::53", true, ""},
		{l.a, "fe80::1", true, ""},
		{l.a, "::1", true, ""},
		{l.a, "2001:db8:3::2", true, ""}, // the host
		{l.a, gw6, true, ""},
		{lan, "192.168.2.1", true, ""}, // not among what it may reach
		{lan, "203.0.113.2", true, ""},

		{all, web4, true, ""},
		{all, web6, true, ""},
		{all, "192.168.1.1", true, ""},
		{all, gw4, true, ""},
		{all, b4, false, "peer"},
		{all, "224.0.0.251", false, "destination"},
		{off, "192.168.1.1", false, "destination"},
		{off, gw4, false, "destination"},
		{off, web4, false, "out"},

		{l.a, web4, false, "out"},
		{l.a, web6, false, "out"},
		{lan, "192.168.1.1", false, "out"}, // reaches it
		{lan, "fd00:1::53", false, "out"},
		{lan, "8.8.8.8", false, "destination"}, // may not reach it
		{l.a, b4, false, "peer"},
		{l.a, free4, false, "no-session"},
		{l.a, c4, false, "no-session"}, // of another network
		{l.a, "224.0.0.251", false, "destination"},
		{l.a, "255.255.255.255", false, "destination"},
		{l.a, "ff02::fb", false, "destination"},
		{l.a, "::ffff:192.168.1.1", false, "destination"},
	} {
		t.Run(tt.dst, func(t *testing.T) {
			s := tt.from.session.(*fakeSession)
			s.take()
			src := tt.from.client.Addr4
			if strings.Contains(tt.dst, ":") {
				src = tt.from.client.Addr6
			}
			drops := l.drops.Snapshot()
			tt.from.WritePackets(0, single(query(t, src.String(), tt.dst)))
			left := len(l.exits[0].take())
			toPeer := len(l.sb.take())
			var got string
			switch after := l.drops.Snapshot(); {
			case left == 1:
				got = "out"
			case toPeer == 1:
				got = "peer"
			default:
				for why, n := range after {
					if n != drops[why] {
						got = why
					}
				}
			}
			if got != tt.why {
				t.Errorf("went %q, want %q", got, tt.why)
			}
			if !tt.answered {
				return
			}
			asked, asker := port16(netip.MustParseAddr(tt.dst), 53), port16(src, 1000)
			p := l.answer(t, s, is(packet.UDP, asked, asker))
			m := new(dns.Msg)
			if err := m.Unpack(p[len(p)-len(question(t, "a.test.")):]); err != nil || m.Rcode != dns.RcodeNameError {
				t.Errorf("the answer: %v\n%v", err, m)
			}

			// The same by TCP.
			tt.from.WritePackets(0, single(tcpPacket(asker, asked, 1, 0, tcpSYN, nil)))
			if p := l.answer(t, s, is(packet.TCP, asked, asker)); tcpFlags(p) != tcpSYN|tcpACK {
				t.Errorf("a SYN is answered with flags %#x", tcpFlags(p))
			}
		})
	}
}

const tcpSYN, tcpRST, tcpACK = 0x02, 0x04, 0x10

func tcpFlags(b []byte) byte {
	h, err := packet.Parse(b)
	if err != nil || h.Proto != packet.TCP {
		return 0
	}
	return b[h.IPLen+13]
}

// wholeAnswer checks a packet to a client, whose checksum may be left to others to
// write, and returns its header.
func wholeAnswer(t *testing.T, p packet.Packet) packet.Header {
	t.Helper()
	h, err := packet.Parse(p.Data)
	if err == nil {
		p.CompleteChecksum(h)
	}
	if err != nil || !checksumsHold(p.Data) {
		t.Fatalf("answered with % x: %v", p.Data, err)
	}
	return h
}

// answer waits for a packet to a client.
func (l *namesLab) answer(t *testing.T, s *fakeSession, match func(packet.Header, []byte) bool) (b []byte) {
	t.Helper()
	within(t, patience, "an answer", func() bool {
		for _, p := range s.take() {
			if h := wholeAnswer(t, p); match(h, p.Data) {
				b = p.Data
			}
		}
		return b != nil
	})
	return b
}

// A gateway that answers for no name server lets queries to public ones out, also of
// clients that want all of them answered.
func TestNamesNone(t *testing.T) {
	l := newRouterLab(t)
	l.a.names = tunnel.NamesAll
	l.a.WritePackets(0, single(query(t, a4, web4), query(t, a4, "192.168.1.1"), query(t, a4, gw4)))
	if left := l.exits[0].take(); len(left) != 1 {
		t.Errorf("%d queries went out, want the one to a public name server", len(left))
	}
	answers := l.sa.take()
	for _, p := range answers {
		if got := describe(p); !strings.HasSuffix(got, "icmp 3/13") {
			t.Errorf("answered with %s", got)
		}
	}
	if len(answers) != 2 {
		t.Errorf("%d answers, want that two are refused", len(answers))
	}
}

// What is not a query as it should be is refused or dropped, and nothing breaks.
func TestNamesMalformed(t *testing.T) {
	good := query(t, a4, "192.168.1.1")
	change := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(good)) }
	noChecksum := func(b []byte) []byte {
		b[26], b[27] = 0, 0
		return b
	}
	for name, tt := range map[string]struct {
		pkt     packet.Packet
		dropped string
	}{
		"another port":        {packet.Packet{Data: udpPacket(netip.MustParseAddrPort(a4+":1000"), netip.MustParseAddrPort("192.168.1.1:54"), question(t, "a.test."))}, "destination"},
		"ICMP":                {packet.Packet{Data: echoPacket(netip.MustParseAddr(a4), netip.MustParseAddr("192.168.1.1"), 1, 1, nil)}, "destination"},
		"a wrong checksum":    {packet.Packet{Data: change(func(b []byte) []byte { b[26]++; return b })}, "malformed"},
		"not a question":      {packet.Packet{Data: udp(a4, "192.168.1.1", "hello")}, "malformed"},
		"nothing":             {packet.Packet{Data: udp(a4, "192.168.1.1", "")}, "malformed"},
		"an answer":           {packet.Packet{Data: change(func(b []byte) []byte { b[30] |= 0x80; return noChecksum(b) })}, "malformed"},
		"longer than it is":   {packet.Packet{Data: change(func(b []byte) []byte { b[24] = 7; return noChecksum(b) })}, "malformed"},
		"shorter than it can": {packet.Packet{Data: change(func(b []byte) []byte { b[24], b[25] = 0, 7; return noChecksum(b) })}, "malformed"},
		"a row of queries":    {packet.Packet{Data: udp(a4, "192.168.1.1", strings.Repeat("x", 1200)), Segment: 600}, "destination"},
		"a fragment": {packet.Packet{Data: change(func(b []byte) []byte {
			b[6] = 0x20
			return withHops(b, 64)
		})}, "destination"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newNamesLab(t)
			l.a.WritePackets(0, []packet.Packet{tt.pkt})
			want := map[string]uint64{tt.dropped: 1}
			within(t, patience, "drop", func() bool { return len(l.drops.Snapshot()) > 0 })
			if diff := cmp.Diff(want, l.drops.Snapshot()); diff != "" {
				t.Errorf("drops (-want +got):\n%s", diff)
			}
		})
	}

	// No checksum is none that is wrong.
	l := newNamesLab(t)
	l.a.WritePackets(0, single(noChecksum(bytes.Clone(good))))
	l.answer(t, l.sa, is(packet.UDP, private, port16(l.a.client.Addr4, 1000)))
}

// Containers have addresses of a block, and some a host announces.
func TestNamesSources(t *testing.T) {
	l := newNamesLab(t)
	p, s := l.attachAs(t, Client{ID: tunnel.Fingerprint{9}, Network: "one",
		Addr4: netip.MustParseAddr("10.91.0.8"), Addr6: netip.MustParseAddr("fd12::8"),
		Block4: netip.MustParsePrefix("10.91.1.0/24"), Block6: netip.MustParsePrefix("fd12::100/120")}, netip.MustParsePrefix("172.18.0.0/16"))
	p.WritePackets(0, single(query(t, "10.91.1.77", "192.168.1.1")))
	l.answer(t, s, is(packet.UDP, private, netip.MustParseAddrPort("10.91.1.77:1000")))
	p.WritePackets(0, single(query(t, "172.18.0.5", "192.168.1.1")))
	if got := s.take(); len(got) != 1 || describe(got[0]) != gw4+" > 172.18.0.5 icmp 3/13" {
		t.Errorf("an announced address was answered with %d packets", len(got))
	}
}

// A client that asks for names without end leaves room for others.
func TestNamesShares(t *testing.T) {
	l := newNamesLab(t)
	if n := l.names.queries.total; n != maxQueries {
		t.Fatalf("this process has room for %d queries only: raise its limit of open files", n)
	}
	flood := make([]packet.Packet, 0, 2*maxQueries)
	for i := range 2 * maxQueries {
		flood = append(flood, packet.Packet{Data: udpPacket(port16(l.a.client.Addr4, uint16(1000+i)),
			private, question(t, fmt.Sprintf("silent%d.test.", i)))})
	}
	l.a.WritePackets(0, flood)
	if n := l.drops.Snapshot()["queue-full"]; n != 2*maxQueries-(maxQueries+2)/3 {
		t.Errorf("%d queries were dropped", n)
	}
	// Another address of the same client's, as another container's.
	l.a.WritePackets(0, single(query(t, a6, "fd00::53")))
	l.answer(t, l.sa, is(packet.UDP, netip.MustParseAddrPort("[fd00::53]:53"), port16(l.a.client.Addr6, 1000)))
	l.b.WritePackets(0, single(query(t, b4, "192.168.1.1")))
	other := port16(l.b.client.Addr4, 1000)
	l.answer(t, l.sb, is(packet.UDP, private, other))
	refused := 0
	for i := range 2 * maxNameConns {
		from := port16(l.a.client.Addr4, uint16(1000+i))
		l.a.WritePackets(0, single(tcpPacket(from, private, 1, 0, tcpSYN, nil)))
		if tcpFlags(l.answer(t, l.sa, is(packet.TCP, private, from)))&tcpRST != 0 {
			refused++
		}
	}
	if want := 2*maxNameConns - (maxNameConns+2)/3; refused != want {
		t.Errorf("%d connections were refused, want %d", refused, want)
	}
	l.b.WritePackets(0, single(tcpPacket(other, private, 1, 0, tcpSYN, nil)))
	if p := l.answer(t, l.sb, is(packet.TCP, private, other)); tcpFlags(p) != tcpSYN|tcpACK {
		t.Errorf("another client's SYN is answered with flags %#x", tcpFlags(p))
	}
}

func TestQueriesWithin(t *testing.T) {
	for descriptors, want := range map[uint64]int{0: 1, 5: 1, 1024: 170, 4096: 682, 524288: maxQueries, 1<<64 - 1: maxQueries} {
		if got := queriesWithin(descriptors); got != want {
			t.Errorf("%d descriptors: %d queries, want %d", descriptors, got, want)
		}
	}
}

// Queries may come until the end and after it.
func TestNamesClose(t *testing.T) {
	l := newNamesLab(t)
	var senders sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		senders.Go(func() {
			for i := uint16(1); ; i++ {
				select {
				case <-stop:
					return
				default:
					l.a.WritePackets(0, single(query(t, a4, "192.168.1.1"),
						tcpPacket(port16(l.a.client.Addr4, i), private, 1, 0, tcpSYN, nil)))
				}
			}
		})
	}
	within(t, patience, "answers", func() bool { return len(l.sa.take()) > 0 })
	if err := l.names.close(); err != nil {
		t.Error(err)
	}
	close(stop)
	senders.Wait()
}

func TestNamesRefusesLoops(t *testing.T) {
	l := newRouterLab(t)
	for _, server := range []string{"10.91.0.5:53", "[fd12::1]:53", "[::ffff:10.91.0.5]:53"} {
		_, err := openNames(namesConfig{servers: []netip.AddrPort{netip.MustParseAddrPort(server)}, router: l.router})
		if err == nil || !strings.Contains(err.Error(), "clients have addresses there") {
			t.Errorf("%s: error %v", server, err)
		}
	}
}

// FuzzNames sends packets of any kind to a name server.
func FuzzNames(f *testing.F) {
	l := newNamesLab(f)
	f.Add(question(f, "a.test."), false, uint16(0))
	f.Add([]byte{0, 53, 0, 53, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0}, true, uint16(1))
	src := netip.AddrPortFrom(l.a.client.Addr4, 1000)
	f.Fuzz(func(t *testing.T, b []byte, isTCP bool, length uint16) {
		if len(b) > 1400 {
			return
		}
		pkt := udpPacket(src, private, b)
		if isTCP {
			if len(b) < 20 {
				return
			}
			binary.BigEndian.PutUint16(b[2:], 53)
			pkt = transport(src.Addr(), netip.MustParseAddr("192.168.1.1"), packet.TCP, 16, b)
		} else if length > 0 {
			binary.BigEndian.PutUint16(pkt[24:], length)
			pkt[26], pkt[27] = 0, 0
		}
		l.a.WritePackets(0, single(pkt))
		for _, p := range l.sa.take() {
			wholeAnswer(t, p)
		}
	})
}
