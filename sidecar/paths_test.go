package sidecar

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

const (
	aPath     = `[{"peer":"192.0.2.1","rtt_ns":400000000,"send_bytes_per_second":25000000,"learned":"2026-05-01T12:00:00Z"}]`
	otherPath = `[{"peer":"192.0.2.1","rtt_ns":90000000,"learned":"2026-05-01T12:00:00Z"}]`
)

// pathLink returns a link with a file of paths, and what it logs.
func pathLink(t *testing.T, file string, dial func(context.Context, netip.AddrPort) (session, error)) (*Link, *strings.Builder) {
	t.Helper()
	out := new(strings.Builder)
	cfg := goodLink()
	cfg.PathFile = file
	cfg.Log = slog.New(slog.NewTextHandler(out, nil))
	l, err := newLink(cfg, wayOut{dial: dial, moved: make(chan struct{})})
	if err != nil {
		t.Fatal(err)
	}
	return l, out
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestPathsAreLoaded(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct {
		text    string
		warning string // empty: it is taken
	}{
		"good":      {aPath, ""},
		"cut off":   {aPath[:30], "unexpected end of JSON input"},
		"nonsense":  {`[{"peer":"192.0.2.1","rtt_ns":-1}]`, "a path that there cannot be"},
		"too large": {"[" + strings.Repeat(" ", maxPathsFile) + "]", "larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, strings.ReplaceAll(name, " ", "-"))
			write(t, file, tt.text)
			l, log := pathLink(t, file, silent)
			if n := strings.Count(log.String(), "level=WARN"); tt.warning == "" && n != 0 || tt.warning != "" && (n != 1 || !strings.Contains(log.String(), tt.warning)) {
				t.Errorf("want the warning %q, got:\n%s", tt.warning, log)
			}
			text, err := l.paths.MarshalJSON()
			if want := map[bool]string{true: aPath, false: "[]"}[tt.warning == ""]; err != nil || string(text) != want {
				t.Errorf("it knows %s (%v), want %s", text, err, want)
			}
		})
	}
	if _, log := pathLink(t, filepath.Join(dir, "none"), silent); log.Len() != 0 {
		t.Errorf("without a file:\n%s", log)
	}
}

// A damaged file is replaced, a good one written now and then, at the end of a
// session, and at the end.
func TestPathsAreSaved(t *testing.T) {
	file := filepath.Join(t.TempDir(), "paths.json")
	write(t, file, "{")
	synctest.Test(t, func(t *testing.T) {
		var s *fakeSession
		l, log := pathLink(t, file, func(_ context.Context, gateway netip.AddrPort) (session, error) {
			s = newFakeSession(gateway)
			return s, nil
		})
		learn := func(text string) {
			if err := l.paths.UnmarshalJSON([]byte(text)); err != nil {
				t.Error(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- l.Run(ctx) }()
		time.Sleep(time.Minute)
		learn(aPath)
		time.Sleep(pathsInterval - time.Minute - time.Second)
		if got := read(t, file); got != "{" {
			t.Errorf("too soon: %s", got)
		}
		time.Sleep(2 * time.Second)
		if got := read(t, file); got != aPath {
			t.Errorf("after a while it is %s", got)
		}
		learn(otherPath)
		s.end(nil)
		time.Sleep(time.Second)
		if got := read(t, file); got != otherPath {
			t.Errorf("after a session it is %s", got)
		}
		learn(aPath)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if got := read(t, file); got != aPath {
			t.Errorf("at the end it is %s", got)
		}
		if n := strings.Count(log.String(), "paths to gateways"); n != 1 {
			t.Errorf("%d lines about the file, want one about the damage:\n%s", n, log)
		}
	})
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// Where it cannot be written the link works all the same.
func TestPathsCannotBeSaved(t *testing.T) {
	l, log := pathLink(t, filepath.Join(t.TempDir(), "no", "paths.json"), silent)
	if err := l.paths.UnmarshalJSON([]byte(aPath)); err != nil {
		t.Fatal(err)
	}
	l.savePaths()
	l.savePaths()
	if n := strings.Count(log.String(), "make its directory writable"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log)
	}
}
