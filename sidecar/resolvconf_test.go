package sidecar

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// newTestNames returns a file to play with, and its content.
func newTestNames(t *testing.T, content string) (*namesFile, func() string) {
	t.Helper()
	dir := t.TempDir()
	r := newNamesFile(dir, slog.New(slog.DiscardHandler))
	r.path = filepath.Join(dir, "etc-resolv.conf")
	if err := os.WriteFile(r.path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return r, func() string {
		b, err := os.ReadFile(r.path)
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
}

var gatewaySelf = []netip.Addr{netip.MustParseAddr("10.88.0.1"), netip.MustParseAddr("fd88::1")}

func TestNamesFile(t *testing.T) {
	const short, long = "nameserver 127.0.0.11\nsearch a b\n  options ndots:0\n", "# a comment\nnameserver 192.0.2.1\n"
	for _, original := range []string{"", short, long + strings.Repeat("# much\n", 500)} {
		r, content := newTestNames(t, original)
		if err := r.check(); err != nil {
			t.Error(err)
		}
		if err := r.restore(); err != nil || content() != original {
			t.Errorf("restored what was not touched: %v, %q", err, content())
		}
		if err := r.want(nil); err != nil || content() != original {
			t.Errorf("without a gateway: %v, %q", err, content())
		}
		before, err := os.Stat(r.path)
		if err != nil {
			t.Fatal(err)
		}
		for _, servers := range [][]netip.Addr{gatewaySelf, gatewaySelf[:1], gatewaySelf} {
			if err := r.want(servers); err != nil {
				t.Error(err)
			}
		}
		want := confMark + "; it ends with the sidecar, and what was here is in " + r.kept + "\nnameserver 10.88.0.1\nnameserver fd88::1\n"
		if original == short {
			want += "search a b\noptions ndots:0\n"
		}
		if got := content(); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
		if after, err := os.Stat(r.path); err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() {
			t.Errorf("not the same file any more: %v", err)
		}
		// Another run, which knows nothing of this one.
		r = &namesFile{path: r.path, kept: r.kept, log: r.log}
		if err := r.restore(); err != nil || content() != original {
			t.Errorf("%v: restored to\n%s\nwant\n%s", err, content(), original)
		}
		if _, err := os.Stat(r.kept); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("what was kept is still there: %v", err)
		}
	}
}

// TestNamesFileCutOff has a run killed at each step of writing.
func TestNamesFileCutOff(t *testing.T) {
	originals := []string{"nameserver 192.0.2.1\n", strings.Repeat("nameserver 192.0.2.1\n", 100)}
	for _, original := range originals {
		probe, _ := newTestNames(t, original)
		probe.original = []byte(original)
		ours := string(probe.text(gatewaySelf))
		for _, now := range []string{original, original[:min(len(original), len(ours))], ours, ours[:min(len(original), len(ours))], ""} {
			r, content := newTestNames(t, now)
			if err := os.WriteFile(r.kept, []byte(original), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := r.restore(); err != nil || content() != original {
				t.Errorf("%v: cut off at\n%s\nrestored to\n%s\nwant\n%s", err, now, content(), original)
			}
		}
	}
}

func TestNamesFileOfOthers(t *testing.T) {
	r, content := newTestNames(t, "nameserver 192.0.2.1\n")
	if err := r.want(gatewaySelf); err != nil {
		t.Fatal(err)
	}
	const theirs = "nameserver 192.0.2.2\n"
	if err := os.WriteFile(r.path, []byte(theirs), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.restore(); err != nil || content() != theirs {
		t.Errorf("%v: it is\n%s", err, content())
	}
	// A new container has a file of its own, or none, and the old state directory.
	if err := r.want(gatewaySelf); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(r.path); err != nil {
		t.Fatal(err)
	}
	if err := r.restore(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(r.kept); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was kept is still there: %v", err)
	}
	if err := r.check(); err == nil || !strings.Contains(err.Error(), "--resolv-conf: ") {
		t.Errorf("a file that is not there: %v", err)
	}
	// Without a place to keep it the file stays as it is.
	r, content = newTestNames(t, theirs)
	r.kept = filepath.Join(r.kept, "nowhere")
	if err := r.want(gatewaySelf); err == nil || content() != theirs {
		t.Errorf("%v: it is\n%s", err, content())
	}
}

// TestResolvConf has a sidecar that is killed, stopped, and that finds its gateway by
// name meanwhile.
func TestResolvConf(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const original = "nameserver 203.0.113.10\nsearch lan\noptions ndots:2\n"
	l.Client.Replace(resolvConf, original)
	asked := serveDNS(t, l.Internet, "203.0.113.10:53")
	content := func() (s string) {
		t.Helper()
		if err := l.Client.Do(func() error {
			b, err := os.ReadFile(resolvConf)
			s = string(b)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return s
	}
	written := func() {
		t.Helper()
		l.eventually(func() error {
			if s := content(); !strings.Contains(s, "\nnameserver 10.88.0.1\nnameserver fd88::1\nsearch lan\noptions ndots:2\n") || strings.Contains(s, "203.0.113.10") {
				return fmt.Errorf("it says\n%s", s)
			}
			return nil
		})
	}
	with := childSettings{Address: fmt.Sprintf("gateway.example:%d", toyPort), ResolvConf: true}
	cmd := l.start(with)
	l.ping(toyRemote4)
	written()
	// A lost session, and the name is asked for again, where it was before.
	before := len(asked())
	l.gw.set(func() { l.gw.dead = true })
	l.eventually(func() error {
		if len(asked()) == before {
			return errors.New("nobody asks for the gateway's name")
		}
		return nil
	})
	l.gw.set(func() { l.gw.dead = false })
	l.ping(toyRemote4)

	// A second one that cannot start leaves the file alone.
	second := l.command(childSettings{})
	if err := second.Run(); err == nil || !strings.Contains(second.Log(), "another quicvpn sidecar runs") {
		t.Errorf("a second sidecar: %v, %s", err, second.Log())
	}
	written()

	kill := func(c *netlab.Cmd) {
		t.Helper()
		if err := c.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-c.Done()
		written() // it stays
	}
	kill(cmd)
	// The next start restores it, whether it wants its own then or not.
	cmd = l.start(with)
	written()
	kill(cmd)
	cmd = l.start(childSettings{})
	if s := content(); s != original {
		t.Errorf("after a start without --resolv-conf it is\n%s", s)
	}
	l.stop(cmd)
	cmd = l.start(with)
	written()
	l.stop(cmd)
	if s := content(); s != original {
		t.Errorf("after a stop it is\n%s", s)
	}
	if files, err := filepath.Glob(filepath.Join(l.dir, "*")); err != nil || len(files) != 1 {
		t.Errorf("the state directory holds %v (%v), want the key alone", files, err)
	}
}
