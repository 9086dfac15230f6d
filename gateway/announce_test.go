package gateway

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// hosts of networks one and two, with blocks, as Docker hosts are.
var (
	hostA = Client{ID: tunnel.Fingerprint{0xa}, Network: "one", Addr4: addr("10.91.0.20"), Addr6: addr("fd12::14"),
		Block4: prefix("10.91.9.0/24"), Block6: prefix("fd12::900/120")}
	hostB = Client{ID: tunnel.Fingerprint{0xb}, Network: "one", Addr4: addr("10.91.0.21"), Addr6: addr("fd12::15"),
		Block4: prefix("10.91.8.0/24"), Block6: prefix("fd12::800/120")}
	hostC = Client{ID: tunnel.Fingerprint{0xc}, Network: "two", Addr4: addr("10.91.0.22"), Addr6: addr("fd12::16"),
		Block4: prefix("10.91.7.0/24"), Block6: prefix("fd12::700/120")}
)

func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// TestRouterAmongHosts sends packets from host A, which announces 172.18.0.0/16
// and fd18::/64, in a network where B announces 172.19.0.0/16 and fd19::/64. A
// third, of another network, announces the same as A and more.
func TestRouterAmongHosts(t *testing.T) {
	const own4, own6, in4, in6, ann4, ann6 = "10.91.0.20", "fd12::14", "10.91.9.7", "fd12::907", "172.18.0.2", "fd18::2"
	tests := []struct {
		name     string
		src, dst string
		out      bool
		peer     bool // reaches B
		answer   string
		dropped  packet.Drop
	}{
		{name: "a block's address out", src: in4, dst: web4, out: true},
		{name: "a block's address out, IPv6", src: in6, dst: web6, out: true},
		{name: "a block's first", src: "10.91.9.0", dst: web4, out: true},
		{name: "a block's last", src: "10.91.9.255", dst: web4, out: true},
		{name: "from block to block", src: in4, dst: "10.91.8.9", peer: true},
		{name: "from block to block, IPv6", src: in6, dst: "fd12::8ff", peer: true},
		{name: "from a block to a client", src: in4, dst: "10.91.0.21", peer: true},
		{name: "to what another announced", src: ann4, dst: "172.19.255.255", peer: true},
		{name: "to what another announced, IPv6", src: ann6, dst: "fd19::ffff:0:0:1", peer: true},
		{name: "from a block to what another announced", src: in4, dst: "172.19.0.1", peer: true},
		{name: "from what it announced to a block", src: ann4, dst: "10.91.8.1", peer: true},
		{name: "from what it announced to a client", src: ann4, dst: "10.91.0.21", peer: true},

		{name: "what it announced does not leave", src: ann4, dst: web4, answer: gw4 + " > " + ann4 + " icmp 3/13", dropped: packet.DropSource},
		{name: "what it announced does not leave, IPv6", src: ann6, dst: web6, answer: gw6 + " > " + ann6 + " icmp 1/1", dropped: packet.DropSource},

		{name: "another's block as source", src: "10.91.8.7", dst: web4, dropped: packet.DropSource},
		{name: "another's block as source, IPv6", src: "fd12::807", dst: "fd12::15", dropped: packet.DropSource},
		{name: "beside its block", src: "10.91.10.0", dst: web4, dropped: packet.DropSource},
		{name: "what another announced as source", src: "172.19.0.5", dst: "10.91.0.21", dropped: packet.DropSource},
		{name: "what nobody announced as source", src: "172.20.0.5", dst: "10.91.0.21", dropped: packet.DropSource},
		{name: "what the other network announced as source", src: "172.21.0.5", dst: "10.91.0.21", dropped: packet.DropSource},

		{name: "its own block", src: in4, dst: "10.91.9.8", answer: gw4 + " > " + in4 + " icmp 3/1", dropped: packet.DropNoSession},
		{name: "what it announced itself", src: ann4, dst: "172.18.0.9", answer: gw4 + " > " + ann4 + " icmp 3/1", dropped: packet.DropNoSession},
		{name: "what it announced itself, IPv6", src: ann6, dst: "fd18::9", answer: gw6 + " > " + ann6 + " icmp 1/3", dropped: packet.DropNoSession},
		{name: "a block of the other network", src: in4, dst: "10.91.7.7", answer: gw4 + " > " + in4 + " icmp 3/1", dropped: packet.DropNoSession},
		{name: "nobody's block", src: in4, dst: "10.91.6.7", answer: gw4 + " > " + in4 + " icmp 3/1", dropped: packet.DropNoSession},
		{name: "what the other network announced", src: ann4, dst: "172.21.0.1", answer: gw4 + " > " + ann4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "below what another announced", src: in4, dst: "172.17.255.255", answer: gw4 + " > " + in4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "beyond what another announced", src: in4, dst: "172.20.0.0", answer: gw4 + " > " + in4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "below all that is announced", src: in4, dst: "10.0.0.1", answer: gw4 + " > " + in4 + " icmp 3/13", dropped: packet.DropDestination},
		{name: "the gateway's host in what another announced", src: in4, dst: "172.19.0.254", answer: gw4 + " > " + in4 + " icmp 3/13", dropped: packet.DropDestination},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := newRouterLab(t)
			host := addr("172.19.0.254")
			l.isHost.Store(&host)
			a, sa := l.attachAs(t, hostA, prefix("172.18.0.0/16"), prefix("fd18::/64"))
			_, sb := l.attachAs(t, hostB, prefix("172.19.0.0/16"), prefix("fd19::/64"))
			_, sc := l.attachAs(t, hostC, prefix("172.18.0.0/16"), prefix("172.21.0.0/16"))
			a.WritePackets(0, single(udp(tt.src, tt.dst, "x")))
			want := map[string]uint64{}
			if !tt.out && !tt.peer {
				want[tt.dropped.String()] = 1
			}
			if diff := cmp.Diff(want, l.drops.Snapshot()); diff != "" {
				t.Errorf("drops (-want +got):\n%s", diff)
			}
			if got := l.exits[0].take(); (len(got) == 1) != tt.out {
				t.Errorf("%d packets left", len(got))
			}
			if got := sb.take(); (len(got) == 1) != tt.peer {
				t.Errorf("%d packets reached B", len(got))
			} else if tt.peer {
				if h, err := packet.Parse(got[0].Data); err != nil || h.HopLimit != 63 || h.Src.String() != tt.src {
					t.Errorf("%+v, %v", h, err)
				}
			}
			answers := sa.take()
			if tt.answer == "" && len(answers) > 0 || tt.answer != "" && (len(answers) != 1 || describe(answers[0]) != tt.answer) {
				t.Errorf("answers: %v, want %q", answers, tt.answer)
			}
			if len(sc.take()) > 0 {
				t.Error("the other network has got something")
			}
		})
	}
}

