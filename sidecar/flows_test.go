package sidecar

import (
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

type noSink struct{}

func (noSink) WritePackets(int, []packet.Packet) {}

// flowWorld is a link to a gateway on loopback that dials whatever it is asked for.
type flowWorld struct {
	t     *testing.T
	link  *Link
	dials atomic.Int32 // that the gateway has done
	key   ed25519.PrivateKey
	at    netip.AddrPort
	stop  func()
}

func newFlowWorld(t *testing.T, open TCPOpen) *flowWorld {
	t.Helper()
	w := &flowWorld{t: t, key: newKey(t), at: netip.MustParseAddrPort("127.0.0.1:0")}
	w.start()
	t.Cleanup(func() { w.stop() })
	cfg := goodLink()
	cfg.Token = token.Token{Address: w.at.String(), Pin: tunnel.KeyFingerprint(w.key.Public().(ed25519.PublicKey))}
	cfg.Key = newKey(t)
	cfg.TCPOpen = open
	cfg.Connected = func(tunnel.Grant) tunnel.Sink { return noSink{} }
	var err error
	if w.link, err = NewLink(cfg); err != nil {
		t.Fatal(err)
	}
	w.run(w.link.Run)
	return w
}

// run runs something until the test ends, and returns what ends it sooner.
func (w *flowWorld) run(f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	over := false
	stop = func() {
		if cancel(); !over {
			over = true
			if err := <-done; err != nil {
				w.t.Error(err)
			}
		}
	}
	w.t.Cleanup(stop)
	return stop
}

// start starts the gateway, at the address that it had.
func (w *flowWorld) start() {
	w.t.Helper()
	server, err := tunnel.Listen(tunnel.ServerConfig{
		Listen:    w.at,
		Key:       w.key,
		Authorize: func(context.Context, tunnel.Join) (tunnel.Grant, error) { return defaultToyGrant().Grant, nil },
		Serve:     func(_ context.Context, s *tunnel.Session) { _ = s.Receive(noSink{}) },
		DialTCP: func(ctx context.Context, _ *tunnel.Session, address string) (net.Conn, error) {
			w.dials.Add(1)
			return new(net.Dialer).DialContext(ctx, "tcp", address)
		},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.at = server.Addr()
	w.stop = w.run(server.Run)
}

func newKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// target serves connections with a greeting, until close.
func target(t *testing.T) (address string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("hi"))
			c.Close()
		}
	}()
	stop = func() {
		l.Close()
		<-done
	}
	t.Cleanup(stop)
	return l.Addr().String(), stop
}

// fetch dials and reads all, and returns the error of each.
func (w *flowWorld) fetch(address string) (dial, read error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 15*time.Second)
	defer cancel()
	c, err := w.link.Dial(ctx, "tcp", address)
	if err != nil {
		return err, nil
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	if err == nil && string(b) != "hi" {
		w.t.Errorf("read %q", b)
	}
	return nil, err
}

// A dial says when the connection is open: with auto it is strict the first time,
// and again when the address no longer answers.
func TestLinkDial(t *testing.T) {
	for _, tt := range []struct {
		open          TCPOpen
		dial1, read1  error // before anything listens
		dial2, dialed error // after it has, and has stopped; and the time after that
	}{
		{TCPOpenStrict, syscall.ECONNREFUSED, nil, syscall.ECONNREFUSED, syscall.ECONNREFUSED},
		{TCPOpenEarly, nil, syscall.ECONNREFUSED, nil, nil},
		{TCPOpenAuto, syscall.ECONNREFUSED, nil, nil, syscall.ECONNREFUSED},
	} {
		t.Run(tt.open.String(), func(t *testing.T) {
			w := newFlowWorld(t, tt.open)
			nobody, stop := target(t)
			stop()
			if dial, read := w.fetch(nobody); !errors.Is(dial, tt.dial1) || !errors.Is(read, tt.read1) {
				t.Errorf("dial %v, read %v", dial, read)
			}
			somebody, stop := target(t)
			for range 2 {
				if dial, read := w.fetch(somebody); dial != nil || read != nil {
					t.Errorf("dial %v, read %v", dial, read)
				}
			}
			stop()
			if dial, read := w.fetch(somebody); !errors.Is(dial, tt.dial2) || dial == nil && !errors.Is(read, syscall.ECONNREFUSED) {
				t.Errorf("after its end: dial %v, read %v", dial, read)
			}
			if dial, _ := w.fetch(somebody); !errors.Is(dial, tt.dialed) {
				t.Errorf("once more: dial %v", dial)
			}
			if n := w.dials.Load(); n != 5 {
				t.Errorf("the gateway dialled %d times", n)
			}
			if _, err := w.link.Dial(t.Context(), "udp", somebody); err == nil {
				t.Error("it dials UDP")
			}
		})
	}
}

// Flows end with their session at once, and the next ones wait for the next session.
func TestFlowsOfSessions(t *testing.T) {
	w := newFlowWorld(t, TCPOpenAuto)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := w.link.DialTCP(t.Context(), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w.stop()
	f.SetReadDeadline(time.Now().Add(time.Second))
	if _, err := f.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %v, want a reset", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := w.link.DialTCP(ctx, l.Addr().String()); !errors.Is(err, syscall.ENETDOWN) {
		t.Errorf("%v, want that the network is down", err)
	}
	w.start()
	f, err = w.link.DialTCP(t.Context(), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// What is known of addresses passes, and does not grow without end.
func TestReached(t *testing.T) {
	var r reached
	for i := range 2 * maxAnswered {
		r.tell(netip.AddrFrom4([4]byte{byte(i >> 16), byte(i >> 8), byte(i)}).String(), nil)
	}
	if len(r.last) > maxAnswered {
		t.Errorf("%d addresses are kept", len(r.last))
	}
	r.tell("a:1", nil)
	if !r.lately("a:1") || r.lately("b:1") {
		t.Error("it mistakes addresses")
	}
	r.last["a:1"] = time.Now().Add(-answerLasts)
	if r.lately("a:1") {
		t.Error("it does not forget")
	}
	r.tell("a:1", nil)
	r.tell("a:1", syscall.ECONNREFUSED)
	if r.lately("a:1") {
		t.Error("it keeps what no longer answers")
	}
}
