package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
)

// The test binary is also the processes that tests start in namespaces.
const childEnv = "QUICVPN_GATEWAY_TEST_CHILD"

func TestMain(m *testing.M) {
	kind, args, child := strings.Cut(os.Getenv(childEnv), " ")
	if !child {
		goleak.VerifyTestMain(m)
		return
	}
	err := fmt.Errorf("no child of the kind %q", kind)
	switch kind {
	case "egress":
		err = egressChild(args)
	case "client":
		err = clientChild(args)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// gatewayConfig makes a state directory with pools that the tests know, and a
// configuration for it.
func (w *world) gatewayConfig() (Config, token.Token) {
	dir, first := newState(w.t, InitOptions{
		Pool4: netip.MustParsePrefix("10.91.0.0/16"), Pool6: netip.MustParsePrefix("fd12::/64")})
	return Config{StateDir: dir, Queues: 2,
		Log: slog.New(slog.NewTextHandler(w.log, nil))}, first
}

// newGateway starts a gateway on the host.
func (w *world) newGateway(cfg Config) (g *Gateway, err error) {
	err = w.host.Do(func() error {
		g, err = New(cfg)
		return err
	})
	return g, err
}

// run runs a gateway until stop, which returns what Run did.
func runGateway(t *testing.T, g *Gateway) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var err error
	go func() {
		err = g.Run(ctx)
		close(done)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() error {
		cancel()
		<-done
		return err
	}
}

func TestGateway(t *testing.T) {
	w := newWorld(t)
	before := w.snapshot()
	cfg, first := w.gatewayConfig()
	second, err := CreateToken(cfg.StateDir, TokenOptions{Name: "second", Network: "other"}, start)
	if err != nil {
		t.Fatal(err)
	}
	g, err := w.newGateway(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if g.Addr().Port() != 4433 {
		t.Errorf("listens on %v", g.Addr())
	}
	stop := runGateway(t, g)
	near, far := netip.AddrPortFrom(hostAddr4, 4433), netip.AddrPortFrom(netip.MustParseAddr("2001:db8:5::1"), 4433)
	a := newTestClient(t, w.internet, clientConfig{Gateway: near, Token: first.Encode(), Seed: 1})
	b := newTestClient(t, w.lan, clientConfig{Gateway: far, Token: first.Encode(), Seed: 2})
	c := newTestClient(t, w.lan, clientConfig{Gateway: far, Token: second.Encode(), Seed: 3})
	want := greeting{Grant: g.grant(Client{Network: "default",
		Addr4: netip.MustParseAddr("10.91.0.2"), Addr6: netip.MustParseAddr("fd12::2")})}
	if diff := cmp.Diff(want, a.greeting, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("the first client's grant (-want +got):\n%s", diff)
	}
	for i, f := range families {
		ipA, ipB, ipC := a.Grant.Addresses[i], b.Grant.Addresses[i], c.Grant.Addresses[i]
		// To the internet and back.
		server := port16(f.inet, 5300)
		in := newInbox(t, w.internet, server)
		b.send(udpPacket(port16(ipB, 4000), server, []byte("question")))
		from := in.waitFrom(t, "question")
		if from.Addr() != f.host {
			t.Errorf("the internet sees %v", from)
		}
		if _, err := in.WriteTo([]byte("answer"+f.name), net.UDPAddrFromAddrPort(from)); err != nil {
			t.Fatal(err)
		}
		if h, _ := b.wait("answer" + f.name); h.Src != f.inet || h.Dst != ipB {
			t.Errorf("the answer goes from %v to %v", h.Src, h.Dst)
		}
		// From client to client.
		a.send(udpPacket(port16(ipA, 1), port16(ipB, 2), []byte("hello "+f.name)))
		if h, p := b.wait("hello " + f.name); h.Src != ipA || h.HopLimit != 63 || !checksumsHold(p) {
			t.Errorf("client to client: from %v, hop limit %d", h.Src, h.HopLimit)
		}
		// To another network's client: an error quotes the packet.
		a.send(udpPacket(port16(ipA, 1), port16(ipC, 2), []byte("trespass "+f.name)))
		if h, _ := a.wait("trespass " + f.name); h.Src != f.pool {
			t.Errorf("a packet to another network is answered by %v", h.Src)
		}
		// The gateway itself.
		a.send(echoPacket(ipA, f.pool, 1, 1, []byte("ping "+f.name)))
		if h, p := a.wait("ping " + f.name); h.Src != f.pool || p[h.IPLen] != f.reply {
			t.Errorf("a ping to the gateway is answered by %v, type %d", h.Src, p[h.IPLen])
		}
	}
	if c.mu.Lock(); len(c.got) > 0 {
		t.Errorf("the client of the other network got %d packets", len(c.got))
	}
	c.mu.Unlock()

	// The same key joins again.
	again := newTestClient(t, w.lan, clientConfig{Gateway: far, Token: first.Encode(), Seed: 1})
	if diff := cmp.Diff(fmt.Sprint(a.Grant.Addresses), fmt.Sprint(again.Grant.Addresses)); diff != "" {
		t.Errorf("a client's addresses have changed: %s", diff)
	}
	if end := a.ended(patience); !strings.Contains(end, "replaced") {
		t.Errorf("the replaced session ended with %q", end)
	}
	b.send(udpPacket(port16(b.Grant.Addresses[0], 2), port16(again.Grant.Addresses[0], 1), []byte("welcome back")))
	again.wait("welcome back")

	// Revocation.
	if _, err := RevokeToken(cfg.StateDir, "second", time.Now()); err != nil {
		t.Fatal(err)
	}
	if end := c.ended(time.Second); !strings.Contains(end, "revoked") {
		t.Errorf("the revoked session ended with %q", end)
	}
	refused := newTestClient(t, w.lan, clientConfig{Gateway: far, Token: second.Encode(), Seed: 3})
	if refused.Refused == nil || refused.Refused.Code != "token-revoked" {
		t.Errorf("a revoked client got %+v", refused.greeting)
	}

	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	b.ended(patience)
	if diff := before.Diff(w.host.Snapshot()); diff != "" {
		t.Errorf("the host is not as it was:\n%s", diff)
	}
	if err := g.Close(); err != nil {
		t.Errorf("Close after Run: %v", err)
	}
}

func TestGatewayFailsClean(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Config)
		want   []string
	}{
		{"no state directory", func(c *Config) { c.StateDir = "" }, []string{"--state-dir"}},
		{"an empty state directory", func(c *Config) { c.StateDir = "/nowhere" }, []string{"/nowhere"}},
		{"port in use", func(c *Config) { c.Listen = netip.MustParseAddrPort("203.0.113.2:9") }, []string{"203.0.113.2:9", "in use"}},
		{"a port without an address", func(c *Config) { c.Listen = netip.AddrPortFrom(netip.Addr{}, 9) }, []string{"not an IP address"}},
		{"an address that is not here", func(c *Config) { c.Listen = netip.MustParseAddrPort("203.0.113.99:443") }, []string{"203.0.113.99"}},
		{"MTU 1000", func(c *Config) { c.MTU = 1000 }, []string{"1000", "1280 to 1500"}},
		{"MTU 100000", func(c *Config) { c.MTU = 100000 }, []string{"100000", "1280 to 1500"}},
		{"too many queues", func(c *Config) { c.Queues = 257 }, []string{"257", "256"}},
		{"less than no queue", func(c *Config) { c.Queues = -1 }, []string{"-1"}},
		{"a long name", func(c *Config) { c.Interface = "quicvpn-gateway0" }, []string{"quicvpn-gateway0", "15"}},
		{"a name of two words", func(c *Config) { c.Interface = "a b" }, []string{`"a b"`}},
		{"a pattern for a name", func(c *Config) { c.Interface = "gw%d" }, []string{"gw%d"}},
		{"a name in use", func(c *Config) { c.Interface = "eth1" }, []string{"eth1", "in use"}},
	}
	w := newWorld(t)
	good, _ := w.gatewayConfig()
	newInbox(t, w.host, netip.MustParseAddrPort("203.0.113.2:9"))
	before := w.snapshot()
	open := w.descriptors()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := good
			tt.change(&cfg)
			g, err := w.newGateway(cfg)
			if err == nil {
				t.Fatal("it started", g.Close())
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("says %q, want something about %q", err, want)
				}
			}
			if diff := before.Diff(w.host.Snapshot()); diff != "" {
				t.Errorf("the host is not as it was:\n%s", diff)
			}
		})
	}
	// None of them holds the state directory or the port; nor does one that
	// never ran.
	for range 2 {
		g, err := w.newGateway(good)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.newGateway(good); err == nil || !strings.Contains(err.Error(), "another gateway") {
			t.Errorf("a second gateway: %v", err)
		}
		if err := errors.Join(g.Close(), g.Close()); err != nil {
			t.Error(err)
		}
		if diff := before.Diff(w.host.Snapshot()); diff != "" {
			t.Errorf("the host is not as it was:\n%s", diff)
		}
	}
	if diff := cmp.Diff(open, w.descriptors()); diff != "" {
		t.Errorf("descriptors (-before +after):\n%s", diff)
	}
}

