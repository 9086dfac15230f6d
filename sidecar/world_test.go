package sidecar

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// fakeSession is a session that does what the test says.
type fakeSession struct {
	session // what is not called

	remote  netip.AddrPort
	changed chan struct{}
	others  chan struct{} // PeersChanged
	ended   chan struct{}
	leave   func(ctx context.Context) error
	once    sync.Once

	mu      sync.Mutex // guards what follows
	why     error
	reason  string // given to Close
	mtu     int
	peers   []netip.Prefix
	sent    int // packets
	heard   time.Time
	waiting bool
}

func newFakeSession(remote netip.AddrPort) *fakeSession {
	return &fakeSession{
		remote: remote, changed: make(chan struct{}, 1), others: make(chan struct{}, 1), ended: make(chan struct{}),
		mtu: 1400, heard: time.Now(),
	}
}

func (s *fakeSession) Grant() tunnel.Grant             { return tunnel.Grant{} }
func (s *fakeSession) Remote() netip.AddrPort          { return s.remote }
func (s *fakeSession) RTT() time.Duration              { return 20 * time.Millisecond }
func (s *fakeSession) Congestion() tunnel.Congestion   { return tunnel.BBR }
func (s *fakeSession) MTUChanged() <-chan struct{}     { return s.changed }
func (s *fakeSession) Peers() []netip.Prefix           { s.mu.Lock(); defer s.mu.Unlock(); return s.peers }
func (s *fakeSession) PeersChanged() <-chan struct{}   { return s.others }
func (s *fakeSession) Leave(ctx context.Context) error { return s.leave(ctx) }
func (s *fakeSession) Send(_ int, pkts []packet.Packet, _ tunnel.Sink) {
	s.set(func() { s.sent += len(pkts) })
}
func (s *fakeSession) MTU() int                  { s.mu.Lock(); defer s.mu.Unlock(); return s.mtu }
func (s *fakeSession) Receive(tunnel.Sink) error { <-s.ended; return s.why }
func (s *fakeSession) LastReceived() (at time.Time, waiting bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heard, s.waiting
}
func (s *fakeSession) Close(reason string) error {
	s.once.Do(func() {
		s.reason = reason
		close(s.ended)
	})
	return nil
}

// end ends the session as the peer does.
func (s *fakeSession) end(why error) {
	s.once.Do(func() {
		s.why = why
		close(s.ended)
	})
}

func (s *fakeSession) set(change func()) { s.mu.Lock(); defer s.mu.Unlock(); change() }

// world is what a connector meets.
type world struct {
	start time.Time
	c     *connector
	moved chan struct{}
	log   strings.Builder

	mu       sync.Mutex // guards what follows
	dials    []dialled
	lookups  []time.Duration
	allowed  []netip.AddrPort
	adopted  []*fakeSession
	dropped  int
	resized  []int
	failure  error
	unusable error // what is wrong with every session
	answer   func(ctx context.Context, gateway netip.AddrPort) (session, error)
	resolved func(ctx context.Context) ([]netip.Addr, error)
}

type dialled struct {
	At   time.Duration
	Addr netip.Addr
}

func newWorld(host string) *world {
	w := &world{start: time.Now(), moved: make(chan struct{}, 1)}
	w.c = &connector{
		host: host, port: 443, moved: w.moved,
		log: slog.New(slog.NewTextHandler(lockedWriter{w}, nil)),
		dial: func(ctx context.Context, gateway netip.AddrPort) (session, error) {
			w.mu.Lock()
			w.dials = append(w.dials, dialled{time.Since(w.start), gateway.Addr()})
			answer := w.answer
			if !slices.Contains(w.allowed, gateway) {
				w.mu.Unlock()
				return nil, fmt.Errorf("%v was dialled before it was allowed", gateway)
			}
			w.mu.Unlock()
			return answer(ctx, gateway)
		},
		lookup: func(ctx context.Context, host string) ([]netip.Addr, error) {
			w.mu.Lock()
			w.lookups = append(w.lookups, time.Since(w.start))
			resolved := w.resolved
			w.mu.Unlock()
			return resolved(ctx)
		},
		allow: func(gateways []netip.AddrPort) { w.mu.Lock(); defer w.mu.Unlock(); w.allowed = gateways },
		adopt: func(s session) tunnel.Sink {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.adopted = append(w.adopted, s.(*fakeSession))
			return nil
		},
		hint:    "use extra_hosts",
		check:   func(s session) error { return w.unusable },
		fail:    func(err error) { w.mu.Lock(); defer w.mu.Unlock(); w.failure = err },
		drop:    func(session) { w.mu.Lock(); defer w.mu.Unlock(); w.dropped++ },
		refresh: func(s session) { w.mu.Lock(); defer w.mu.Unlock(); w.resized = append(w.resized, s.MTU()) },
	}
	return w
}

type lockedWriter struct{ w *world }

func (l lockedWriter) Write(p []byte) (int, error) {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	return l.w.log.Write(p)
}

func (w *world) drops() int { w.mu.Lock(); defer w.mu.Unlock(); return w.dropped }

func (w *world) text() string { w.mu.Lock(); defer w.mu.Unlock(); return w.log.String() }

func (w *world) set(answer func(ctx context.Context, gateway netip.AddrPort) (session, error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer = answer
}

func (w *world) take() []dialled {
	w.mu.Lock()
	defer w.mu.Unlock()
	d := w.dials
	w.dials = nil
	return d
}

func (w *world) sessions() []*fakeSession {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.adopted)
}

// run runs the connector in a bubble until f returns.
func (w *world) run(t *testing.T, f func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.c.run(ctx)
	}()
	f()
	cancel()
	<-done
}

// silent is a gateway that does not answer.
func silent(ctx context.Context, _ netip.AddrPort) (session, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// accepting is a gateway that answers after a time.
func accepting(after time.Duration) func(context.Context, netip.AddrPort) (session, error) {
	return func(ctx context.Context, gateway netip.AddrPort) (session, error) {
		select {
		case <-time.After(after):
			return newFakeSession(gateway), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func refusing(err error) func(context.Context, netip.AddrPort) (session, error) {
	return func(context.Context, netip.AddrPort) (session, error) { return nil, err }
}

const literal = "192.0.2.1"

var (
	addr4a = netip.MustParseAddr("192.0.2.1")
	addr4b = netip.MustParseAddr("192.0.2.2")
	addr6a = netip.MustParseAddr("2001:db8::1")
	addr6b = netip.MustParseAddr("2001:db8::2")
)