func TestRouterFromKernelToBlock(t *testing.T) {
	l := newRouterLab(t)
	a, sa := l.attachAs(t, hostA, prefix("172.18.0.0/16"))
	l.fromKernel(0, single(udp(web4, "10.91.9.0", "x"), udp(web6, "fd12::9ff", "x"), udp(web4, "10.91.0.20", "x")))
	if n := len(sa.take()); n != 3 {
		t.Errorf("%d packets reached the host", n)
	}
	l.fromKernel(0, single(udp(web4, "172.18.0.2", "x"), udp(web4, "10.91.8.1", "x"), udp(web6, "fd12::1:0:900", "x"), udp(web4, "10.91.255.255", "x")))
	if n := l.drops.Snapshot()["no-session"]; n != 4 || len(sa.take()) > 0 {
		t.Errorf("%d packets to nobody were dropped", n)
	}
	// The block goes with the session, and comes with the next.
	again, sagain := l.attachAs(t, hostA)
	l.detach(a)
	l.fromKernel(0, single(udp(web4, "10.91.9.1", "x")))
	if n, m := len(sa.take()), len(sagain.take()); n != 0 || m != 1 {
		t.Errorf("the old session got %d packets, the new one %d", n, m)
	}
	l.detach(again)
	l.fromKernel(0, single(udp(web4, "10.91.9.1", "x")))
	if n := l.drops.Snapshot()["no-session"]; n != 5 {
		t.Errorf("%d drops", n)
	}
}

// What a token opens of private space the gateway reaches, whatever others
// announce; what it merely does not forbid they reach.
func TestRouterPrefersTheToken(t *testing.T) {
	l := newRouterLab(t)
	_, sb := l.attachAs(t, hostB, prefix("172.19.0.0/16"), prefix("10.20.0.0/16"))
	opened, _ := l.join(t, 50, "one", "10.91.0.50", "fd12::32", prefix("10.20.1.0/24"), prefix("0.0.0.0/0"))
	opened.WritePackets(0, single(udp("10.91.0.50", "10.20.1.1", "x")))
	if n := len(l.exits[0].take()); n != 1 {
		t.Errorf("%d packets left to what the token opens", n)
	}
	opened.WritePackets(0, single(udp("10.91.0.50", "10.20.2.1", "x"), udp("10.91.0.50", "172.19.3.4", "x")))
	if n := len(sb.take()); n != 2 {
		t.Errorf("%d packets reached the host", n)
	}
	closed, _ := l.join(t, 51, "one", "10.91.0.51", "fd12::33", prefix("192.0.2.0/24"))
	closed.WritePackets(0, single(udp("10.91.0.51", "172.19.3.4", "x")))
	if n := len(sb.take()); n != 1 {
		t.Errorf("%d packets from a client with an allow list reached its own network", n)
	}
}

