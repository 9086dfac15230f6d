package gateway

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/token"
)

// TestGatewayHosts has hosts of containers join: with blocks, and with networks
// of which two are alike, and like one of the gateway's own host.
func TestGatewayHosts(t *testing.T) {
	w := newWorld(t)
	w.run("ip", "addr", "add", "172.17.0.1/16", "dev", "eth1") // as the bridge of a Docker Engine has
	before := w.snapshot()
	cfg, first := w.gatewayConfig()
	other := newToken(t, cfg.StateDir, TokenOptions{Name: "other", Network: "other"})
	g, err := w.newGateway(cfg)
	if err != nil {
		t.Fatal(err)
	}
	stop := runGateway(t, g)
	far := netip.AddrPortFrom(netip.MustParseAddr("2001:db8:5::1"), 4433)
	host := func(tok token.Token, seed byte, block bool, announce ...string) *testClient {
		t.Helper()
		c := clientConfig{Gateway: far, Token: tok.Encode(), Seed: seed, Block: block}
		for _, p := range announce {
			c.Announce = append(c.Announce, prefix(p))
		}
		return newTestClient(t, w.lan, c)
	}
	plain := host(first, 4, false)
	a := host(first, 1, true, "172.17.0.0/16", "fd17::/64")
	b := host(first, 2, true, "172.17.0.0/16", "172.18.0.0/16", "fd18::/64", "10.91.77.0/24")
	c := host(other, 3, true, "172.17.0.0/16", "fd17::/64")

	wantGrant(t, a, []string{"10.91.254.0/24", "fd12::fe00/120"}, []string{"172.17.0.0/16", "fd17::/64"}, "")
	wantGrant(t, b, []string{"10.91.253.0/24", "fd12::fd00/120"}, []string{"172.18.0.0/16", "fd18::/64"},
		"172.17.0.0/16 overlaps 172.17.0.0/16 of another host of the network: create the network with another --subnet there or here; "+
			"10.91.77.0/24 overlaps the gateway's pool 10.91.0.0/16: create the network with another --subnet")
	wantGrant(t, c, []string{"10.91.252.0/24", "fd12::fc00/120"}, []string{"172.17.0.0/16", "fd17::/64"}, "")
	wantGrant(t, plain, nil, nil, "")
	const pool4, pool6 = "10.91.0.0/16", "fd12::/64"
	if got := fmt.Sprint(b.Grant.Peers); got != "["+pool4+" "+pool6+" 172.17.0.0/16 fd17::/64]" {
		t.Errorf("the second host joined with the peers %s", got)
	}
	a.waitPeers(pool4, "172.18.0.0/16", pool6, "fd18::/64")
	plain.waitPeers(pool4, "172.17.0.0/16", "172.18.0.0/16", pool6, "fd17::/64", "fd18::/64")

	for i, f := range families {
		inA, inB := addr([]string{"172.17.0.2", "fd17::2"}[i]), addr([]string{"172.18.0.2", "fd18::2"}[i])
		blockA := a.Grant.Block[i].Addr().Next()
		hello := func(from *testClient, src netip.Addr, to *testClient, dst netip.Addr) {
			t.Helper()
			text := fmt.Sprintf("from %v to %v", src, dst)
			from.send(udpPacket(port16(src, 1), port16(dst, 2), []byte(text)))
			if h, p := to.wait(text); h.Src != src || h.Dst != dst || h.HopLimit != 63 || !checksumsHold(p) {
				t.Errorf("%s came from %v to %v, hop limit %d", text, h.Src, h.Dst, h.HopLimit)
			}
		}
		hello(a, inA, b, inB)
		hello(b, inB, a, inA)
		hello(a, blockA, b, b.Grant.Block[i].Addr())
		hello(plain, plain.Grant.Addresses[i], a, inA)
		hello(a, inA, plain, plain.Grant.Addresses[i])
		hello(plain, plain.Grant.Addresses[i], b, inB)

		// To the internet and back, from the block alone.
		server := port16(f.inet, 5300)
		in := newInbox(t, w.internet, server)
		a.send(udpPacket(port16(blockA, 4000), server, []byte("question")))
		from := in.waitFrom(t, "question")
		if from.Addr() != f.host {
			t.Errorf("the internet sees %v", from)
		}
		if _, err := in.WriteTo([]byte("answer "+f.name), net.UDPAddrFromAddrPort(from)); err != nil {
			t.Fatal(err)
		}
		if h, _ := a.wait("answer " + f.name); h.Src != f.inet || h.Dst != blockA {
			t.Errorf("the answer goes from %v to %v", h.Src, h.Dst)
		}
		a.send(udpPacket(port16(inA, 4000), server, []byte("astray "+f.name)))
		if h, _ := a.wait("astray " + f.name); h.Src != f.pool { // in an ICMP error
			t.Errorf("a private source out is answered by %v", h.Src)
		}
		if _, out := in.from("astray " + f.name); out {
			t.Error("a packet with a private source has left")
		}
	}
	// What is the gateway's own in a prefix that somebody announced.
	b.send(udpPacket(port16(b.Grant.Addresses[0], 1), port16(addr("172.17.0.1"), 2), []byte("bridge")))
	if h, p := b.wait("bridge"); h.Src != families[0].pool || p[h.IPLen] != 3 || p[h.IPLen+1] != 13 {
		t.Errorf("a packet to the gateway's own address is answered by %v", h.Src)
	}

	// A host that leaves takes all with it, and the next gets its block.
	if left := b.leave(); left != "<nil>" {
		t.Errorf("leaving: %s", left)
	}
	if end := b.ended(patience); !strings.Contains(end, "left for good") {
		t.Errorf("the session ended with %q", end)
	}
	a.waitPeers(pool4, pool6)
	plain.waitPeers(pool4, "172.17.0.0/16", pool6, "fd17::/64")
	if n := len(clientsOf(t, cfg.StateDir)); n != 3 {
		t.Errorf("%d clients are listed", n)
	}

	// After a restart all have what they had, without asking.
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	a.ended(patience)
	if g, err = w.newGateway(cfg); err != nil {
		t.Fatal(err)
	}
	stop = runGateway(t, g)
	again := host(first, 1, false)
	wantGrant(t, again, []string{"10.91.254.0/24", "fd12::fe00/120"}, nil, "")
	if diff := cmp.Diff(fmt.Sprint(a.Grant.Addresses), fmt.Sprint(again.Grant.Addresses)); diff != "" {
		t.Errorf("a host's addresses have changed: %s", diff)
	}

	// A host that is gone is removed by hand, and would be another if it came.
	if _, err := RemoveClient(cfg.StateDir, "10.91.254.7"); err != nil {
		t.Fatal(err)
	}
	if end := again.ended(patience); !strings.Contains(end, "removed") {
		t.Errorf("the session ended with %q", end)
	}
	heir := host(first, 9, true, "172.17.0.0/16")
	back := host(first, 1, true, "172.17.0.0/16")
	if fmt.Sprint(back.Grant.Addresses) == fmt.Sprint(a.Grant.Addresses) || back.Grant.Block[0].Overlaps(heir.Grant.Block[0]) || len(heir.Grant.Announced) != 1 || len(back.Grant.Announced) != 0 {
		t.Errorf("the heir got %+v, the one that is back %+v", heir.Grant, back.Grant)
	}

	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if diff := before.Diff(w.host.Snapshot()); diff != "" {
		t.Errorf("the host is not as it was:\n%s", diff)
	}
}

