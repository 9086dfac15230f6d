package sidecar

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

func goodLink() LinkConfig {
	return LinkConfig{
		Token:     token.Token{Address: "192.0.2.1:443"},
		Key:       make(ed25519.PrivateKey, ed25519.PrivateKeySize),
		Connected: func(tunnel.Grant) tunnel.Sink { return nil },
	}
}

func TestLinkConfig(t *testing.T) {
	prefixes := func(n int) (ps []netip.Prefix) {
		for i := range n {
			ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 16))
		}
		return ps
	}
	for name, tt := range map[string]struct {
		change func(*LinkConfig)
		want   string // empty: it is good
	}{
		"as it is":           {func(*LinkConfig) {}, ""},
		"announcements":      {func(c *LinkConfig) { c.Announce = prefixes(16) }, ""},
		"no token":           {func(c *LinkConfig) { c.Token = token.Token{} }, "Token: no gateway address"},
		"no key":             {func(c *LinkConfig) { c.Key = nil }, "Key: there is none"},
		"too many queues":    {func(c *LinkConfig) { c.Queues = 257 }, "Queues: 257 is out of range: 1 to 256"},
		"an MTU of 1000":     {func(c *LinkConfig) { c.MTU = 1000 }, "MTU: 1000 is out of range: 1280 to 1500"},
		"17 announcements":   {func(c *LinkConfig) { c.Announce = prefixes(17) }, "Announce: 17 prefixes: up to 16 are possible"},
		"a host's prefix":    {func(c *LinkConfig) { c.Announce = []netip.Prefix{netip.MustParsePrefix("10.0.0.1/16")} }, "Announce: 10.0.0.1/16 is no prefix of a network"},
		"no prefix":          {func(c *LinkConfig) { c.Announce = make([]netip.Prefix, 1) }, "Announce: invalid Prefix is no prefix"},
		"mapped":             {func(c *LinkConfig) { c.Announce = []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")} }, "Announce:"},
		"nobody takes it up": {func(c *LinkConfig) { c.Connected = nil }, "Connected:"},
	} {
		t.Run(name, func(t *testing.T) {
			c := goodLink()
			tt.change(&c)
			_, err := NewLink(c)
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.HasPrefix(err.Error(), "configure link: "+tt.want) {
				t.Errorf("got %v, want it to begin with %q", err, tt.want)
			}
		})
	}
}

// A session that has just begun may know too little of its path: IPv6 is given
// up only when it has had time to look.
func TestNewSessionKeepsIPv6(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSession(netip.AddrPort{})
		s.mtu = 1161
		n := &Link{adopted: time.Now()}
		if got := n.mtuLocked(s); got != minIPv6MTU {
			t.Errorf("at first the MTU is %d, want %d", got, minIPv6MTU)
		}
		time.Sleep(probing)
		if got := n.mtuLocked(s); got != 1161 {
			t.Errorf("after %v the MTU is %d, want the session's 1161", probing, got)
		}
	})
}

// runLink runs a link in a bubble until f returns; what it tells goes to events.
func runLink(t *testing.T, dial func(context.Context, netip.AddrPort) (session, error), f func(l *Link, events chan string)) {
	t.Helper()
	events := make(chan string, 100)
	var l *Link
	cfg := goodLink()
	cfg.Drops = new(packet.Drops)
	tell := func(what string) { events <- fmt.Sprint(what, " ", l.MTU(), l.Peers()) }
	cfg.Connected = func(tunnel.Grant) tunnel.Sink {
		tell("connected")
		l.Send(0, make([]packet.Packet, 3), nil) // nobody's yet, or the old session's
		return nil
	}
	cfg.Disconnected = func() { tell("disconnected") }
	cfg.Changed = func() { tell("changed") }
	l, err := newLink(cfg, wayOut{dial: dial, moved: make(chan struct{})})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- l.Run(ctx) }()
	synctest.Wait()
	f(l, events)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

// expect compares what has been told so far.
func expect(t *testing.T, events chan string, want ...string) {
	t.Helper()
	synctest.Wait()
	var got []string
	for len(events) > 0 {
		got = append(got, <-events)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events:\n%s", diff)
	}
}

