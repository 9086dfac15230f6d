package sidecar

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quicvpn/quicvpn/socks5"
)

// fakeUDP is a flow to a host that sends back what it gets.
type fakeUDP struct {
	to       string
	echo     chan []byte
	closing  sync.Once
	closed   chan struct{}
	why      error // before closed
	mu       sync.Mutex
	deadline time.Time
	wrote    int
}

func newFakeUDP(to string) *fakeUDP {
	return &fakeUDP{to: to, echo: make(chan []byte, 1000), closed: make(chan struct{})}
}

func (f *fakeUDP) Write(b []byte) (int, error) {
	f.mu.Lock()
	f.wrote++
	f.mu.Unlock()
	switch string(b) {
	case "stuck":
		time.Sleep(udpWriteTime)
		return 0, os.ErrDeadlineExceeded
	case "big":
		return 0, syscall.EMSGSIZE
	}
	f.echo <- append([]byte(nil), b...)
	return len(b), nil
}

func (f *fakeUDP) Receive() ([]byte, error) {
	f.mu.Lock()
	timer := time.NewTimer(time.Until(f.deadline))
	f.mu.Unlock()
	defer timer.Stop()
	select {
	case b := <-f.echo:
		return b, nil
	case <-timer.C:
		return nil, os.ErrDeadlineExceeded
	case <-f.closed:
		return nil, f.why
	}
}

func (f *fakeUDP) SetReadDeadline(t time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deadline = t
	return nil
}
func (f *fakeUDP) SetWriteDeadline(time.Time) error { return nil }
func (f *fakeUDP) Close() error                     { f.end(io.ErrClosedPipe); return nil }
func (f *fakeUDP) end(why error)                    { f.closing.Do(func() { f.why = why; close(f.closed) }) }
func (f *fakeUDP) ended() bool {
	select {
	case <-f.closed:
		return true
	default:
		return false
	}
}

// udpWorld has relays whose flows take a while to open.
type udpWorld struct {
	udpRelays
	mu     sync.Mutex
	dialed []*fakeUDP
}

func newUDPWorld(takes time.Duration, refuse error) *udpWorld {
	w := new(udpWorld)
	w.dial = func(ctx context.Context, address string) (udpConn, error) {
		w.mu.Lock()
		f := newFakeUDP(address)
		w.dialed = append(w.dialed, f)
		w.mu.Unlock()
		select {
		case <-time.After(takes):
			return f, refuse
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return w
}

// flows returns all that were dialled.
func (w *udpWorld) flows() []*fakeUDP {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dialed
}

func host(n int) socks5.Addr {
	return socks5.Addr{IP: netip.AddrFrom4([4]byte{192, 0, byte(n >> 8), byte(n)}), Port: 7}
}

func receive(t *testing.T, r *udpRelay, want string, from socks5.Addr) {
	t.Helper()
	b, got, err := r.Receive()
	if err != nil || string(b) != want || got != from {
		t.Errorf("got %q from %v (%v), want %q from %v", b, got, err, want, from)
	}
}

// sendTo sends a datagram of which nothing but its going is wanted.
func sendTo(t *testing.T, r *udpRelay, to socks5.Addr, text string) {
	t.Helper()
	if err := r.Send([]byte(text), to); err != nil {
		t.Errorf("%s to %v: %v", text, to, err)
	}
}

func TestUDPRelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newUDPWorld(time.Second, nil)
		r := w.relay()
		named := socks5.Addr{Name: "host.test", Port: 9}
		b := []byte("first")
		if err := r.Send(b, named); err != nil {
			t.Fatal(err)
		}
		copy(b, "other") // Send does not keep it
		sendTo(t, r, named, "second")
		receive(t, r, "first", named)
		receive(t, r, "second", named)
		sendTo(t, r, named, "third")
		receive(t, r, "third", named)
		if len(w.flows()) != 1 || w.flows()[0].to != "host.test:9" {
			t.Errorf("%d flows, the first to %s", len(w.flows()), w.flows()[0].to)
		}
		// Before a flow is open some datagrams wait, and no more.
		for i := range maxUDPWaiting {
			sendTo(t, r, host(1), fmt.Sprint(i))
		}
		if err := r.Send(nil, host(1)); !errors.Is(err, errFlowBusy) {
			t.Errorf("one more: %v", err)
		}
		for i := range maxUDPWaiting {
			receive(t, r, fmt.Sprint(i), host(1))
		}
		// What one datagram finds wrong is its own, but for a part of one.
		if err := r.Send([]byte("big"), host(1)); !errors.Is(err, syscall.EMSGSIZE) {
			t.Errorf("a big one: %v", err)
		}
		sendTo(t, r, host(1), "next")
		receive(t, r, "next", host(1))
		if err := r.Send([]byte("stuck"), host(1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("one that is stuck: %v", err)
		}
		synctest.Wait()
		if !w.flows()[1].ended() || w.open.Load() != 1 {
			t.Errorf("a flow in which a part was written goes on, %d are open", w.open.Load())
		}
		// Close ends all.
		sendTo(t, r, host(2), "x")
		r.Close()
		if _, _, err := r.Receive(); err == nil {
			t.Error("received after Close")
		}
		if err := r.Send([]byte("x"), host(3)); err == nil {
			t.Error("sent after Close")
		}
		if n := w.open.Load(); n != 0 || !w.flows()[0].ended() {
			t.Errorf("%d flows are open after Close", n)
		}
	})
}