// descriptors returns what this process has open.
func (w *world) descriptors() []string {
	w.t.Helper()
	fds, err := netlab.Descriptors(os.Getpid())
	if err != nil {
		w.t.Fatal(err)
	}
	return fds
}

func TestConfigDefaults(t *testing.T) {
	c := Config{StateDir: "x"}
	if err := c.fill(); err != nil {
		t.Fatal(err)
	}
	if c.Listen.IsValid() || c.Interface != "quicvpn-gw" || c.Queues < 1 || c.Queues > 8 || c.MTU != 0 || c.Log == nil {
		t.Errorf("filled as %+v", c)
	}
}

// A device that somebody deletes ends the gateway: its supervisor starts it anew.
func TestGatewayEndsWithItsDevice(t *testing.T) {
	w := newWorld(t)
	before := w.snapshot()
	cfg, _ := w.gatewayConfig()
	g, err := w.newGateway(cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- g.Run(context.Background()) }()
	w.run("ip", "link", "delete", "quicvpn-gw")
	if err := <-done; err == nil || !strings.Contains(err.Error(), "quicvpn-gw") {
		t.Errorf("Run: %v", err)
	}
	if diff := before.Diff(w.host.Snapshot()); diff != "" {
		t.Errorf("the host is not as it was:\n%s", diff)
	}
}

func TestReport(t *testing.T) {
	l := newRouterLab(t)
	synctest.Test(t, func(t *testing.T) {
		var log logBuffer
		g := &Gateway{cfg: Config{Log: log.logger()}, router: l.router}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- g.report(ctx) }()
		lines := func() int { return strings.Count(log.String(), "\n") }
		for _, step := range []struct {
			change func()
			want   int
		}{
			{func() {}, 1}, // three sessions
			{func() {}, 1},
			{func() { g.drops.Add(packet.DropSource, 3) }, 2},
			{func() {}, 2},
			{func() { l.detach(l.c) }, 3},
		} {
			step.change()
			time.Sleep(reportInterval)
			synctest.Wait()
			if n := lines(); n != step.want {
				t.Errorf("%d lines, want %d:\n%s", n, step.want, log.String())
			}
		}
		if !strings.Contains(log.String(), `"source":3`) {
			t.Errorf("the log lacks the reason:\n%s", log.String())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