func TestLinkTellsOfItsSessions(t *testing.T) {
	pool, other := netip.MustParsePrefix("10.88.0.0/24"), netip.MustParsePrefix("172.18.0.0/16")
	synctest.Test(t, func(t *testing.T) {
		var w world
		w.set(refusing(&tunnel.RefusedError{Status: 503, Code: "unavailable", Text: "come again"}))
		dial := func(ctx context.Context, gateway netip.AddrPort) (session, error) {
			w.mu.Lock()
			answer := w.answer
			w.mu.Unlock()
			s, err := answer(ctx, gateway)
			if err == nil {
				f := s.(*fakeSession)
				f.peers = []netip.Prefix{pool}
				w.mu.Lock()
				w.adopted = append(w.adopted, f)
				w.mu.Unlock()
			}
			return s, err
		}
		runLink(t, dial, func(l *Link, events chan string) {
			began := time.Now()
			status := func(connected bool, since time.Time, why string) {
				t.Helper()
				s := l.Status()
				if s.Gateway.IsValid() != connected || !s.Since.Equal(since) || fmt.Sprint(s.Err) != why && !strings.Contains(fmt.Sprint(s.Err), why) {
					t.Errorf("status %+v, want connected: %t since %v, %s", s, connected, since, why)
				}
			}
			status(false, began, "come again")
			var refused *tunnel.RefusedError
			if !errors.As(l.Status().Err, &refused) {
				t.Errorf("the reason is not in the error: %#v", l.Status().Err)
			}
			time.Sleep(time.Minute)
			l.Send(0, make([]packet.Packet, 5), nil)
			expect(t, events)

			w.set(accepting(0))
			time.Sleep(10 * time.Second)
			first := w.sessions()[0]
			since := l.Status().Since
			status(true, since, "<nil>")
			if since.Before(began.Add(time.Minute)) || since.After(began.Add(time.Minute+5*time.Second)) {
				t.Errorf("connected since %v, began at %v", since, began)
			}
			// What is found out at the start is no change if it is what was told.
			expect(t, events, "connected 1400 [10.88.0.0/24]")
			l.Send(0, make([]packet.Packet, 7), nil)

			first.set(func() { first.mtu = 1300 })
			first.changed <- struct{}{}
			expect(t, events, "changed 1300 [10.88.0.0/24]")
			first.set(func() { first.peers = []netip.Prefix{pool, other} })
			first.others <- struct{}{}
			expect(t, events, "changed 1300 [10.88.0.0/24 172.18.0.0/16]")
			first.others <- struct{}{}
			expect(t, events)

			// Silent, and replaced by another: it was connected all the time.
			silentSince := time.Now()
			first.set(func() { first.waiting = true })
			time.Sleep(time.Second)
			w.set(silent)
			time.Sleep(2 * time.Second)
			status(true, since, errSilent.Error())
			w.set(accepting(0))
			time.Sleep(5 * time.Second)
			expect(t, events, "connected 1400 [10.88.0.0/24]")
			if n := len(w.sessions()); n != 2 || !l.Status().Since.After(silentSince) {
				t.Fatalf("%d sessions, status %+v", n, l.Status())
			}
			second := w.sessions()[1]

			// It ends, and there is no other.
			w.set(silent)
			time.Sleep(10 * time.Second)
			ended := time.Now()
			second.end(errors.New("out of order"))
			expect(t, events, "disconnected 0 []")
			status(false, ended, "the session ended: out of order")
			l.Send(0, make([]packet.Packet, 11), nil)
			time.Sleep(time.Minute)
			status(false, ended, "no answer from 192.0.2.1:443")
			w.set(accepting(0))
			time.Sleep(10 * time.Second)
			expect(t, events, "connected 1400 [10.88.0.0/24]")

			if diff := cmp.Diff(map[string]uint64{"no-session": 5 + 3 + 11 + 3}, l.cfg.Drops.Snapshot()); diff != "" {
				t.Errorf("drops:\n%s", diff)
			}
			if first.sent != 7+3 || second.sent != 0 {
				t.Errorf("sent %d and %d packets, want 10 and none", first.sent, second.sent)
			}
		})
	})
}

func TestLinkLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s *fakeSession
		dials := 0
		dial := func(_ context.Context, gateway netip.AddrPort) (session, error) {
			dials++
			s = newFakeSession(gateway)
			return s, nil
		}
		runLink(t, dial, func(l *Link, events chan string) {
			time.Sleep(20 * time.Second)
			// It fails, for a session that ends meanwhile: Run goes on.
			s.leave = func(context.Context) error {
				s.end(nil)
				time.Sleep(5 * time.Second)
				if dials != 1 {
					t.Errorf("%d dials while it leaves, want none but the first", dials)
				}
				return errors.New("the gateway went away")
			}
			if err := l.Leave(t.Context()); err == nil || !strings.Contains(err.Error(), "leave the network: the gateway went away") {
				t.Errorf("got %v", err)
			}
			if err := l.Leave(t.Context()); err == nil || !strings.Contains(err.Error(), "there is no session") {
				t.Errorf("without a session: %v", err)
			}
			time.Sleep(20 * time.Second)
			expect(t, events, "connected 1400 []", "disconnected 0 []", "connected 1400 []")

			s.leave = func(context.Context) error { s.end(nil); return nil }
			before := dials
			if err := l.Leave(t.Context()); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Minute)
			if dials != before {
				t.Errorf("%d dials after it has left", dials-before)
			}
			expect(t, events, "disconnected 0 []")
		})
	})
}

