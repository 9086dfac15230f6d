package sidecar

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// quicGateway is the other end of a real tunnel. It answers every echo request.
type quicGateway struct {
	t    *testing.T
	ns   *netlab.NS
	key  ed25519.PrivateKey
	stop func()

	mu       sync.Mutex // guards what follows
	refuse   *tunnel.RefusedError
	join     tunnel.Join          // the last one
	left     []tunnel.Fingerprint // who does not come back
	sessions []*tunnel.Session
}

func newQUICGateway(t *testing.T, ns *netlab.NS) *quicGateway {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	g := &quicGateway{t: t, ns: ns, key: key}
	g.start(time.Now)
	t.Cleanup(func() { g.stop() })
	return g
}

func (g *quicGateway) pin() [32]byte {
	return tunnel.KeyFingerprint(g.key.Public().(ed25519.PublicKey))
}

// start listens, with a clock.
func (g *quicGateway) start(now func() time.Time) {
	g.t.Helper()
	var server *tunnel.Server
	if err := g.ns.Do(func() (err error) {
		server, err = tunnel.Listen(tunnel.ServerConfig{
			Listen: netip.AddrPortFrom(netip.IPv6Unspecified(), quicPort),
			Key:    g.key,
			Now:    now,
			Log:    slog.New(slog.DiscardHandler),
			Authorize: func(_ context.Context, join tunnel.Join) (tunnel.Grant, error) {
				g.mu.Lock()
				defer g.mu.Unlock()
				g.join = join
				if g.refuse != nil {
					return tunnel.Grant{}, g.refuse
				}
				return defaultToyGrant().Grant, nil
			},
			Leave: func(client tunnel.Fingerprint) error {
				g.mu.Lock()
				defer g.mu.Unlock()
				g.left = append(g.left, client)
				return nil
			},
			Serve: func(_ context.Context, s *tunnel.Session) {
				g.mu.Lock()
				g.sessions = append(g.sessions, s)
				g.mu.Unlock()
				_ = s.Receive(echoSink{s}) // its end is the test's doing
			},
		})
		return err
	}); err != nil {
		g.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Run(ctx); err != nil {
			g.t.Errorf("gateway: %v", err)
		}
	}()
	g.stop = func() {
		cancel()
		<-done
	}
}

func (g *quicGateway) joins() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.sessions)
}

type echoSink struct{ s *tunnel.Session }

func (e echoSink) WritePackets(queue int, pkts []packet.Packet) {
	for _, p := range pkts {
		h, err := packet.Parse(p.Data)
		if err != nil {
			continue
		}
		if reply := echoReply(slices.Clone(p.Data), h); reply != nil {
			e.s.Send(queue, []packet.Packet{{Data: reply}}, e)
		}
	}
}

const quicPort = 4434

// TestRealTunnel runs the sidecar over QUIC, and has the gateway do what makes
// it connect again.
func TestRealTunnel(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	g := newQUICGateway(t, l.Gateway)
	address := fmt.Sprintf("%v:%d", netlab.GatewayAddr4, quicPort)
	capture := l.UplinkClientIf.Capture(netip.AddrPortFrom(netlab.GatewayAddr4, quicPort))
	cmd := l.start(childSettings{Address: address, Pin: g.pin()})
	l.ping(toyRemote4, toyRemote6)

	// The gateway restarts: the client learns of it at once.
	g.stop()
	g.start(time.Now)
	start := time.Now()
	l.ping(toyRemote4)
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("back %v after the gateway", took)
	}

	// The gateway ends the session.
	n := g.joins()
	g.mu.Lock()
	last := g.sessions[n-1]
	g.mu.Unlock()
	if err := last.Close("moved to another gateway"); err != nil {
		t.Error(err)
	}
	l.eventually(func() error {
		if g.joins() == n {
			return errors.New("no new session")
		}
		return nil
	})
	l.ping(toyRemote4)
	if !strings.Contains(cmd.Log(), "moved to another gateway") {
		t.Errorf("the reason is not in the log:\n%s", cmd.Log())
	}

	// The link goes down for a while.
	l.ClientIf.Down()
	time.Sleep(4 * time.Second)
	l.ClientIf.Up()
	l.Client.DefaultRoute(netip.MustParseAddr("192.0.2.1"))
	start = time.Now()
	l.ping(toyRemote4)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("back %v after the link", took)
	}

	// Revoked while it runs, and allowed again.
	g.mu.Lock()
	g.refuse = &tunnel.RefusedError{Status: 401, Code: "token-revoked", Text: "the token was revoked: ask for a new one"}
	last = g.sessions[len(g.sessions)-1]
	g.mu.Unlock()
	last.Close("revoked")
	if err := cmd.WaitLog(l.ctx, "the token was revoked: ask for a new one"); err != nil {
		t.Error(err)
	}
	g.mu.Lock()
	g.refuse = nil
	g.mu.Unlock()
	l.ping(toyRemote4)
	l.stop(cmd)
	if problem := capture.Traffic().Problem(); problem != "" {
		t.Error(problem)
	}
}

// TestTroubles: what the user reads when it does not work.
func TestTroubles(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	g := newQUICGateway(t, l.Gateway)
	address := fmt.Sprintf("%v:%d", netlab.GatewayAddr4, quicPort)
	wrong := g.pin()
	wrong[0]++
	year := 365 * 24 * time.Hour
	tests := []struct {
		name, address string
		pin           [32]byte
		clock         time.Duration // of the gateway, ahead
		want          string
	}{
		{"wrong pin", address, wrong, 0, "not the one in the token"},
		{"gateway's clock ahead", address, g.pin(), year, "not yet valid"},
		{"gateway's clock behind", address, g.pin(), -year, "has expired"},
		{"nobody listens", "198.51.100.2:9", g.pin(), 0, "nothing listens at 198.51.100.2:9 by UDP"},
		{"nobody answers", "198.51.100.99:9", g.pin(), 0, "UDP to it seems blocked"},
		{"unreachable", "198.18.0.1:443", g.pin(), 0, "no way to 198.18.0.1:443 from here"},
	}
	l.sh("ip", "route", "add", "unreachable", "198.18.0.1")
	l.Uplink.Nft("table inet blocked { chain c { type filter hook forward priority 0; udp dport 9 ip daddr 198.51.100.99 drop; }; }")
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g.stop()
			g.start(func() time.Time { return time.Now().Add(tt.clock) })
			l.t = t
			cmd := l.command(childSettings{Address: tt.address, Pin: tt.pin})
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if err := cmd.WaitLog(l.ctx, "cannot connect"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
			if !strings.Contains(cmd.Log(), tt.want) {
				t.Errorf("the log lacks %q:\n%s", tt.want, cmd.Log())
			}
			l.stop(cmd)
		})
	}
	l.t = t
}
