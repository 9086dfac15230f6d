package sidecar

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/proxy"

	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// aloneWorld is a sidecar without a TUN device, and a gateway on loopback that dials
// everything but 0.0.0.0, which it takes for another host's business.
type aloneWorld struct {
	t     *testing.T
	cfg   Config
	proxy netip.AddrPort
	log   *lockedBuffer

	key  ed25519.PrivateKey
	at   netip.AddrPort // of the gateway
	dead bool           // it answers no request
	mu   sync.Mutex     // guards dead
	stop func()         // the gateway
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}
func (l *lockedBuffer) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

func newAloneWorld(t *testing.T, set func(*Config)) *aloneWorld {
	t.Helper()
	w := &aloneWorld{t: t, key: newKey(t), at: netip.MustParseAddrPort("127.0.0.1:0"), proxy: freePort(t), log: new(lockedBuffer)}
	w.startGateway()
	w.cfg = Config{
		Token:      token.Token{Address: w.at.String(), Pin: tunnel.KeyFingerprint(w.key.Public().(ed25519.PublicKey))},
		StateDir:   t.TempDir(),
		DisableTUN: true,
		Proxies:    []netip.AddrPort{w.proxy},
		Log:        slog.New(slog.NewTextHandler(w.log, nil)),
	}
	if set != nil {
		set(&w.cfg)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the sidecar said:\n%s", w.log)
		}
	})
	return w
}

func freePort(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// run runs something until the test ends, and returns what ends it sooner.
func (w *aloneWorld) run(f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(stop)
	return stop
}

// startGateway starts the gateway, at the address that it had.
func (w *aloneWorld) startGateway() {
	w.t.Helper()
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		w.mu.Lock()
		dead := w.dead
		w.mu.Unlock()
		if dead {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		if strings.HasPrefix(address, "0.0.0.0:") {
			return nil, syscall.EACCES
		}
		if _, port, _ := net.SplitHostPort(address); strings.HasPrefix(address, "app.test:") {
			address = net.JoinHostPort("127.0.0.1", port)
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	server, err := tunnel.Listen(tunnel.ServerConfig{
		Listen:    w.at,
		Key:       w.key,
		Authorize: func(context.Context, tunnel.Join) (tunnel.Grant, error) { return defaultToyGrant().Grant, nil },
		Serve:     func(_ context.Context, s *tunnel.Session) { _ = s.Receive(noSink{}) },
		DialTCP: func(ctx context.Context, _ *tunnel.Session, address string) (net.Conn, error) {
			return dial(ctx, "tcp", address)
		},
		DialUDP: func(ctx context.Context, _ *tunnel.Session, address string) (net.Conn, error) {
			return dial(ctx, "udp", address)
		},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.at = server.Addr()
	w.stop = w.run(server.Run)
}

// start starts the sidecar and waits until it is healthy.
func (w *aloneWorld) start() (stop func()) {
	w.t.Helper()
	s, err := New(w.cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	stop = w.run(s.Run)
	w.eventually(func() error { return w.health(time.Second) })
	return stop
}

func (w *aloneWorld) eventually(ok func() error) {
	w.t.Helper()
	for deadline := time.Now().Add(testPatience); ; time.Sleep(20 * time.Millisecond) {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("after %v: %v", testPatience, err)
		}
	}
}

func (w *aloneWorld) health(timeout time.Duration) error {
	line, err := CheckHealth(context.Background(), w.cfg.StateDir, timeout)
	if err == nil && !strings.HasPrefix(line, "the gateway answers the proxies: after ") {
		err = fmt.Errorf("healthy with %q", line)
	}
	return err
}

// dial connects through the proxy.
func (w *aloneWorld) dial(to string) (net.Conn, error) {
	d, err := proxy.SOCKS5("tcp", w.proxy.String(), nil, &net.Dialer{Timeout: 5 * time.Second})
	if err != nil {
		w.t.Fatal(err)
	}
	c, err := d.Dial("tcp", to)
	if err == nil {
		w.t.Cleanup(func() { c.Close() })
		err = c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return c, err
}

// echoServer sends back what comes by TCP and UDP.
func echoServer(t *testing.T) (address string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pc, err := net.ListenPacket("udp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	running.Go(func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(b[:n], from)
		}
	})
	t.Cleanup(func() {
		l.Close()
		pc.Close()
		running.Wait()
	})
	return l.Addr().String()
}

func echoes(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(text))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != text {
		t.Fatalf("%q came back (%v), want %q", b, err, text)
	}
}

func TestAlone(t *testing.T) {
	w := newAloneWorld(t, nil)
	if err := w.health(time.Second); err == nil || !strings.Contains(err.Error(), "no sidecar runs with this state directory") {
		t.Errorf("before the start: %v", err)
	}
	stop := w.start()
	to := echoServer(t)
	_, port, _ := net.SplitHostPort(to)
	first, err := w.dial(to)
	if err != nil {
		t.Fatal(err)
	}
	echoes(t, first, "by address")
	named, err := w.dial("app.test:" + port)
	if err != nil {
		t.Fatal(err)
	}
	echoes(t, named, "by name")
	if _, err := w.dial("127.0.0.1:1"); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("a closed port: %v", err)
	}
	if _, err := w.dial("0.0.0.0:80"); err == nil || !strings.Contains(err.Error(), "not allowed") {
		t.Errorf("what the gateway refuses: %v", err)
	}

	// Without a gateway connections are reset, and new ones wait for it for a while.
	w.stop()
	lost := time.Now()
	if _, err := first.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) || time.Since(lost) > time.Second {
		t.Errorf("without a gateway: %v after %v, want a reset within a second", err, time.Since(lost))
	}
	w.eventually(func() error {
		if err := w.health(time.Second); err == nil || !strings.Contains(err.Error(), "no tunnel since ") {
			return fmt.Errorf("healthy without a gateway: %w", err)
		}
		return nil
	})
	again := make(chan error, 1)
	go func() {
		c, err := w.dial(to)
		if err == nil {
			_, err = c.Write([]byte("x"))
		}
		again <- err
	}()
	time.Sleep(300 * time.Millisecond)
	w.startGateway()
	if err := <-again; err != nil {
		t.Errorf("a connection that waited for the gateway: %v", err)
	}
	w.eventually(func() error { return w.health(time.Second) })

	// A gateway that takes requests and answers none.
	w.set(func() { w.dead = true })
	before := time.Now()
	if err := w.health(500 * time.Millisecond); err == nil || time.Since(before) > 2*time.Second ||
		!strings.Contains(err.Error(), "the tunnel is dead: no answer from the gateway within 500ms, although the session stands since ") {
		t.Errorf("a gateway that does not answer: %v", err)
	}
	w.set(func() { w.dead = false })
	if err := w.health(3 * time.Second); err != nil {
		t.Error(err)
	}

	open, err := w.dial(to)
	if err != nil {
		t.Fatal(err)
	}
	echoes(t, open, "until the end")
	stop()
	if _, err := open.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after a stop: %v, want a reset", err)
	}
	files, err := filepath.Glob(filepath.Join(w.cfg.StateDir, "*"))
	files = slices.DeleteFunc(files, func(f string) bool { return filepath.Base(f) == "paths.json" }) // a hint for the next session
	if err != nil || len(files) != 1 {
		t.Errorf("the state directory holds %v (%v), want the key alone", files, err)
	}
}