// TestLinkInAHost runs a link over QUIC where nothing is in its way: what it
// asks of the gateway, and that it does without the sidecar's mark and routes.
func TestLinkInAHost(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	g := newQUICGateway(t, l.Gateway)
	before := l.snapshot()
	subnet := netip.MustParsePrefix("172.18.0.0/16")
	// Packets with the mark would not arrive.
	l.Client.Nft("table inet marks { chain c { type filter hook output priority 0; meta mark != 0 drop; }; }")
	cmd := l.command(childSettings{
		Address: fmt.Sprintf("%v:%d", netlab.GatewayAddr4, quicPort), Pin: g.pin(),
		Link: true, Announce: []netip.Prefix{subnet},
	})
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.WaitLog(l.ctx, "msg=told"); err != nil {
		t.Fatal(err)
	}
	l.eventually(func() error {
		if g.joins() == 0 {
			return errors.New("the gateway has no session")
		}
		return nil
	})
	g.mu.Lock()
	join, session := g.join, g.sessions[0]
	g.mu.Unlock()
	if !join.Block || !slices.Equal(join.Announce, []netip.Prefix{subnet}) {
		t.Errorf("the gateway heard %+v", join)
	}
	if err := session.SetPeers([]netip.Prefix{netip.MustParsePrefix("172.19.0.0/16")}); err != nil {
		t.Error(err)
	}
	if err := cmd.WaitLog(l.ctx, "peers=[172.19.0.0/16]"); err != nil {
		t.Error(err)
	}
	l.Client.Nft("flush ruleset")
	l.stop(cmd)
	g.mu.Lock()
	left := g.left
	g.mu.Unlock()
	if !slices.Equal(left, []tunnel.Fingerprint{join.Client}) || g.joins() != 1 {
		t.Errorf("%v have left after %d sessions, want %v after one", left, g.joins(), join.Client)
	}
	if diff := before.Diff(l.snapshot()); diff != "" {
		t.Errorf("it left something behind:\n%s", diff)
	}
}

// TestFollow is about which changes in a host concern the way to a gateway.
func TestFollow(t *testing.T) {
	t.Parallel()
	top := netlab.NewTopology(t, netlab.LinkConfig{})
	host, nl := top.Client, top.Client.Netlink()
	link, err := NewLink(goodLink())
	if err != nil {
		t.Fatal(err)
	}
	gateway, router := netlab.GatewayAddr4, netip.MustParseAddr("192.0.2.1")
	before := link.look(nl)
	for _, tt := range []struct {
		name   string
		change func()
		want   bool
	}{
		{"another interface comes, with an address", func() {
			top.Lab.Link(host, top.Uplink, netlab.LinkConfig{
				A: netlab.End{Name: "br0", Addresses: []netip.Prefix{netip.MustParsePrefix("172.18.0.1/16")}}, B: netlab.End{Name: "br0"},
			})
		}, false},
		{"another subnet is routed", func() { host.Route(netip.MustParsePrefix("172.19.0.0/16"), netip.MustParseAddr("172.18.0.2")) }, false},
		{"the gateway is dialled", func() { link.allow([]netip.AddrPort{netip.AddrPortFrom(gateway, 443)}) }, false},
		{"it has a route of its own", func() { host.Route(netip.PrefixFrom(gateway, 32), netip.MustParseAddr("172.18.0.2")) }, true},
		{"the cable of that is pulled", func() { top.Uplink.Iface("br0").Down() }, true},
		{"it is put in again", func() { top.Uplink.Iface("br0").Up() }, true},
		{"that interface goes", func() { host.Iface("br0").Down() }, true},
		{"the uplink goes", func() { top.ClientIf.Down() }, true},
		{"the uplink comes", func() { top.ClientIf.Up(); host.DefaultRoute(router) }, true},
	} {
		tt.change()
		now := link.look(nl)
		// The kernel takes its time with what a carrier does.
		for deadline := time.Now().Add(testPatience); tt.want && !now.isOther(before) && time.Now().Before(deadline); now = link.look(nl) {
			time.Sleep(5 * time.Millisecond)
		}
		if now.isOther(before) != tt.want {
			t.Errorf("%s: another way: %t, want %t\n%+v\n%+v", tt.name, !tt.want, tt.want, before, now)
		}
		before = now
	}

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	moved, done := make(chan struct{}, 1), make(chan error)
	go func() { done <- host.Do(func() error { return link.follow(ctx, moved) }) }()
	for up := false; len(moved) == 0 && ctx.Err() == nil; up = !up {
		if up {
			top.ClientIf.Up()
		} else {
			top.ClientIf.Down()
		}
		sleep(ctx, 2*settle)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if len(moved) == 0 {
		t.Error("nothing is told of an uplink that goes and comes")
	}
}
