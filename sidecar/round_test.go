package sidecar

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestNameIsResolvedAtEachAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld("gateway.example")
		w.set(func(ctx context.Context, gateway netip.AddrPort) (session, error) {
			if gateway.Addr() == addr4b {
				return accepting(40*time.Millisecond)(ctx, gateway)
			}
			return silent(ctx, gateway)
		})
		w.resolved = func(context.Context) ([]netip.Addr, error) { return []netip.Addr{addr4a}, nil }
		w.run(t, func() {
			time.Sleep(time.Minute)
			w.mu.Lock()
			n := len(w.lookups)
			w.resolved = func(context.Context) ([]netip.Addr, error) { return []netip.Addr{addr4b}, nil }
			w.mu.Unlock()
			if n < 15 {
				t.Errorf("%d lookups in a minute", n)
			}
			time.Sleep(5 * time.Second)
			if s := w.sessions(); len(s) != 1 || s[0].remote.Addr() != addr4b {
				t.Fatalf("the new address was not followed: %v", s)
			}
			// The resolver fails, the address is still good.
			w.mu.Lock()
			w.resolved = func(context.Context) ([]netip.Addr, error) { return nil, errors.New("server failure") }
			w.mu.Unlock()
			w.sessions()[0].end(nil)
			time.Sleep(time.Second)
			if n := len(w.sessions()); n != 2 {
				t.Errorf("%d sessions, want 2 although the name cannot be resolved", n)
			}
		})
	})
}

func TestNameThatCannotBeResolved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld("gateway.example")
		w.set(accepting(0))
		w.resolved = func(context.Context) ([]netip.Addr, error) { return nil, errors.New("server failure") }
		w.run(t, func() {
			time.Sleep(time.Minute)
			if len(w.take()) != 0 {
				t.Error("dialled something")
			}
			text := w.text()
			for _, want := range []string{"gateway.example cannot be resolved", "server failure", "extra_hosts"} {
				if !strings.Contains(text, want) {
					t.Errorf("the log lacks %q:\n%s", want, text)
				}
			}
			w.mu.Lock()
			w.resolved = func(context.Context) ([]netip.Addr, error) { return []netip.Addr{addr6a}, nil }
			w.mu.Unlock()
			time.Sleep(5 * time.Second)
			if len(w.sessions()) != 1 {
				t.Error("not connected although the name has an address now")
			}
		})
	})
}

func TestSlowResolverDoesNotHoldUpAKnownAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld("gateway.example")
		w.set(accepting(40 * time.Millisecond))
		w.resolved = func(context.Context) ([]netip.Addr, error) { return []netip.Addr{addr4a}, nil }
		w.run(t, func() {
			time.Sleep(time.Second)
			w.mu.Lock()
			w.resolved = func(ctx context.Context) ([]netip.Addr, error) { <-ctx.Done(); return nil, ctx.Err() }
			w.mu.Unlock()
			w.sessions()[0].end(nil)
			time.Sleep(100 * time.Millisecond)
			if n := len(w.sessions()); n != 2 {
				t.Errorf("%d sessions after 100 ms, want 2", n)
			}
		})
	})
}

func TestAllAddressesAreTried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld("gateway.example")
		w.resolved = func(context.Context) ([]netip.Addr, error) {
			return []netip.Addr{addr4a, addr4b, addr6a, addr6b}, nil
		}
		w.set(func(ctx context.Context, gateway netip.AddrPort) (session, error) {
			switch gateway.Addr() {
			case addr6a:
				return silent(ctx, gateway)
			case addr4a:
				return nil, errors.New("no")
			}
			return accepting(100*time.Millisecond)(ctx, gateway)
		})
		w.run(t, func() {
			time.Sleep(time.Minute)
			want := []dialled{
				{0, addr6a},
				{250 * time.Millisecond, addr4a}, // after the stagger
				{250 * time.Millisecond, addr6b}, // at once after a failure
			}
			if diff := cmp.Diff(want, w.take(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
			// Next time the one that answered comes first, and alone.
			w.sessions()[0].end(nil)
			time.Sleep(10 * time.Second)
			if d := w.take(); len(d) != 1 || d[0].Addr != addr6b {
				t.Errorf("dialled %v, want %v alone", d, addr6b)
			}
		})
	})
}
