package gateway

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// start is when the tests' gateways are made.
var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// newState makes a gateway's state directory.
func newState(t testing.TB, o InitOptions) (dir string, first token.Token) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "state")
	// A port of its own, by which gateways listen that are not told another.
	o.Dir, o.Address, o.Now = dir, "vpn.example.net:4433", func() time.Time { return start }
	apart(t, func() (err error) {
		first, err = Init(o)
		return err
	})
	return dir, first
}

func readAll(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		all[d.Name()] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestInit(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	if first.Address != "vpn.example.net:4433" {
		t.Errorf("address %q", first.Address)
	}
	for _, name := range []string{identityFile, settingsFile, tokensFile, clientsFile, gatewayLock} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if info, err := os.Stat(dir); err != nil || info.Mode() != 0o700|fs.ModeDir {
		t.Errorf("%s: %v, %v", dir, info, err)
	}
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if pin := tunnel.KeyFingerprint(s.Key().Public().(ed25519.PublicKey)); pin != first.Pin {
		t.Errorf("the token pins %x, the key is %x", first.Pin, pin)
	}
	v4, v6 := s.Pools()
	if v4 != netip.MustParsePrefix("10.91.0.0/16") || !netip.MustParsePrefix("fd00::/8").Overlaps(v6) || v6.Bits() != 64 {
		t.Errorf("pools %s, %s", v4, v6)
	}
	if s.Address() != first.Address {
		t.Errorf("address %s", s.Address())
	}
	infos, err := ListTokens(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []TokenInfo{{ID: infos[0].ID, Name: "first", Network: "default", Created: start}}
	if diff := cmp.Diff(want, infos); diff != "" {
		t.Error(diff)
	}
	c, err := s.Authorize(tunnel.Join{Client: tunnel.Fingerprint{1}, Secret: first.SecretText()}, start)
	if err != nil || c.Network != "default" || c.Name != "first" {
		t.Errorf("first join: %+v, %v", c, err)
	}
}

func TestInitRefuses(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	before := readAll(t, dir)
	again := func(o InitOptions) error {
		var refused error
		apart(t, func() error {
			_, refused = Init(o)
			return nil
		})
		if refused == nil {
			t.Fatal("Init went well")
		}
		return refused
	}
	wants := func(err error, parts ...string) {
		t.Helper()
		for _, p := range parts {
			if !strings.Contains(err.Error(), p) {
				t.Errorf("got %q, want it to contain %q", err, p)
			}
		}
	}
	good := InitOptions{Dir: dir, Address: "vpn.example.net:443"}
	wants(again(good), dir, "already holds a gateway's identity", "quicvpn token create")
	if diff := cmp.Diff(before, readAll(t, dir)); diff != "" {
		t.Errorf("a refused Init changed the state: %s", diff)
	}
	if err := os.Remove(filepath.Join(dir, identityFile)); err != nil {
		t.Fatal(err)
	}
	delete(before, identityFile)
	wants(again(good), dir, settingsFile, tokensFile, clientsFile, "no identity.pem", "backup")
	if diff := cmp.Diff(before, readAll(t, dir)); diff != "" {
		t.Errorf("an Init that was refused for what is left changed it: %s", diff)
	}

	fresh := filepath.Join(t.TempDir(), "a", "state")
	wants(again(InitOptions{Address: "h:1"}), "directory")
	wants(again(InitOptions{Dir: fresh}), "host:port")
	wants(again(InitOptions{Dir: fresh, Address: "h:1", Pool4: netip.MustParsePrefix("10.0.0.1/8")}), "did you mean 10.0.0.0/8?")
	wants(again(InitOptions{Dir: fresh, Address: "h:1", Pool6: netip.MustParsePrefix("fe80::/64")}), "unicast")
	if _, err := os.Stat(filepath.Dir(fresh)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a refused Init left its directory: %v", err)
	}

	shared := t.TempDir()
	if err := os.Chmod(shared, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(shared, "someone's"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	wants(again(InitOptions{Dir: shared, Address: "h:1"}), shared, "of the gateway's own")
	if info, err := os.Stat(shared); err != nil || info.Mode().Perm() != 0o777 {
		t.Errorf("a directory of others became %v, %v", info.Mode(), err)
	}
	wants(again(InitOptions{Dir: filepath.Join(shared, "someone's"), Address: "h:1"}), "not a directory")
}

func TestInitTakesAnEmptyVolume(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(filepath.Join(dir, "lost+found"), 0o700)); err != nil {
		t.Fatal(err)
	}
	apart(t, func() error {
		_, err := Init(InitOptions{Dir: dir, Address: "vpn.example.net:443"})
		return err
	})
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// TestInitFailsHalfWay runs Init on file systems that have room for one file
// more each time: whatever fails, nothing is left, until nothing fails.
func TestInitFailsHalfWay(t *testing.T) {
	mnt := t.TempDir()
	apart(t, func() error {
		for inodes := 2; inodes < 20; inodes++ {
			if err := unix.Mount("none", mnt, "tmpfs", 0, fmt.Sprintf("nr_inodes=%d", inodes)); err != nil {
				return err
			}
			dir := filepath.Join(mnt, "a", "state")
			_, failed := Init(InitOptions{Dir: dir, Address: "vpn.example.net:443"})
			entries, err := os.ReadDir(mnt)
			if err == nil {
				err = unix.Unmount(mnt, 0) // fails if a descriptor is left open
			}
			if err != nil {
				return err
			}
			if failed == nil {
				if inodes < 8 {
					return fmt.Errorf("Init went well with %d inodes", inodes)
				}
				return nil
			}
			if !errors.Is(failed, unix.ENOSPC) || len(entries) > 0 {
				return fmt.Errorf("with %d inodes: %w; left: %v", inodes, failed, entries)
			}
		}
		return errors.New("Init never went well")
	})
}

func TestInitRace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	results := make(chan error)
	const n = 8
	for range n {
		go func() {
			results <- onOwnThread(func() error {
				_, err := Init(InitOptions{Dir: dir, Address: "vpn.example.net:443"})
				return err
			})
		}()
	}
	var errs []string
	for range n {
		if err := <-results; err != nil {
			errs = append(errs, err.Error())
		}
	}
	if len(errs) != n-1 {
		t.Errorf("%d of %d were refused: %v", len(errs), n, errs)
	}
	for _, e := range errs {
		if !strings.Contains(e, "already holds") && !strings.Contains(e, "another quicvpn process") {
			t.Errorf("refused with %q", e)
		}
	}
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

func TestOpenWithoutState(t *testing.T) {
	empty := t.TempDir()
	for _, dir := range []string{empty, filepath.Join(empty, "none")} {
		_, err := OpenState(dir)
		_, err2 := CreateToken(dir, TokenOptions{}, start)
		_, err3 := ListTokens(dir)
		_, err4 := RevokeToken(dir, "first", start)
		for _, err := range []error{err, err2, err3, err4} {
			if err == nil || !strings.Contains(err.Error(), "quicvpn gateway init") || !strings.Contains(err.Error(), dir) {
				t.Errorf("got %v", err)
			}
		}
	}
	if left := readAll(t, empty); len(left) > 0 {
		t.Errorf("a state was made: %v", left)
	}
}

func TestOpenTwice(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenState(dir); err == nil || !strings.Contains(err.Error(), "another gateway runs on "+dir) {
		t.Errorf("second gateway: %v", err)
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Errorf("close twice: %v", err)
	}
	if s, err = OpenState(dir); err != nil {
		t.Fatal(err)
	}
	s.Close()
}

func TestOpenTightens(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	paths := []string{dir}
	for _, name := range []string{identityFile, settingsFile, tokensFile, clientsFile} {
		paths = append(paths, filepath.Join(dir, name))
	}
	for _, p := range paths {
		if err := os.Chmod(p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	for _, p := range paths {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", p, info.Mode(), err)
		}
	}
}

// TestReadOnlyAndOpen wants a refusal where the state cannot be made private.
func TestReadOnlyAndOpen(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	apart(t, func() error {
		if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
			return err
		}
		if _, err := OpenState(dir); err == nil || !strings.Contains(err.Error(), "chmod go= "+dir) {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

// TestTruncatedAnywhere cuts each file at each length.
func TestTruncatedAnywhere(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	secrets := []string{first.SecretText()}
	for _, name := range []string{"phones", "servers"} {
		tok, err := CreateToken(dir, TokenOptions{Name: name, Uses: 5, Expires: time.Hour, Allow: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}, start)
		if err != nil {
			t.Fatal(err)
		}
		secrets = append(secrets, tok.SecretText())
	}
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := make(map[tunnel.Fingerprint]Client)
	for i := range 3 {
		c, err := s.Authorize(tunnel.Join{Client: tunnel.Fingerprint{byte(i)}, Secret: secrets[i]}, start)
		if err != nil {
			t.Fatal(err)
		}
		want[c.ID] = c
	}
	s.Close()

	for _, name := range []string{settingsFile, tokensFile, clientsFile, identityFile} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, name)
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			defer os.WriteFile(path, whole, 0o600)
			body := bytes.TrimSuffix(whole, []byte("\n")) // it is whole without that
			for n := range body {
				if err := os.WriteFile(path, whole[:n], 0o600); err != nil {
					t.Fatal(err)
				}
				s, err := OpenState(dir)
				if err == nil {
					s.Close()
					t.Fatalf("%d of %d bytes were a state", n, len(whole))
				}
				if !strings.Contains(err.Error(), path) || repeats(err.Error(), whole) {
					t.Fatalf("%d bytes: %v", n, err)
				}
			}
			if err := os.WriteFile(path, body, 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := OpenState(dir)
			if err != nil {
				t.Fatal(err)
			}
			for id, c := range want {
				got, err := s.Authorize(tunnel.Join{Client: id}, start)
				if diff := cmp.Diff(c, got, byText); diff != "" || err != nil {
					t.Errorf("%v: %s", err, diff)
				}
			}
			s.Close()
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if _, err := OpenState(dir); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "backup") {
				t.Errorf("without %s: %v", name, err)
			}
		})
	}
}

// repeats reports whether a text holds a longer word of a file's contents; the
// names of its fields do not count.
func repeats(text string, contents []byte) bool {
	words := strings.FieldsFunc(string(contents), func(r rune) bool { return strings.ContainsRune("\" \n,:{}[]", r) })
	return slices.ContainsFunc(words, func(w string) bool { return len(w) > 7 && strings.Contains(text, w) })
}
