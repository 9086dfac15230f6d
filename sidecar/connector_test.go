package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/tunnel"
)

func TestConnectsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.set(accepting(40 * time.Millisecond))
		w.run(t, func() {
			time.Sleep(time.Minute)
			if diff := cmp.Diff([]dialled{{0, addr4a}}, w.take(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
			if n := len(w.sessions()); n != 1 {
				t.Fatalf("%d sessions, want 1", n)
			}
		})
		if got := w.sessions()[0].reason; got != "the client stops" {
			t.Errorf("closed with %q", got)
		}
		if w.dropped != 1 {
			t.Errorf("dropped %d times, want 1", w.dropped)
		}
	})
}

func TestPausesGrowAndAreJittered(t *testing.T) {
	var second []time.Duration
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(literal)
			w.set(refusing(errors.New("no")))
			w.run(t, func() {
				time.Sleep(20 * time.Minute)
				dials := w.take()
				limits := func(i int, at time.Duration) (low, high time.Duration) {
					nominal := min(backoffFirst<<min(i, 10), backoffSoon)
					if at > backoffPatience+time.Minute {
						nominal = backoffLate
					} else if at > backoffPatience-time.Second {
						return nominal / 2, backoffLate * 3 / 2
					}
					return nominal / 2, nominal * 3 / 2
				}
				for i := range len(dials) - 1 {
					pause := dials[i+1].At - dials[i].At
					low, high := limits(i, dials[i].At)
					if pause < low || pause > high {
						t.Errorf("pause %d, after %v, is %v: want %v to %v", i, dials[i].At, pause, low, high)
					}
				}
				if dials[0].At != 0 {
					t.Errorf("first attempt after %v", dials[0].At)
				}
				second = append(second, dials[2].At-dials[1].At)
			})
		})
	}
	slices.Sort(second)
	if len(slices.Compact(second)) < 10 {
		t.Errorf("the pauses of many clients are hardly different: %v", second)
	}
}

// TestLinkBackIsUsedSoon has a link come back after 30 s, at any moment of an
// attempt.
func TestLinkBackIsUsedSoon(t *testing.T) {
	for i := range 40 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(literal)
			back := 30*time.Second + time.Duration(i)*100*time.Millisecond
			// What is sent while the link is down is lost, as if nobody repeated it.
			w.set(func(ctx context.Context, gateway netip.AddrPort) (session, error) {
				if time.Since(w.start) < back {
					return silent(ctx, gateway)
				}
				return accepting(100*time.Millisecond)(ctx, gateway)
			})
			w.run(t, func() {
				time.Sleep(back)
				for len(w.sessions()) == 0 && time.Since(w.start) < time.Hour {
					time.Sleep(50 * time.Millisecond)
				}
				if took := time.Since(w.start) - back; took > 5*time.Second {
					t.Errorf("back after %v, connected %v later", back, took)
				}
			})
		})
	}
}

func TestAttemptsThatNobodyAnswersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		var mu sync.Mutex
		open, most := 0, 0
		w.set(func(ctx context.Context, _ netip.AddrPort) (session, error) {
			mu.Lock()
			open++
			most = max(most, open)
			mu.Unlock()
			<-ctx.Done()
			mu.Lock()
			open--
			mu.Unlock()
			return nil, ctx.Err()
		})
		w.run(t, func() { time.Sleep(10 * time.Minute) })
		if most > 8 {
			t.Errorf("%d attempts at a time", most)
		}
		if open != 0 {
			t.Errorf("%d attempts are left", open)
		}
		if text := w.text(); !strings.Contains(text, "UDP to it seems blocked") || !strings.Contains(text, "192.0.2.1:443") {
			t.Errorf("the log does not say what is wrong:\n%s", text)
		}
		if n := strings.Count(w.text(), "cannot connect"); n < 5 || n > 40 {
			t.Errorf("said %d times in 10 minutes", n)
		}
	})
}

func TestMovedTriesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.set(refusing(errors.New("no")))
		w.run(t, func() {
			time.Sleep(15 * time.Minute) // the pauses are long now
			for range 3 {
				synctest.Wait()
				w.take()
				asked := time.Since(w.start)
				w.moved <- struct{}{}
				time.Sleep(3 * time.Second)
				dials := w.take()
				if len(dials) < 3 {
					t.Fatalf("%d attempts in 3 s, want the short pauses again", len(dials))
				}
				if wait := dials[0].At - asked; wait > backoffFirst {
					t.Errorf("the first attempt was %v after the network changed", wait)
				}
				time.Sleep(10 * time.Minute)
			}
			// A storm of changes is no storm of attempts.
			w.take()
			for range 100 {
				select {
				case w.moved <- struct{}{}:
				default:
				}
				time.Sleep(10 * time.Millisecond)
			}
			if n := len(w.take()); n > 5 {
				t.Errorf("%d attempts in a second of changes", n)
			}
		})
	})
}

func TestEndedSessionIsReplacedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.set(accepting(40 * time.Millisecond))
		w.run(t, func() {
			for i := range 5 {
				time.Sleep(10 * time.Second)
				w.take()
				at := time.Since(w.start)
				w.sessions()[i].end(errors.New("the other end no longer knows the session"))
				time.Sleep(time.Second)
				if d := w.take(); len(d) != 1 || d[0].At != at {
					t.Fatalf("ended at %v, dialled %v", at, d)
				}
			}
			if n := len(w.sessions()); n != 6 {
				t.Errorf("%d sessions, want 6", n)
			}
		})
		if !strings.Contains(w.text(), "no longer knows the session") {
			t.Error("the log does not say why")
		}
		if w.dropped != 6 {
			t.Errorf("dropped %d, want 6", w.dropped)
		}
	})
}

// TestSessionsThatEndAtOnce: a gateway that accepts and ends every session, and
// one that accepts and says nothing, are not dialled without pause.
func TestSessionsThatEndAtOnce(t *testing.T) {
	why := errors.New("replaced by a newer session of the same client")
	for name, tt := range map[string]struct {
		end  func(*fakeSession)
		want string
	}{
		"ended":  {func(s *fakeSession) { s.end(why) }, "copy of this state directory"},
		"silent": {func(s *fakeSession) { s.set(func() { s.waiting = true }) }, "does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(literal)
				w.set(func(_ context.Context, gateway netip.AddrPort) (session, error) {
					time.Sleep(100 * time.Millisecond)
					s := newFakeSession(gateway)
					tt.end(s)
					return s, nil
				})
				w.run(t, func() {
					time.Sleep(15 * time.Minute)
					dials := w.take()
					for i := range len(dials) - 1 {
						pause, at := dials[i+1].At-dials[i].At, dials[i].At
						low := min(backoffFirst<<min(i, 10), backoffSoon) / 2
						if at > backoffPatience+time.Minute {
							low = backoffLate / 2
						}
						if pause < low {
							t.Errorf("pause %d, after %v, is %v: want %v or more", i, at, pause, low)
						}
					}
					if len(dials) < 40 {
						t.Errorf("%d dials in 15 minutes", len(dials))
					}
					// The network changed: now it may be different.
					w.moved <- struct{}{}
					time.Sleep(3 * time.Second)
					if len(w.take()) == 0 {
						t.Error("no dial after the network changed")
					}
					// It is: the next end is one like any other.
					w.set(accepting(0))
					time.Sleep(time.Minute)
					w.take()
					s := w.sessions()
					s[len(s)-1].end(why)
					time.Sleep(time.Millisecond)
					if n := len(w.take()); n != 1 {
						t.Errorf("%d dials at the end of a session that lived, want 1", n)
					}
				})
				if !strings.Contains(w.text(), tt.want) {
					t.Errorf("the log lacks %q:\n%s", tt.want, w.text())
				}
				if n := strings.Count(w.text(), "the session ended"); n > 25 {
					t.Errorf("the end is said %d times", n)
				}
			})
		})
	}
}

func TestSilentSessionIsReplacedBeside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.set(accepting(40 * time.Millisecond))
		w.run(t, func() {
			// Idle, with nothing heard for long: no reason to do anything.
			time.Sleep(time.Minute)
			if n := len(w.take()); n != 1 {
				t.Fatalf("%d dials", n)
			}
			old := w.sessions()[0]
			// The first question after that is not yet owed an answer since then.
			old.set(func() { old.waiting = true })
			time.Sleep(time.Second)
			if n := len(w.take()); n != 0 {
				t.Fatalf("dialled after one second")
			}
			time.Sleep(time.Second)
			if n := len(w.take()); n != 1 {
				t.Fatalf("%d dials after two seconds of silence, want 1", n)
			}
			s := w.sessions()
			if len(s) != 2 {
				t.Fatalf("%d sessions", len(s))
			}
			select {
			case <-old.ended:
			default:
				t.Error("the old session is still open")
			}
			if old.reason != "another session takes its place" || w.drops() != 0 {
				t.Errorf("closed with %q, dropped %d", old.reason, w.drops())
			}
		})
	})
}

func TestSessionThatAnswersAgainStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.set(accepting(40 * time.Millisecond))
		w.run(t, func() {
			time.Sleep(time.Second)
			old := w.sessions()[0]
			w.set(silent)
			old.set(func() { old.waiting = true })
			time.Sleep(4 * time.Second)
			if n := len(w.take()); n < 2 {
				t.Fatalf("%d dials", n)
			}
			old.set(func() { old.waiting, old.heard = false, time.Now() })
			time.Sleep(time.Minute)
			w.take()
			time.Sleep(time.Minute)
			if d := w.take(); len(d) != 0 {
				t.Errorf("still dialling: %v", d)
			}
			if len(w.sessions()) != 1 || old.reason != "" {
				t.Errorf("the session was given up")
			}
		})
		if !strings.Contains(w.text(), "answers again") {
			t.Error("the log does not say so")
		}
	})
}

func TestSilentSessionThatEndsIsSearchedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.set(accepting(40 * time.Millisecond))
		w.run(t, func() {
			time.Sleep(time.Second)
			old := w.sessions()[0]
			w.set(silent)
			old.set(func() { old.waiting = true })
			time.Sleep(4 * time.Second)
			old.end(errors.New("idle"))
			time.Sleep(4 * time.Second)
			synctest.Wait()
			if w.drops() == 0 {
				t.Error("the ended session still takes packets")
			}
			w.set(accepting(40 * time.Millisecond))
			time.Sleep(5 * time.Second)
			if n := len(w.sessions()); n != 2 {
				t.Errorf("%d sessions, want 2", n)
			}
		})
	})
}

func TestUnusableSessionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.unusable = errors.New("the gateway gave this client the address 127.0.0.1")
		var given []*fakeSession
		w.set(func(_ context.Context, gateway netip.AddrPort) (session, error) {
			s := newFakeSession(gateway)
			given = append(given, s)
			return s, nil
		})
		w.run(t, func() { time.Sleep(time.Minute) })
		if len(w.sessions()) != 0 {
			t.Error("it was adopted")
		}
		for _, s := range given {
			select {
			case <-s.ended:
			default:
				t.Error("a session is left open")
			}
		}
		if len(given) < 10 || !strings.Contains(w.text(), "the address 127.0.0.1") {
			t.Errorf("%d attempts:\n%s", len(given), w.text())
		}
	})
}

func TestMTUIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		w.set(accepting(0))
		w.run(t, func() {
			time.Sleep(time.Second)
			s := w.sessions()[0]
			s.set(func() { s.mtu = 1300 })
			s.changed <- struct{}{}
			time.Sleep(time.Second)
			w.mu.Lock()
			defer w.mu.Unlock()
			if !slices.Equal(w.resized, []int{1300}) {
				t.Errorf("resized %v", w.resized)
			}
		})
	})
}

// TestTwoAttemptsDoNotEndTogether: a gateway that sees two sessions of one
// client ends the older one, which may be the one that the client has chosen.
func TestTwoAttemptsDoNotEndTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld("gateway.example")
		w.resolved = func(context.Context) ([]netip.Addr, error) { return []netip.Addr{addr6a, addr4a}, nil }
		w.set(accepting(700 * time.Millisecond))
		w.run(t, func() {
			time.Sleep(10 * time.Second)
			for i := range 3 {
				w.take()
				s := w.sessions()
				s[len(s)-1].end(nil)
				time.Sleep(10 * time.Second)
				if d := w.take(); len(d) != 1 {
					t.Errorf("reconnection %d: %d attempts beside each other: %v", i, len(d), d)
				}
			}
		})
	})
}

func TestTroubleIsSaidOncePerChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(literal)
		var errs = []error{
			&tunnel.RefusedError{Status: 401, Code: "token-revoked", Text: "get a new token"},
			tunnel.ErrPin, tunnel.ErrNotYetValid, tunnel.ErrExpired,
		}
		w.set(refusing(errs[0]))
		w.run(t, func() {
			for _, err := range errs {
				w.set(refusing(fmt.Errorf("connect to gateway: %w", err)))
				before := len(w.text())
				time.Sleep(20 * time.Second)
				text := w.text()[before:]
				if !strings.Contains(text, err.Error()[:20]) {
					t.Errorf("the log lacks %q:\n%s", err, text)
				}
				if n := strings.Count(text, "cannot connect"); n < 1 || n > 3 {
					t.Errorf("said %d times in 20 s:\n%s", n, text)
				}
			}
		})
	})
}
