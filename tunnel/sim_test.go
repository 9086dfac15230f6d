//go:build bench

package tunnel

import (
	"context"
	"crypto/ed25519"
	"net"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/time/rate"

	"github.com/quicvpn/quicvpn/internal/linksim"
	"github.com/quicvpn/quicvpn/tunnel/internal/congestion/install"
)

// simMTU is what all emulated paths carry.
const simMTU = 1400

// simulateSession opens a session over emulated links, and returns the client's end.
// Both ends are a Dialer's and a Server's but for the sockets. It lives until ctx
// ends, and stop returns when nothing of it is left.
func simulateSession(ctx context.Context, t *testing.T, d *Dialer, cfg ServerConfig, there, back *linksim.Link) (s *Session, stop func()) {
	t.Helper()
	a, b := linksim.Connect(there, back, 1)
	if cfg.Key == nil {
		cfg.Key = newKey(t)
	}
	if cfg.Authorize == nil {
		cfg.Authorize = func(context.Context, Join) (Grant, error) { return testGrant, nil }
	}
	if cfg.Serve == nil {
		cfg.Serve = func(_ context.Context, s *Session) { s.Receive(newCollector()) }
	}
	cfg.Now, cfg.Log, cfg.Drops = time.Now, orDiscard(cfg.Log), orNew(cfg.Drops)
	server := &Server{cfg: cfg, sessions: make(map[*Session]struct{}), refusals: rate.NewLimiter(1, 10)}
	acceptor := &quic.Transport{Conn: b}
	listener, err := acceptor.Listen(serverTLS(cfg.Key, time.Now), server.quicConfig(simMTU))
	if err != nil {
		t.Fatal(err)
	}
	d.Key, d.Pin = newKey(t), KeyFingerprint(cfg.Key.Public().(ed25519.PublicKey))
	serving, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if conn, err := listener.Accept(serving); err == nil {
			server.serveConn(serving, conn)
		}
	}()

	tlsConf, err := clientTLS(d.Key, d.Pin, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	dialer := &quic.Transport{Conn: a}
	conf := quicConfig(simMTU)
	conf.Tracer = d.Congestion.tracer()
	began := time.Now()
	conn, err := dialer.Dial(ctx, b.LocalAddr().(*net.UDPAddr), tlsConf, conf)
	if err != nil {
		t.Fatal(err)
	}
	at := &attempt{conn: conn, release: func() {}}
	at.steering = d.Congestion.steer(conn, install.Options{RTT: time.Since(began)}, orDiscard(d.Log))
	if s, err = d.connectIP(ctx, at); err != nil {
		t.Fatal(err)
	}
	received := make(chan struct{})
	go func() {
		defer close(received)
		s.Receive(newCollector())
	}()
	return s, func() {
		s.Close("the simulation is over")
		<-received
		cancel()
		<-done
		listener.Close()
		dialer.Close()
		acceptor.Close()
		a.Close()
		b.Close()
	}
}
