package gateway

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

func reopen(t testing.TB, dir string) *State {
	t.Helper()
	s, err := OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// key makes up a client's fingerprint.
func key(n int) (id tunnel.Fingerprint) {
	binary.BigEndian.PutUint64(id[:], uint64(n))
	return id
}

func join(n int, tok token.Token) tunnel.Join {
	return tunnel.Join{Client: key(n), Secret: tok.SecretText()}
}

func mustJoin(t testing.TB, s *State, j tunnel.Join, now time.Time) Client {
	t.Helper()
	c, err := s.Authorize(j, now)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func enrolled(s *State, id tunnel.Fingerprint) bool {
	_, ok := s.Lookup(id)
	return ok
}

// wantRefused checks a refusal and returns its text.
func wantRefused(t testing.TB, err error, status int, code string) {
	t.Helper()
	var r *tunnel.RefusedError
	if !errors.As(err, &r) {
		t.Fatalf("got %v, want a refusal with %s", err, code)
	}
	if r.Status != status || r.Code != code || r.Text == "" {
		t.Errorf("refused with %d %s %q, want %d %s", r.Status, r.Code, r.Text, status, code)
	}
	if code != "unavailable" && !strings.Contains(r.Text, "quicvpn token") {
		t.Errorf("the refusal does not say what to do: %q", r.Text)
	}
}

func TestAuthorize(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/29"), Pool6: netip.MustParsePrefix("fd05::/64")})
	allow := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	once := newToken(t, dir, TokenOptions{Name: "once", Network: "lab", Uses: 1, Allow: allow})
	short := newToken(t, dir, TokenOptions{Name: "short", Expires: time.Minute})
	gone := newToken(t, dir, TokenOptions{Name: "gone"})
	if _, err := RevokeToken(dir, "gone", start); err != nil {
		t.Fatal(err)
	}
	s := reopen(t, dir)
	elsewhere, err := token.New("h:1", [32]byte{})
	if err != nil {
		t.Fatal(err)
	}

	for _, secret := range []string{"", "x", first.Encode(), first.SecretText() + "\n", strings.Repeat("A", 1<<16), elsewhere.SecretText()} {
		_, err := s.Authorize(tunnel.Join{Client: key(1), Secret: secret}, start)
		wantRefused(t, err, 401, "token-unknown")
	}
	_, err = s.Authorize(join(1, gone), start)
	wantRefused(t, err, 403, "token-revoked")
	_, err = s.Authorize(join(1, short), start.Add(time.Minute))
	wantRefused(t, err, 403, "token-expired")
	if len(s.members) != 0 {
		t.Fatalf("refused joins left %d members", len(s.members))
	}

	c := mustJoin(t, s, join(1, once), start)
	want := Client{ID: key(1), Name: "once", TokenID: listed(t, dir)[1].ID, Network: "lab",
		Addr4: netip.MustParseAddr("10.5.0.2"), Addr6: netip.MustParseAddr("fd05::2"), Allow: allow}
	if diff := cmp.Diff(want, c, byText); diff != "" {
		t.Error(diff)
	}
	_, err = s.Authorize(join(2, once), start)
	wantRefused(t, err, 403, "token-used-up")
	late := mustJoin(t, s, join(3, short), start.Add(time.Minute-1))

	// A key that is known needs no secret and does not mind what became of it.
	for _, j := range []tunnel.Join{{Client: key(1)}, join(1, once), join(1, gone), join(1, first), {Client: key(1), Secret: "nonsense"}} {
		if diff := cmp.Diff(c, mustJoin(t, s, j, start), byText); diff != "" {
			t.Error(diff)
		}
	}
	if diff := cmp.Diff(late, mustJoin(t, s, join(3, short), start.Add(1000*time.Hour)), byText); diff != "" {
		t.Error(diff)
	}
	// Five clients fit a /29.
	for n := 4; n <= 6; n++ {
		mustJoin(t, s, join(n, first), start)
	}
	_, err = s.Authorize(join(7, first), start)
	wantRefused(t, err, 503, "pool-exhausted")
	mustJoin(t, s, tunnel.Join{Client: key(6)}, start)

	used := make(map[string]int)
	for _, i := range listed(t, dir) {
		used[i.Name] = i.Used
	}
	if diff := cmp.Diff(map[string]int{"first": 3, "once": 1, "short": 1, "gone": 0}, used); diff != "" {
		t.Error(diff)
	}
}

// TestDurableBeforeAnswer takes a copy of the disk at each answer.
func TestDurableBeforeAnswer(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	for n := range 5 {
		c := mustJoin(t, s, join(n, first), start)
		crashed := filepath.Join(t.TempDir(), "copy")
		if err := os.CopyFS(crashed, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		after := reopen(t, crashed)
		if diff := cmp.Diff(c, mustJoin(t, after, tunnel.Join{Client: key(n)}, start), byText); diff != "" {
			t.Error(diff)
		}
	}
}

func TestBurst(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	tok := newToken(t, dir, TokenOptions{Name: "burst", Uses: 150})
	s := reopen(t, dir)
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := make(map[tunnel.Fingerprint]Client)
	var refused atomic.Int32
	for n := range 600 { // each key three times
		wg.Go(func() {
			c, err := s.Authorize(join(n%200, tok), start)
			if err != nil {
				wantRefused(t, err, 403, "token-used-up")
				refused.Add(1)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if before, ok := got[c.ID]; ok {
				if diff := cmp.Diff(before, c, byText); diff != "" {
					t.Errorf("one key, two answers: %s", diff)
				}
			}
			got[c.ID] = c
		})
	}
	wg.Wait()
	addrs := make(map[netip.Addr]bool)
	for _, c := range got {
		addrs[c.Addr4], addrs[c.Addr6] = true, true
	}
	if len(got) != 150 || len(addrs) != 300 || refused.Load() != 150 {
		t.Errorf("%d clients, %d addresses, %d refused", len(got), len(addrs), refused.Load())
	}
	if infos := listed(t, dir); infos[1].Used != 150 {
		t.Errorf("used %d times", infos[1].Used)
	}
	s.Close()
	after := reopen(t, dir)
	for id, c := range got {
		if diff := cmp.Diff(c, mustJoin(t, after, tunnel.Join{Client: id}, start), byText); diff != "" {
			t.Fatal(diff)
		}
	}
}

// TestNoInputOutput takes the disk away: what needs none goes on.
func TestNoInputOutput(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	c := mustJoin(t, s, join(1, first), start)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, mustJoin(t, s, join(1, first), start), byText); diff != "" {
		t.Error(diff)
	}
	for range 1000 {
		guess, err := token.New("h:1", [32]byte{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Authorize(join(2, guess), start)
		wantRefused(t, err, 401, "token-unknown")
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is back: %v", err)
	}
	_, err := s.Authorize(join(2, first), start)
	wantRefused(t, err, 503, "unavailable")
}

// TestCannotStore wants an enrolment that cannot be stored to leave no trace,
// and the next one to go well.
func TestCannotStore(t *testing.T) {
	dir, _ := newState(t, InitOptions{})
	tok := newToken(t, dir, TokenOptions{Name: "few", Uses: 2})
	s := reopen(t, dir)
	log := new(logBuffer)
	s.Log = log.logger()
	mustJoin(t, s, join(1, tok), start)
	before := readAll(t, dir)
	block := filepath.Join(dir, clientsFile+".tmp")
	if err := os.Mkdir(block, 0o700); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for n := range 20 {
		wg.Go(func() {
			_, err := s.Authorize(join(2+n%2, tok), start)
			var r *tunnel.RefusedError
			if !errors.As(err, &r) || r.Code != "unavailable" && r.Code != "token-used-up" {
				t.Errorf("got %v", err)
			}
		})
	}
	wg.Wait()
	mustJoin(t, s, join(1, tok), start)
	if got := strings.Count(log.String(), "no client can be enrolled"); got != 1 {
		t.Errorf("said %d times, want once: %s", got, log)
	}
	if diff := cmp.Diff(before, readAll(t, dir)); diff != "" {
		t.Errorf("the disk changed: %s", diff)
	}
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	c := mustJoin(t, s, join(2, tok), start)
	_, err := s.Authorize(join(3, tok), start)
	wantRefused(t, err, 403, "token-used-up")
	s.Close()
	if diff := cmp.Diff(c, mustJoin(t, reopen(t, dir), join(2, tok), start), byText); diff != "" {
		t.Error(diff)
	}
}

func TestAfterClose(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	c := mustJoin(t, s, join(1, first), start)
	s.Close()
	before := readAll(t, dir)
	if diff := cmp.Diff(c, mustJoin(t, s, join(1, first), start), byText); diff != "" {
		t.Error(diff)
	}
	_, err := s.Authorize(join(2, first), start)
	wantRefused(t, err, 503, "unavailable")
	if diff := cmp.Diff(before, readAll(t, dir)); diff != "" {
		t.Errorf("a closed state wrote: %s", diff)
	}
}

func TestRevokedWhileNoGatewayRan(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/30")})
	s := reopen(t, dir)
	c := mustJoin(t, s, join(1, first), start)
	s.Close()
	second := newToken(t, dir, TokenOptions{Name: "second", Network: "other"})
	if info, err := RevokeToken(dir, "first", start); err != nil || info.Used != 1 {
		t.Fatalf("%+v, %v", info, err)
	}
	s = reopen(t, dir)
	if enrolled(s, key(1)) {
		t.Error("the client is still admitted")
	}
	_, err := s.Authorize(join(1, first), start)
	wantRefused(t, err, 403, "token-revoked")
	_, err = s.Authorize(tunnel.Join{Client: key(1)}, start)
	wantRefused(t, err, 401, "token-unknown")
	// The only address of the pool is free again, for the same key by another token.
	again := mustJoin(t, s, join(1, second), start)
	if again.Addr4 != c.Addr4 || again.Network != "other" || !s.Admitted(again) || s.Admitted(c) {
		t.Errorf("%+v", again)
	}
	if now, ok := s.Lookup(key(1)); !ok || cmp.Diff(again, now, byText) != "" {
		t.Errorf("looked up as %+v", now)
	}
	if infos := listed(t, dir); infos[0].Used != 1 || infos[1].Used != 1 {
		t.Errorf("the count of enrolments: %+v", infos)
	}
}

// TestAgainstModel does random things to gateways with small pools, restarts
// among them, beside a plain model of who should have what.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			size := 28 + r.IntN(3)
			dir, first := newState(t, InitOptions{Pool4: netip.PrefixFrom(netip.MustParseAddr("10.9.9.0"), size)})
			room := 1<<(32-size) - 3
			toks := []token.Token{first}
			ids := []string{listed(t, dir)[0].ID}
			model := make(map[tunnel.Fingerprint]Client)
			s := reopen(t, dir)
			create := func() (token.Token, string) {
				tok := newToken(t, dir, TokenOptions{})
				infos := listed(t, dir)
				return tok, infos[len(infos)-1].ID
			}
			for range 150 {
				switch op := r.IntN(20); {
				case op == 0:
					s.Close()
					s = reopen(t, dir)
				case op == 1:
					tok, id := create()
					toks, ids = append(toks, tok), append(ids, id)
				case op == 2:
					i := r.IntN(len(toks))
					if _, err := RevokeToken(dir, ids[i], start); err != nil {
						t.Fatal(err)
					}
					for id, c := range model {
						if c.TokenID == ids[i] {
							delete(model, id)
						}
					}
					toks[i], ids[i] = create()
				default:
					s.refresh(func([]tunnel.Fingerprint) {})
					i, n := r.IntN(len(toks)), r.IntN(room+3)
					c, err := s.Authorize(join(n, toks[i]), start)
					old, known := model[key(n)]
					switch {
					case known:
						if diff := cmp.Diff(old, c, byText); diff != "" || err != nil {
							t.Fatal(diff, err)
						}
					case len(model) == room:
						wantRefused(t, err, 503, "pool-exhausted")
					case err != nil:
						t.Fatal(err)
					default:
						checkHost(t, s.cfg.Pool4, c.Addr4)
						checkHost(t, s.cfg.Pool6, c.Addr6)
						for _, other := range model {
							if other.Addr4 == c.Addr4 || other.Addr6 == c.Addr6 {
								t.Fatalf("%+v and %+v share an address", other, c)
							}
						}
						model[key(n)] = c
					}
				}
			}
			s.refresh(func([]tunnel.Fingerprint) {})
			if len(s.members) != len(model) {
				t.Errorf("%d members, want %d", len(s.members), len(model))
			}
		})
	}
}

// BenchmarkEnrol joins many new keys at once; one operation is one join.
func BenchmarkEnrol(b *testing.B) {
	for _, atOnce := range []int{1, 1000} {
		b.Run(fmt.Sprint("at-once-", atOnce), func(b *testing.B) {
			dir, first := newState(b, InitOptions{Pool4: netip.MustParsePrefix("10.0.0.0/8")})
			s := reopen(b, dir)
			b.ResetTimer()
			var wg sync.WaitGroup
			slots := make(chan struct{}, atOnce)
			for n := range b.N {
				slots <- struct{}{}
				wg.Go(func() {
					now := start.Add(time.Duration(n) * time.Second) // no faster than a token may
					if _, err := s.Authorize(join(n, first), now); err != nil {
						b.Error(err)
					}
					<-slots
				})
			}
			wg.Wait()
		})
	}
}

// BenchmarkRefuse is what a guess at a secret costs with 1,000 tokens.
func BenchmarkRefuse(b *testing.B) {
	file := tokens{Tokens: make([]tokenRecord, 1000)}
	for i := range file.Tokens {
		file.Tokens[i].ID = fmt.Sprintf("%08x", i)
		file.Tokens[i].SHA256[0] = byte(i)
	}
	guess, err := token.New("h:1", [32]byte{})
	if err != nil {
		b.Fatal(err)
	}
	s := &State{tokens: newTokenTable(file)}
	for b.Loop() {
		if _, err := s.Authorize(join(1, guess), start); err == nil {
			b.Fatal("not refused")
		}
	}
}
