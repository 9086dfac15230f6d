package sidecar

import (
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
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
	path  *path // of the link to the gateway, where it is not direct
}

func newFlowWorld(t *testing.T, open TCPOpen) *flowWorld {
	t.Helper()
	w := &flowWorld{t: t, key: newKey(t), at: netip.MustParseAddrPort("127.0.0.1:0")}
	w.start()
	t.Cleanup(func() { w.stop() })
	w.join(open)
	return w
}

// through is another client of the gateway, by a path of its own.
func (w *flowWorld) through(t *testing.T) *flowWorld {
	p := newPath(t, w.at)
	other := &flowWorld{t: t, key: w.key, at: p.front.LocalAddr().(*net.UDPAddr).AddrPort(), path: p}
	other.join(TCPOpenAuto)
	return other
}

func (w *flowWorld) join(open TCPOpen) {
	t := w.t
	t.Helper()
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

// A path forwards datagrams between clients and a gateway, and may be cut.
type path struct {
	front *net.UDPConn
	cut   atomic.Bool
}

func newPath(t *testing.T, to netip.AddrPort) *path {
	t.Helper()
	front, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	p := &path{front: front}
	var wg sync.WaitGroup
	wg.Go(func() {
		backs := make(map[netip.AddrPort]*net.UDPConn) // by client
		b := make([]byte, 1<<16)
		for {
			n, from, err := front.ReadFromUDPAddrPort(b)
			if err != nil {
				break
			}
			back := backs[from]
			if back == nil {
				if back, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to)); err != nil {
					t.Error(err)
					break
				}
				backs[from] = back
				wg.Go(func() { p.answer(back, from) })
			}
			if !p.cut.Load() {
				_, _ = back.Write(b[:n])
			}
		}
		for _, back := range backs {
			back.Close()
		}
	})
	t.Cleanup(func() {
		front.Close()
		wg.Wait()
	})
	return p
}

func (p *path) answer(back *net.UDPConn, client netip.AddrPort) {
	b := make([]byte, 1<<16)
	for {
		n, err := back.Read(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && !p.cut.Load() {
			_, _ = p.front.WriteToUDPAddrPort(b[:n], client)
		}
	}
}

// An outage that outlasts the client's patience ends no flow: when the path is back,
// the session goes on before another one takes its place. It does not for those that
// restart with the gateway.
func TestFlowsOutliveAnOutage(t *testing.T) {
	w := newFlowWorld(t, TCPOpenAuto)
	for _, kind := range []string{"idle", "up", "down"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			w := w.through(t)
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
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			var from, to net.Conn = f, c
			if kind == "down" {
				from, to = c, f
			}
			const before, after = 2 << 20, 16 << 20
			send := func(n int64) { io.CopyN(from, zeros{}, n) } // what is wrong, the reader finds
			if kind == "idle" {
				time.Sleep(200 * time.Millisecond)
			} else {
				go send(before + after)
				if n, err := io.CopyN(io.Discard, to, before); err != nil {
					t.Fatalf("after %d bytes: %v", n, err)
				}
			}
			// The window is full of what is on the way, because somebody reads on.
			w.path.cut.Store(true)
			time.AfterFunc(4*time.Second, func() {
				w.path.cut.Store(false)
				if kind == "idle" {
					send(after)
				}
			})
			_ = to.SetReadDeadline(time.Now().Add(testPatience))
			if n, err := io.CopyN(io.Discard, to, after); err != nil {
				t.Errorf("after %d bytes: %v", n, err)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

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

// A gateway that has been reached is not asked for a session while the old one may
// speak again, which takes it a moment.
func TestGiveWay(t *testing.T) {
	for name, tt := range map[string]struct {
		happens func(*running)
		want    error
		least   time.Duration
	}{
		"it speaks":       {func(r *running) { r.session.(*fakeSession).set(func() { r.session.(*fakeSession).heard = time.Now() }) }, errAnswers, 0},
		"it has ended":    {func(r *running) { close(r.ended) }, nil, 0},
		"nothing is said": {func(*running) {}, nil, 3 * glance},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFakeSession(netip.MustParseAddrPort("192.0.2.1:443"))
				r := &running{session: s, ended: make(chan struct{})}
				at, _ := s.LastReceived()
				c := new(connector)
				if err := c.giveWay(t.Context()); err != nil {
					t.Errorf("%v while no session is silent", err)
				}
				c.silent.Store(&silentSession{r, at})
				time.AfterFunc(100*time.Millisecond, func() { tt.happens(r) })
				start := time.Now()
				if err := c.giveWay(t.Context()); err != tt.want {
					t.Errorf("%v, want %v", err, tt.want)
				}
				if took := time.Since(start); took < tt.least || took > time.Second {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}