func wantGrant(t *testing.T, c *testClient, block, announced []string, refused string) {
	t.Helper()
	if c.Refused != nil {
		t.Fatal(c.Refused)
	}
	if got, want := fmt.Sprint(c.Grant.Block), fmt.Sprint(block); got != want {
		t.Errorf("the block is %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(c.Grant.Announced), fmt.Sprint(announced); got != want {
		t.Errorf("announced are %s, want %s", got, want)
	}
	if diff := cmp.Diff(refused, c.Grant.AnnounceRefused); diff != "" {
		t.Errorf("refused (-want +got):\n%s", diff)
	}
}

// A pool without room for a block says so to who asks for one, and what to do.
func TestGatewayWithoutBlocks(t *testing.T) {
	w := newWorld(t)
	dir, first := newState(t, InitOptions{Pool4: prefix("10.91.0.0/24")})
	g, err := w.newGateway(Config{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer runGateway(t, g)()
	near := netip.AddrPortFrom(hostAddr4, 4433)
	c := newTestClient(t, w.internet, clientConfig{Gateway: near, Token: first.Encode(), Seed: 1, Block: true})
	if c.Refused == nil || c.Refused.Status != 503 || c.Refused.Code != "pool-exhausted" || !strings.Contains(c.Refused.Text, "larger --pool") {
		t.Errorf("got %+v", c.greeting)
	}
	if c := newTestClient(t, w.internet, clientConfig{Gateway: near, Token: first.Encode(), Seed: 1}); c.Refused != nil {
		t.Error(c.Refused)
	}
	// What is announced is nonsense: a text, and no session.
	c = newTestClient(t, w.internet, clientConfig{Gateway: near, Token: first.Encode(), Seed: 1, Announce: []netip.Prefix{prefix("172.18.0.1/16")}})
	if c.Refused == nil || c.Refused.Status != 400 || !strings.Contains(c.Refused.Text, "announce 172.18.0.0/16") {
		t.Errorf("got %+v", c.greeting)
	}
}