func TestAnnounceRefused(t *testing.T) {
	l := newRouterLab(t)
	l.attachAs(t, hostB, prefix("172.18.0.0/16"), prefix("fd18::/64"))
	for text, want := range map[string]string{
		"172.18.0.0/16":     "172.18.0.0/16 overlaps 172.18.0.0/16 of another host of the network: create the network with another --subnet there or here",
		"172.18.7.0/24":     "172.18.7.0/24 overlaps 172.18.0.0/16 of another host",
		"172.16.0.0/12":     "172.16.0.0/12 overlaps 172.18.0.0/16 of another host",
		"fd18::8000/113":    "fd18::8000/113 overlaps fd18::/64 of another host",
		"10.91.4.0/24":      "10.91.4.0/24 overlaps the gateway's pool 10.91.0.0/16: create the network with another --subnet",
		"10.0.0.0/8":        "overlaps the gateway's pool 10.91.0.0/16",
		"fd12::/48":         "overlaps the gateway's pool fd12::/64",
		"203.0.113.0/24":    "not private address space",
		"11.0.0.0/8":        "not private address space",
		"2001:db8::/64":     "not private address space",
		"fe80::/64":         "not private address space",
		"127.0.0.0/8":       "not private address space",
		"169.254.0.0/16":    "not private address space",
		"224.0.0.0/8":       "not private address space",
		"64:ff9b::/96":      "not private address space",
		"172.0.0.0/8":       "not private address space", // more than the private part of it
		"192.168.0.0/15":    "not private address space",
		"100.64.0.0/10":     "not private address space", // with a cloud's metadata service
		"100.100.100.0/24":  "not private address space",
		"fd00:ec2::/64":     "not private address space",
		"0.0.0.0/0":         "not between a /8 and a /30",
		"::/0":              "not between a /32 and a /126",
		"fc00::/7":          "not between a /32 and a /126",
		"192.168.1.0/31":    "not between a /8 and a /30",
		"192.168.1.1/32":    "not between a /8 and a /30",
		"fd44::/127":        "not between a /32 and a /126",
		"172.17.0.0/16":     "", // Docker's default, also where the gateway's host has it
		"192.168.0.0/16":    "",
		"10.92.0.0/16":      "",
		"100.64.0.0/16":     "",
		"192.168.77.252/30": "",
		"fd55:1234::/32":    "",
		"fd55:1234::4/126":  "",
	} {
		accepted, refused, _ := l.claim(Client{ID: tunnel.Fingerprint{0xa}, Network: "one"}, []netip.Prefix{prefix(text)})
		if want == "" && (refused != "" || len(accepted) != 1) || want != "" && (len(accepted) > 0 || !strings.Contains(refused, want)) {
			t.Errorf("%s: accepted %v, refused %q, want %q", text, accepted, refused, want)
		}
		if strings.ContainsFunc(refused, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q does not fit a header", refused)
		}
	}
	// The good ones are taken, and each of the others has its reason.
	accepted, refused, _ := l.claim(Client{ID: tunnel.Fingerprint{0xd}, Network: "one"},
		[]netip.Prefix{prefix("172.18.1.0/24"), prefix("172.29.0.0/16"), prefix("8.0.0.0/8")})
	if !slices.Equal(accepted, []netip.Prefix{prefix("172.29.0.0/16")}) || strings.Count(refused, "; ") != 1 {
		t.Errorf("accepted %v, refused %q", accepted, refused)
	}
	// Another network has its own.
	if accepted, refused, peers := l.claim(hostC, []netip.Prefix{prefix("172.18.0.0/16")}); len(accepted) != 1 || refused != "" || len(peers) != 2 {
		t.Errorf("in another network: %v, %q, %v", accepted, refused, peers)
	}
}

