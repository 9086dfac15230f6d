package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// watch runs Watch until the returned function is called.
func watch(t testing.TB, s *State, revoked func([]tunnel.Fingerprint)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Watch(ctx, revoked) }()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Watch: %v", err)
		}
	})
}

// A logBuffer holds what was logged, at every level.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *logBuffer) logger() *slog.Logger {
	return slog.New(slog.NewJSONHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// within waits for something, and fails if it takes too long.
func within(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	begun := time.Now()
	for !ok() {
		if time.Since(begun) > limit {
			t.Fatalf("%s took more than %s", what, limit)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func TestWatch(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/29")})
	second := newToken(t, dir, TokenOptions{Name: "second"})
	s := reopen(t, dir)
	defer s.Close()
	for n := range 5 {
		mustJoin(t, s, join(n, []token.Token{first, second}[n%2]), start)
	}
	calls := make(chan []tunnel.Fingerprint, 10)
	stop := watch(t, s, func(ids []tunnel.Fingerprint) {
		// At this moment they are out, and nobody has their addresses yet.
		for _, id := range ids {
			if enrolled(s, id) {
				t.Error("a revoked client is admitted")
			}
			_, err := s.Authorize(tunnel.Join{Client: id, Secret: first.SecretText()}, start)
			wantRefused(t, err, 403, "token-revoked")
		}
		_, err := s.Authorize(join(99, first), start)
		wantRefused(t, err, 503, "pool-exhausted")
		calls <- ids
	})
	defer stop()

	// A new token is taken up before a client can come with it.
	third := newToken(t, dir, TokenOptions{Name: "third", Network: "other"})
	within(t, 200*time.Millisecond, "a new token", func() bool {
		_, err := s.Authorize(join(50, third), start)
		var r *tunnel.RefusedError
		return errors.As(err, &r) && r.Code == "pool-exhausted"
	})

	begun := time.Now()
	if _, err := RevokeToken(dir, "second", start); err != nil {
		t.Fatal(err)
	}
	select {
	case ids := <-calls:
		slices.SortFunc(ids, func(a, b tunnel.Fingerprint) int { return bytes.Compare(a[:], b[:]) })
		if diff := cmp.Diff([]tunnel.Fingerprint{key(1), key(3)}, ids); diff != "" {
			t.Error(diff)
		}
		t.Logf("noticed after %s", time.Since(begun))
	case <-time.After(500 * time.Millisecond):
		t.Fatal("the revocation was not noticed in 500 ms")
	}
	within(t, 500*time.Millisecond, "freeing the addresses", func() bool {
		_, err := s.Authorize(join(50, third), start)
		return err == nil
	})
	mustJoin(t, s, join(51, first), start)
	for _, n := range []int{0, 2, 4, 50, 51} {
		if !enrolled(s, key(n)) {
			t.Errorf("client %d is not admitted", n)
		}
	}
	stop()
	if len(calls) > 0 {
		t.Errorf("revoked again: %v", <-calls)
	}
}

// TestWatchWithoutNotices moves the directory away, where the kernel's notices
// stay with it, and puts another in its place.
func TestWatchWithoutNotices(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	mustJoin(t, s, join(1, first), start)
	calls := make(chan []tunnel.Fingerprint, 1)
	stop := watch(t, s, func(ids []tunnel.Fingerprint) { calls <- ids })
	defer stop()

	copied := dir + ".copy"
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if _, err := RevokeToken(copied, "first", start); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Rename(dir, dir+".away"), os.Rename(copied, dir)); err != nil {
		t.Fatal(err)
	}
	select {
	case ids := <-calls:
		if diff := cmp.Diff([]tunnel.Fingerprint{key(1)}, ids); diff != "" {
			t.Error(diff)
		}
	case <-time.After(500 * time.Millisecond):
		t.Fatal("the revocation was not noticed in 500 ms")
	}
}

// TestWatchBrokenTokens wants what was last good to stay in force while the
// file is damaged, said once, and the repaired file to count.
func TestWatchBrokenTokens(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	log := new(logBuffer)
	s.Log = log.logger()
	c := mustJoin(t, s, join(1, first), start)
	calls := make(chan []tunnel.Fingerprint, 1)
	stop := watch(t, s, func(ids []tunnel.Fingerprint) { calls <- ids })
	defer stop()

	path := filepath.Join(dir, tokensFile)
	good := readAll(t, dir)[tokensFile]
	for what, broken := range map[string]string{
		"is damaged (at byte":                      good[:len(good)/2],
		"lacks a token that clients were enrolled": `{"version":1,"tokens":[]}`,
		"newer quicvpn":                            `{"version":2}`,
	} {
		if err := durable.Replace(path, []byte(broken)); err != nil {
			t.Fatal(err)
		}
		within(t, 500*time.Millisecond, "noticing that tokens.json "+what, func() bool { return strings.Contains(log.String(), what) })
		if diff := cmp.Diff(c, mustJoin(t, s, join(1, first), start), byText); diff != "" {
			t.Error(diff)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	within(t, 900*time.Millisecond, "noticing that tokens.json is missing", func() bool { return strings.Contains(log.String(), "is missing") })
	time.Sleep(watchInterval + 50*time.Millisecond) // another look at it
	if lines := strings.Count(log.String(), "\n"); lines != 4 {
		t.Errorf("4 faults made %d lines: %s", lines, log)
	}

	if err := durable.Replace(path, []byte(good)); err != nil {
		t.Fatal(err)
	}
	if _, err := RevokeToken(dir, "first", start); err != nil {
		t.Fatal(err)
	}
	select {
	case ids := <-calls:
		if diff := cmp.Diff([]tunnel.Fingerprint{key(1)}, ids); diff != "" {
			t.Error(diff)
		}
	case <-time.After(500 * time.Millisecond):
		t.Fatal("the revocation after the repair was not noticed")
	}
}

// TestRevokedDuringEnrolment revokes while many join: whoever was answered with
// a Client is then either admitted or was given to the callback.
func TestRevokedDuringEnrolment(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	for round := range 5 {
		name := fmt.Sprint("round ", round)
		tok := newToken(t, dir, TokenOptions{Name: name})
		s := reopen(t, dir)
		var mu sync.Mutex
		ended, joined := make(map[tunnel.Fingerprint]bool), make(map[tunnel.Fingerprint]bool)
		stop := watch(t, s, func(ids []tunnel.Fingerprint) {
			mu.Lock()
			defer mu.Unlock()
			for _, id := range ids {
				ended[id] = true
			}
		})
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := RevokeToken(dir, name, start); err != nil {
				t.Error(err)
			}
		})
		for n := range 300 {
			wg.Go(func() {
				if c, err := s.Authorize(join(n, tok), start); err == nil {
					mu.Lock()
					defer mu.Unlock()
					joined[c.ID] = true
				} else {
					wantRefused(t, err, 403, "token-revoked")
				}
			})
		}
		wg.Wait()
		within(t, time.Second, "the revocation", func() bool {
			_, err := s.Authorize(join(1000, tok), start)
			return err != nil
		})
		stop()
		for id := range joined {
			if !ended[id] || enrolled(s, id) {
				t.Fatalf("a client that was answered: ended %v, admitted %v", ended[id], enrolled(s, id))
			}
		}
		s.Close()
		if left := readAll(t, dir)[clientsFile]; strings.Contains(left, `"key"`) {
			t.Errorf("clients are left on disk: %s", left)
		}
	}
}

// TestNothingSpeaksASecret collects every error and log line of a gateway's life
// and looks for the secrets in them.
func TestNothingSpeaksASecret(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/29")})
	toks := []token.Token{first, newToken(t, dir, TokenOptions{Name: "two", Uses: 1}), newToken(t, dir, TokenOptions{Name: "three", Expires: time.Second})}
	s := reopen(t, dir)
	log := new(logBuffer)
	s.Log = log.logger()
	var said strings.Builder
	say := func(err error) {
		if err != nil {
			fmt.Fprintf(&said, "%v\n%+v\n%#v\n", err, err, errors.Unwrap(err))
		}
	}
	block := filepath.Join(dir, clientsFile+".tmp")
	say(os.Mkdir(block, 0o700))
	for n, tok := range toks {
		_, err := s.Authorize(join(n, tok), start)
		say(err)
		_, err = s.Authorize(tunnel.Join{Client: key(n), Secret: tok.Encode()}, start)
		say(err)
		_, err = RevokeToken(dir, tok.Encode(), start)
		say(err)
		_, err = RevokeToken(dir, tok.SecretText(), start)
		say(err)
	}
	say(os.Remove(block))
	for _, now := range []time.Time{start, start.Add(time.Hour)} {
		for n := range 9 {
			_, err := s.Authorize(join(n, toks[n%3]), now)
			say(err)
		}
	}
	_, err := RevokeToken(dir, "two", start)
	say(err)
	s.refresh(func([]tunnel.Fingerprint) {})
	_, err = s.Authorize(join(1, toks[1]), start)
	say(err)
	s.Close()
	for _, name := range []string{settingsFile, tokensFile, clientsFile, identityFile} {
		path := filepath.Join(dir, name)
		whole := readAll(t, dir)[name]
		for _, tok := range toks { // as if somebody had put tokens into the files
			for _, contents := range []string{tok.Encode(), `{"version":1,"tokens":"` + tok.SecretText() + `"}`, `{"version":1,"` + tok.SecretText() + `":1}`, `{"version":"` + tok.Encode() + `"}`} {
				if err := os.WriteFile(path, []byte(contents), 0o600); err != nil {
					t.Fatal(err)
				}
				_, err := OpenState(dir)
				say(err)
				s.refresh(func([]tunnel.Fingerprint) {})
				_, err = ListTokens(dir)
				say(err)
			}
		}
		if err := os.WriteFile(path, []byte(whole), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range listed(t, dir) {
		fmt.Fprintf(&said, "%+v\n", i)
	}
	all := said.String() + log.String()
	for _, part := range []string{"token-unknown", "token-revoked", "token-expired", "token-used-up", "pool-exhausted", "unavailable",
		"no such token", "is damaged", "a field in it", "no private key", "not usable", "no client can be enrolled"} {
		if !strings.Contains(all, part) {
			t.Errorf("nothing said %q", part)
		}
	}
	for _, tok := range toks {
		if leaks(all, tok) {
			t.Error("a secret was spoken")
		}
	}
}

func TestLockFilesStay(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	newToken(t, dir, TokenOptions{})
	s := reopen(t, dir)
	s.Close()
	for _, name := range []string{gatewayLock, tokensLock} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != fs.FileMode(0o600) || info.Size() != 0 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}
