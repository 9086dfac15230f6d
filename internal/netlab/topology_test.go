package netlab

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestTopologyReachesTheInternetInClear(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	top.Internet.ServeHTTP(80)
	top.Internet.ServeHTTPS(443)
	home1 := top.AddHomeClient("home1", netip.MustParsePrefix("192.168.1.0/24"))
	home2 := top.AddHomeClient("home2", netip.MustParsePrefix("192.168.1.0/24"))
	for _, tt := range []struct {
		ns   *NS
		url  string
		seen string
	}{
		{top.Client, "http://203.0.113.10/", "192.0.2.2"},
		{top.Client, "http://[2001:db8:3::10]/", "2001:db8:1::2"},
		{top.Client, "https://203.0.113.10/", "192.0.2.2"},
		{top.Gateway, "http://203.0.113.10/", "203.0.113.2"},
		{top.Gateway, "http://[2001:db8:3::10]/", "2001:db8:3::2"},
		{home1.NS, "http://203.0.113.10/", "192.0.2.18"},
		{home2.NS, "http://203.0.113.10/", "192.0.2.34"},
	} {
		page, err := tt.ns.Get(ctx, tt.url)
		if err != nil || page != Page+tt.seen+"\n" {
			t.Errorf("%s from %s: %q (%v), want to be seen as %s", tt.url, tt.ns.Name, page, err, tt.seen)
		}
	}
	page, err := top.Client.Get(ctx, "https://203.0.113.10/bytes/100000")
	if err != nil || len(page) != 100000 {
		t.Errorf("got %d bytes (%v), want 100000", len(page), err)
	}
	for _, to := range []netip.Addr{ServerAddr4, ServerAddr6, GatewayAddr4, GatewayAddr6} {
		rtts, err := top.Client.Ping(ctx, Ping{To: to, Count: 3, Interval: time.Millisecond, Size: 1000})
		if err != nil || len(rtts) != 3 || rtts[0] <= 0 || rtts[2] > time.Second {
			t.Errorf("ping %s: %v (%v), want three times", to, rtts, err)
		}
	}
}

func TestWaitRoute(t *testing.T) {
	top := NewTopology(t, LinkConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := top.Client.WaitRoute(ctx, ServerAddr6, "eth0"); err != nil {
		t.Error(err)
	}
	for _, iface := range []string{"lo", "none"} {
		if err := top.Client.WaitRoute(ctx, ServerAddr4, iface); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("wait for %s: %v, want the deadline", iface, err)
		}
	}
}

func TestWaitPing(t *testing.T) {
	top := NewTopology(t, LinkConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	top.UplinkGatewayIf.Down()
	back := time.AfterFunc(300*time.Millisecond, func() {
		if err := top.Uplink.Netlink().LinkSetUp(top.UplinkGatewayIf.link()); err != nil {
			t.Error(err)
		}
	})
	defer back.Stop()
	start := time.Now()
	if err := top.Client.WaitPing(ctx, GatewayAddr6); err != nil || time.Since(start) < 250*time.Millisecond {
		t.Errorf("answered after %v (%v), want about 300ms", time.Since(start), err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := top.Client.WaitPing(ctx, netip.MustParseAddr("203.0.113.99")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the deadline", err)
	}
}

func TestLinkDownUpMTUAndRate(t *testing.T) {
	ctx := testContext(t)
	l := New(t)
	a, b := l.NS("a"), l.NS("b")
	ia, ib := l.Link(a, b, LinkConfig{
		A: End{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/30")}},
		B: End{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/30")}},
	})
	b.ServeHTTP(80)
	server := netip.MustParseAddrPort("192.0.2.2:80")
	reach := func(size int) int {
		rtts, err := a.Ping(ctx, Ping{To: server.Addr(), Size: size})
		if err != nil && !errors.Is(err, syscall.ENETUNREACH) {
			t.Fatal(err)
		}
		return len(rtts)
	}
	if got := reach(100); got != 1 {
		t.Errorf("%d answers, want 1", got)
	}
	ib.Down()
	if got := reach(100); got != 0 {
		t.Errorf("%d answers over a link that is down, want 0", got)
	}
	ib.Up()
	if err := a.WaitReady(ctx, server); err != nil {
		t.Error(err)
	}
	ia.SetMTU(1280)
	ib.SetMTU(1280)
	if link, err := a.Netlink().LinkByName("eth0"); err != nil || link.Attrs().MTU != 1280 {
		t.Errorf("MTU %d (%v), want 1280", link.Attrs().MTU, err)
	}

	timed := func() time.Duration {
		start := time.Now()
		if page, err := a.Get(ctx, "http://192.0.2.2/bytes/1000000"); err != nil || len(page) != 1000000 {
			t.Fatalf("got %d bytes (%v)", len(page), err)
		}
		return time.Since(start)
	}
	ib.SetRate(10e6) // 1 MB takes 0.8 s
	limited := timed()
	if limited < 600*time.Millisecond {
		t.Errorf("1 MB at 10 Mbit/s took %v", limited)
	}
	ib.SetRate(0)
	if took := timed(); took > limited/2 {
		t.Errorf("1 MB without a limit took %v, with one %v", took, limited)
	}
}

func TestSetPathMTU(t *testing.T) {
	ctx := testContext(t)
	for _, tt := range []struct {
		up   bool
		to   netip.Addr
		head int // IP and ICMP
	}{
		{true, GatewayAddr4, 28},
		{true, GatewayAddr6, 48},
		{false, netip.MustParseAddr("192.0.2.2"), 28},
		{false, netip.MustParseAddr("2001:db8:1::2"), 48},
	} {
		top := NewTopology(t, LinkConfig{})
		top.SetPathMTU(1400)
		from := top.Gateway
		if tt.up {
			from = top.Client
		}
		answers := func(size, count int) int {
			rtts, err := from.Ping(ctx, Ping{To: tt.to, Size: size - tt.head, Count: count, Interval: 50 * time.Millisecond, Wait: 300 * time.Millisecond})
			if err != nil {
				t.Error(err)
			}
			return len(rtts)
		}
		if got := answers(1400, 1); got != 1 {
			t.Errorf("1400 bytes to %s: %d answers, want 1", tt.to, got)
		}
		if got := answers(1401, 1); got != 0 {
			t.Errorf("1401 bytes to %s: %d answers, want none", tt.to, got)
		}
		// Both kernels learn the size from the ICMP answers, one packet each, and
		// fragment.
		if got := answers(1401, 3); got == 0 {
			t.Errorf("fragments to %s: no answer", tt.to)
		}
	}
}

func TestServeEcho(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	top.Internet.ServeEcho(7)
	for _, addr := range []netip.Addr{ServerAddr4, ServerAddr6} {
		conn, err := top.Client.DialContext(ctx, "udp", netip.AddrPortFrom(addr, 7).String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		want := strings.Repeat("x", 1200)
		if _, err := conn.Write([]byte(want)); err != nil {
			t.Fatal(err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 2000)
		size, err := conn.Read(buf)
		if err != nil || string(buf[:size]) != want {
			t.Errorf("echo by %s: %d bytes (%v), want %d", addr, size, err, len(want))
		}
	}
}