// A flow ends when nothing came or went for long, and comes again.
func TestUDPRelayIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newUDPWorld(time.Second, nil)
		r := w.relay()
		defer r.Close()
		for range 3 {
			sendTo(t, r, host(1), "x")
			receive(t, r, "x", host(1))
			time.Sleep(udpIdleTime - time.Second)
		}
		if len(w.flows()) != 1 || w.flows()[0].ended() {
			t.Errorf("%d flows, the first has ended: %t", len(w.flows()), w.flows()[0].ended())
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if n := w.open.Load(); n != 0 || !w.flows()[0].ended() {
			t.Errorf("%d idle flows", n)
		}
		sendTo(t, r, host(1), "y")
		receive(t, r, "y", host(1))
		// The session is lost, or the gateway ends the flow: for a moment datagrams are
		// dropped, then there is another one.
		w.flows()[1].end(io.EOF)
		synctest.Wait()
		sendTo(t, r, host(1), "lost")
		time.Sleep(udpRefusedTime + time.Millisecond)
		synctest.Wait()
		sendTo(t, r, host(1), "z")
		receive(t, r, "z", host(1))
		if len(w.flows()) != 3 {
			t.Errorf("%d flows", len(w.flows()))
		}
	})
}

// A destination that is refused is not asked for with each datagram.
func TestUDPRelayRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newUDPWorld(time.Second, syscall.EACCES)
		r := w.relay()
		defer r.Close()
		for range 40 {
			_ = r.Send([]byte("x"), host(1)) // into nothing
			time.Sleep(100 * time.Millisecond)
		}
		if n := len(w.flows()); n != 2 {
			t.Errorf("%d dials in 4 s, want one each 2", n)
		}
	})
}

func TestUDPRelayBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newUDPWorld(time.Millisecond, nil)
		r := w.relay()
		for i := range maxUDPFlows {
			sendTo(t, r, host(i), "x")
			receive(t, r, "x", host(i))
		}
		sendTo(t, r, host(0), "y")
		receive(t, r, "y", host(0))
		for i := range 3 {
			sendTo(t, r, host(1000+i), "x")
			receive(t, r, "x", host(1000+i))
		}
		synctest.Wait()
		for i, f := range w.flows() {
			if quiet := i >= 1 && i <= 3; f.ended() != quiet {
				t.Errorf("flow %d has ended: %t", i, f.ended())
			}
		}
		if n := w.open.Load(); n != maxUDPFlows {
			t.Errorf("%d flows are open", n)
		}
		var relays []*udpRelay
		var err error
		for i := 0; err == nil && i < 2*maxAllUDPFlows; i++ {
			if i%maxUDPFlows == 0 {
				relays = append(relays, w.relay())
			}
			err = relays[len(relays)-1].Send([]byte("x"), host(i))
		}
		if !errors.Is(err, errTooManyFlows) || w.open.Load() != maxAllUDPFlows {
			t.Errorf("%v, with %d flows", err, w.open.Load())
		}
		r.Close()
		for _, other := range relays {
			other.Close()
		}
		if n := w.open.Load(); n != 0 {
			t.Errorf("%d flows are open at the end", n)
		}
	})
}
