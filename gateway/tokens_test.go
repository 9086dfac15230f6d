package gateway

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

func newToken(t testing.TB, dir string, o TokenOptions) token.Token {
	t.Helper()
	tok, err := CreateToken(dir, o, start)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func listed(t testing.TB, dir string) []TokenInfo {
	t.Helper()
	infos, err := ListTokens(dir)
	if err != nil {
		t.Fatal(err)
	}
	return infos
}

func TestCreateAndList(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	allow := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8::/32")}
	phones := newToken(t, dir, TokenOptions{Name: "Ana's phone ☎", Network: "home-2", Allow: allow, Expires: time.Hour, Uses: 3})
	plain := newToken(t, dir, TokenOptions{})
	if phones.Pin != first.Pin || phones.Address != first.Address || phones.Secret == first.Secret || plain.Secret == phones.Secret {
		t.Errorf("tokens %v, %v, %v", first, phones, plain)
	}
	got := listed(t, dir)
	want := []TokenInfo{
		{ID: got[0].ID, Name: "first", Network: "default", Created: start},
		{ID: got[1].ID, Name: "Ana's phone ☎", Network: "home-2", Allow: allow, Created: start, Expires: start.Add(time.Hour), Uses: 3},
		{ID: got[2].ID, Name: got[2].ID, Network: "default", Created: start},
	}
	if diff := cmp.Diff(want, got, byText); diff != "" {
		t.Error(diff)
	}
	for _, i := range got {
		if !tokenID.MatchString(i.ID) {
			t.Errorf("ID %q", i.ID)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, tokensFile)); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// byText compares addresses and prefixes, whose fields are unexported.
var byText = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func TestCreateRefuses(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	before := readAll(t, dir)
	for _, tt := range []struct {
		o    TokenOptions
		want string
	}{
		{TokenOptions{Name: strings.Repeat("é", 65)}, "64 printable"},
		{TokenOptions{Name: "a\x1b[31m"}, "64 printable"},
		{TokenOptions{Name: "a\nb"}, "64 printable"},
		{TokenOptions{Name: " a"}, "64 printable"},
		{TokenOptions{Name: "a\xff"}, "64 printable"},
		{TokenOptions{Network: "Home"}, "a-z, 0-9 and -"},
		{TokenOptions{Network: "a b"}, "a-z, 0-9 and -"},
		{TokenOptions{Network: "a\n"}, "a-z, 0-9 and -"},
		{TokenOptions{Network: strings.Repeat("a", 64)}, "1 to 63"},
		{TokenOptions{Expires: -1}, "negative"},
		{TokenOptions{Uses: -1}, "negative"},
		{TokenOptions{Allow: []netip.Prefix{{}}}, "as in 10.0.0.0/8"},
		{TokenOptions{Allow: []netip.Prefix{netip.MustParsePrefix("10.1.2.3/8")}}, "did you mean 10.0.0.0/8?"},
		{TokenOptions{Allow: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}}, "as in 10.0.0.0/8"},
		{TokenOptions{Allow: make([]netip.Prefix, 257)}, "use broader ones"},
	} {
		if _, err := CreateToken(dir, tt.o, start); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: got %v, want %q", tt.o, err, tt.want)
		}
	}
	after := readAll(t, dir)
	delete(after, tokensLock)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("refused tokens changed the state: %s", diff)
	}
}

func TestRevoke(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	for _, name := range []string{"one", "two", "two"} {
		newToken(t, dir, TokenOptions{Name: name})
	}
	all := listed(t, dir) // first, one, two, two
	newToken(t, dir, TokenOptions{Name: all[1].ID})

	later := start.Add(time.Hour)
	info, err := RevokeToken(dir, "one", later)
	if err != nil || info.ID != all[1].ID || !info.Revoked.Equal(later) {
		t.Errorf("by name: %+v, %v", info, err)
	}
	info, err = RevokeToken(dir, "one", later.Add(time.Hour))
	if err != nil || !info.Revoked.Equal(later) {
		t.Errorf("again: %+v, %v", info, err)
	}
	_, err = RevokeToken(dir, "two", later)
	if err == nil || !strings.Contains(err.Error(), all[2].ID) || !strings.Contains(err.Error(), all[3].ID) {
		t.Errorf("ambiguous: %v", err)
	}
	if info, err := RevokeToken(dir, all[2].ID, later); err != nil || info.ID != all[2].ID {
		t.Errorf("by ID: %+v, %v", info, err)
	}
	if info, err := RevokeToken(dir, "two", later); err != nil || info.ID != all[3].ID {
		t.Errorf("the name that is left: %+v, %v", info, err)
	}
	if _, err = RevokeToken(dir, "two", later); err == nil || !strings.Contains(err.Error(), all[2].ID) {
		t.Errorf("ambiguous among revoked ones: %v", err)
	}
	if _, err := RevokeToken(dir, "three", later); err == nil || !strings.Contains(err.Error(), "quicvpn token list") {
		t.Errorf("unknown: %v", err)
	}
	// An ID goes before a name that looks the same.
	if info, err := RevokeToken(dir, all[1].ID, later); err != nil || info.ID != all[1].ID {
		t.Errorf("%+v, %v", info, err)
	}
	var live []string
	for _, i := range listed(t, dir) {
		if i.Revoked.IsZero() {
			live = append(live, i.Name)
		}
	}
	if diff := cmp.Diff([]string{"first", all[1].ID}, live); diff != "" {
		t.Error(diff)
	}
}