// Every client knows what the others of its network announce, as it changes.
func TestPeersFollow(t *testing.T) {
	l := newRouterLab(t)
	pools := []netip.Prefix{prefix("10.91.0.0/16"), prefix("fd12::/64")}
	check := func(s *fakeSession, more ...string) {
		t.Helper()
		want := pools
		for _, p := range more {
			want = append(want[:len(want):len(want)], prefix(p))
		}
		if diff := cmp.Diff(want, s.peers, byText); diff != "" {
			t.Error(diff)
		}
	}
	check(l.sa)
	a, sa := l.attachAs(t, hostA, prefix("172.18.0.0/16"), prefix("fd18::/64"))
	check(sa)
	check(l.sa, "172.18.0.0/16", "fd18::/64")
	check(l.sb, "172.18.0.0/16", "fd18::/64")
	check(l.sc)
	_, sb := l.attachAs(t, hostB, prefix("172.18.0.0/16"), prefix("172.17.0.0/16"))
	if !strings.Contains(sb.refused, "172.18.0.0/16 overlaps 172.18.0.0/16") {
		t.Errorf("refused: %q", sb.refused)
	}
	check(sb, "172.18.0.0/16", "fd18::/64")
	check(sa, "172.17.0.0/16")
	check(l.sa, "172.17.0.0/16", "172.18.0.0/16", "fd18::/64")
	if sb.told != 0 {
		t.Error("a client was told what its grant had said")
	}

	// A short outage changes nothing for the others, but nobody answers there.
	told := sb.told
	l.detach(a)
	l.b.WritePackets(0, single(udp(b4, "172.18.0.5", "x")))
	if got := l.sb.take(); len(got) != 1 || describe(got[0]) != gw4+" > "+b4+" icmp 3/1" {
		t.Errorf("%v", got)
	}
	_, sa = l.attachAs(t, hostA, prefix("172.18.0.0/16"), prefix("fd18::/64"))
	l.b.WritePackets(0, single(udp(b4, "172.18.0.5", "x")))
	if n := len(sa.take()); n != 1 {
		t.Errorf("%d packets reached the host that is back", n)
	}
	if sb.told != told {
		t.Errorf("told %d times of an outage", sb.told-told)
	}
	// It announces less, and something else: the other may have the rest.
	_, sa = l.attachAs(t, hostA, prefix("172.18.5.0/24"))
	check(sb, "172.18.5.0/24")
	_, sb = l.attachAs(t, hostB, prefix("172.17.0.0/16"), prefix("172.18.6.0/24"))
	if sb.refused != "" {
		t.Errorf("refused: %q", sb.refused)
	}
	check(sa, "172.17.0.0/16", "172.18.6.0/24")
	check(l.sc)
	// Who is revoked, or leaves, has nothing any more.
	l.detachRevoked([]tunnel.Fingerprint{hostB.ID})
	check(sa)
	if gone := l.forget([]tunnel.Fingerprint{hostA.ID}); len(gone) != 1 || len(sa.closed) > 0 {
		t.Errorf("%v left, closed %q", gone, sa.closed)
	}
	check(l.sa)
}

// Peers that come between a client's grant and its session are told to it.
func TestPeersBetweenGrantAndSession(t *testing.T) {
	l := newRouterLab(t)
	pol, err := newPolicy(nil)
	if err != nil {
		t.Fatal(err)
	}
	var granted tunnel.Grant
	granted.Announced, _, granted.Peers = l.claim(hostA, []netip.Prefix{prefix("172.18.0.0/16")})
	l.attachAs(t, hostB, prefix("172.19.0.0/16"))
	s := &fakeSession{}
	l.attach(hostA, s, pol, granted)
	if diff := cmp.Diff([]netip.Prefix{prefix("10.91.0.0/16"), prefix("fd12::/64"), prefix("172.19.0.0/16")}, s.peers, byText); diff != "" {
		t.Error(diff)
	}
}

// Announcements come and go while packets look for them.
func TestAnnounceUnderChurn(t *testing.T) {
	l := newRouterLab(t)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		wg.Go(func() {
			c := Client{ID: tunnel.Fingerprint{0xee, byte(i)}, Network: "one", Addr4: netip.AddrFrom4([4]byte{10, 91, 2, byte(i)})}
			c.Block4, c.Block6 = l.numbers.block(uint32(10 + i))
			own := netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 20, byte(i), 0}), 24)
			for n := range 300 {
				p, s := l.attachAs(t, c, own)
				if s.refused != "" {
					t.Error(s.refused)
				}
				to := netip.AddrFrom4([4]byte{172, 20, byte(n % 4), 9})
				p.WritePackets(0, single(udp(own.Addr().Next().String(), to.String(), "x"), udp(c.Block4.Addr().String(), "10.91.10.7", "x")))
				if n%2 == 0 {
					l.detach(p)
				}
				if n%5 == 0 {
					l.forget([]tunnel.Fingerprint{c.ID})
				}
			}
		})
	}
	var load sync.WaitGroup
	load.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				l.fromKernel(0, single(udp(web4, "10.91.11.9", "x"), udp(web4, "10.91.12.9", "x")))
			}
		}
	})
	wg.Wait()
	close(stop)
	load.Wait()
}