func (w *aloneWorld) set(change func()) { w.mu.Lock(); defer w.mu.Unlock(); change() }

// While there is no gateway at all, clients are told so in bounded time.
func TestAloneWithoutGateway(t *testing.T) {
	t.Parallel()
	w := newAloneWorld(t, nil)
	w.stop()
	s, err := New(w.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer w.run(s.Run)()
	w.eventually(func() error {
		if !strings.Contains(w.log.String(), "a proxy listens") {
			return errors.New("no proxy listens")
		}
		return nil
	})
	second, err := New(w.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "another quicvpn sidecar runs with the state directory "+w.cfg.StateDir) {
		t.Errorf("a second one with the same key: %v", err)
	}
	before := time.Now()
	_, err = w.dial("192.0.2.1:80")
	if took := time.Since(before); err == nil || !strings.Contains(err.Error(), "network unreachable") || took > 15*time.Second {
		t.Errorf("%v after %v", err, took)
	}
	if err := w.health(time.Second); err == nil || !strings.Contains(err.Error(), "no tunnel since ") {
		t.Errorf("healthy without a gateway: %v", err)
	}
}

// What cannot run touches nothing.
func TestAloneRefused(t *testing.T) {
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	elsewhere := netip.MustParseAddrPort("0.0.0.0:1080")
	for _, tt := range []struct {
		set  func(*Config)
		want string
	}{
		{func(c *Config) { c.Proxies = nil }, "configure sidecar: Proxies: without a TUN device"},
		{func(c *Config) { c.Proxies = append(c.Proxies, elsewhere) }, "configure sidecar: Proxies: 0.0.0.0:1080 is not a loopback address"},
		{func(c *Config) { c.Proxies = append(c.Proxies, netip.AddrPort{}) }, "configure sidecar: Proxies: invalid AddrPort is no address"},
		{func(c *Config) { c.ResolvConf = true }, "configure sidecar: ResolvConf: "},
		{func(c *Config) { c.StateDir = "/proc/nothing" }, "configure sidecar: create key: "},
		{func(c *Config) { c.Proxies = append(c.Proxies, taken.Addr().(*net.TCPAddr).AddrPort()) }, "another program has the port"},
		{func(c *Config) {
			c.Proxies, c.ProxyAuth = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.77:1080")}, func(_, _ string) bool { return true }
		}, "there is no interface with this address"},
	} {
		w := newAloneWorld(t, tt.set)
		s, err := New(w.cfg)
		if err == nil {
			err = s.Run(t.Context())
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v, want %s", err, tt.want)
		}
		if l, err := net.Listen("tcp", w.proxy.String()); err != nil {
			t.Errorf("%s: a listener is left: %v", tt.want, err)
		} else {
			l.Close()
		}
	}
}

// TestProbeOfOthers: anybody in the namespace may ask, and hang.
func TestProbeOfOthers(t *testing.T) {
	w := newAloneWorld(t, nil)
	defer w.start()()
	s, err := readStatus(w.cfg.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		c, err := net.Dial("unix", s.Probe)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write(make([]byte, 100)) // it may have its answer by then
	}
	if err := w.health(3 * time.Second); err != nil {
		t.Error(err)
	}
	status := filepath.Join(w.cfg.StateDir, statusName)
	if err := os.WriteFile(status, []byte(`{"probe": "@quicvpn-nobody", "connected": true}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := w.health(time.Second); err == nil || !strings.Contains(err.Error(), "there is no sidecar here: it was killed") {
		t.Errorf("what a killed sidecar left: %v", err)
	}
}