// TestManyAtOnce has many CLI verbs beside a gateway that enrols.
func TestManyAtOnce(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	stop := watch(t, s, func([]tunnel.Fingerprint) {})
	const n = 40
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			name := fmt.Sprint("token ", i)
			if _, err := CreateToken(dir, TokenOptions{Name: name}, start); err != nil {
				t.Error(err)
			}
			if i%2 == 0 {
				if _, err := RevokeToken(dir, name, start); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			if _, err := s.Authorize(tunnel.Join{Client: tunnel.Fingerprint{byte(i)}, Secret: first.SecretText()}, start); err != nil {
				t.Error(err)
			}
			if _, err := ListTokens(dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	stop()
	names, revoked := make(map[string]bool), 0
	for _, i := range listed(t, dir) {
		names[i.Name] = true
		if !i.Revoked.IsZero() {
			revoked++
		}
		if i.Name == "first" && i.Used != n {
			t.Errorf("used %d times, want %d", i.Used, n)
		}
	}
	if len(names) != n+1 || revoked != n/2 {
		t.Errorf("%d tokens, %d revoked; want %d, %d", len(names), revoked, n+1, n/2)
	}
	s.refresh(func([]tunnel.Fingerprint) {})
	if len(s.tokens.all) != n+1 {
		t.Errorf("the gateway knows %d tokens, want %d", len(s.tokens.all), n+1)
	}
}

func TestLockedTokens(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	lock, err := lockTokens(dir)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := CreateToken(dir, TokenOptions{Name: "late"}, start)
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("did not wait for the lock: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestDiskHoldsNoSecret looks for every form of a secret in the directory.
func TestDiskHoldsNoSecret(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	second := newToken(t, dir, TokenOptions{Name: "second"})
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Authorize(tunnel.Join{Client: tunnel.Fingerprint{1}, Secret: second.SecretText()}, start); err != nil {
		t.Fatal(err)
	}
	for name, contents := range readAll(t, dir) {
		for _, tok := range []token.Token{first, second} {
			if leaks(contents, tok) {
				t.Errorf("%s holds a secret", name)
			}
		}
	}
	sum := digest(sha256.Sum256(second.Secret[:]))
	if text, err := sum.MarshalText(); err != nil || !strings.Contains(readAll(t, dir)[tokensFile], string(text)) {
		t.Errorf("the SHA-256 is not there: %v", err)
	}
}

// leaks reports whether a text holds a token's secret in some form.
func leaks(text string, tok token.Token) bool {
	b := tok.Secret[:]
	for _, form := range []string{
		tok.SecretText(), tok.Encode(), string(b), fmt.Sprintf("%x", b), fmt.Sprintf("%X", b),
		strings.Trim(fmt.Sprint(b), "[]"), strings.ReplaceAll(strings.Trim(fmt.Sprint(b), "[]"), " ", ","),
	} {
		if strings.Contains(text, form) {
			return true
		}
	}
	return false
}

func FuzzDecode(f *testing.F) {
	dir, first := newState(f, InitOptions{})
	newToken(f, dir, TokenOptions{Name: "n", Uses: 2, Expires: time.Hour, Allow: []netip.Prefix{netip.MustParsePrefix("::/0")}})
	s, err := OpenState(dir)
	if err != nil {
		f.Fatal(err)
	}
	for i := range 2 {
		if _, err := s.Authorize(tunnel.Join{Client: tunnel.Fingerprint{byte(i)}, Secret: first.SecretText()}, start); err != nil {
			f.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		f.Fatal(err)
	}
	for _, contents := range readAll(f, dir) {
		f.Add([]byte(contents))
	}
	for _, seed := range []string{`null`, `{}`, `{"version":2}`, `{"version":1,"tokens":[{}]}`, `{"version":1,"clients":[{"addr4":"hunter2-hunter2"}]}`,
		`{"version":1,"tokens":null} trailing`, `{"version":1,"tokens":[{"id":"00000000","created":"hunter2-hunter2"}]}`, `[]`, `{"version":1e9}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, file := range [][2]checker{
			{new(settings), new(settings)}, {new(tokens), new(tokens)}, {new(clients), new(clients)},
		} {
			if err := decode(data, file[0]); err != nil {
				if strings.Contains(err.Error(), "hunter2") || len(err.Error()) > 100 {
					t.Fatalf("the error repeats contents: %v", err)
				}
				continue
			}
			text, err := encode(file[0])
			if err != nil {
				t.Fatalf("what was read cannot be written: %v", err)
			}
			if err := decode(text, file[1]); err != nil {
				t.Fatalf("what was written cannot be read: %v", err)
			}
			again, err := encode(file[1])
			if err != nil || string(again) != string(text) {
				t.Fatalf("%v: %s became %s", err, text, again)
			}
		}
	})
}

func TestStateIsOneGateway(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	key := s.Key()
	s.Close()
	other := filepath.Join(t.TempDir(), "other")
	if err := os.CopyFS(other, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	tok := newToken(t, other, TokenOptions{Name: "made by the copy"})
	if tok.Pin != first.Pin || tunnel.Fingerprint(tok.Pin) != tunnel.KeyFingerprint(key.Public().(ed25519.PublicKey)) {
		t.Error("a restored backup has another identity")
	}
	if err := os.Remove(filepath.Join(other, identityFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := CreateToken(other, TokenOptions{}, start); err == nil || !strings.Contains(err.Error(), "no identity.pem") {
		t.Errorf("without an identity: %v", err)
	}
}
