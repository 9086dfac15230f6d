package gateway

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/tunnel"
)

func nobody([]tunnel.Fingerprint) {}

func clientsOf(t testing.TB, dir string) []ClientInfo {
	t.Helper()
	infos, err := ListClients(dir)
	if err != nil {
		t.Fatal(err)
	}
	return infos
}

func TestLeaving(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/22")})
	s := reopen(t, dir)
	c := mustJoin(t, s, joinBlock(1, first), start)
	mustJoin(t, s, joinBlock(2, first), start)
	called := 0
	err := s.Remove(key(1), func(ids []tunnel.Fingerprint) {
		called++
		if diff := cmp.Diff([]tunnel.Fingerprint{key(1)}, ids); diff != "" {
			t.Error(diff)
		}
		// It is out, durably, and nobody has what it had yet.
		if enrolled(s, key(1)) || s.Admitted(c) || strings.Contains(readAll(t, dir)[clientsFile], c.Addr4.String()) {
			t.Error("a client that leaves is there still")
		}
		_, err := s.Authorize(join(1, first), start)
		wantRefused(t, err, 503, "unavailable")
		_, err = s.Authorize(joinBlock(9, first), start)
		wantRefused(t, err, 503, "pool-exhausted")
	})
	if err != nil || called != 1 {
		t.Errorf("%v, called %d times", err, called)
	}
	if err := s.Remove(key(1), func([]tunnel.Fingerprint) { t.Error("it left twice") }); err != nil {
		t.Error(err)
	}
	heir := mustJoin(t, s, joinBlock(9, first), start)
	if heir.Block4 != c.Block4 {
		t.Errorf("the block is %v, want the one that was freed", heir.Block4)
	}
	// The key may come back, as another client.
	back := mustJoin(t, s, join(1, first), start.Add(time.Second))
	if back.Block4.IsValid() || back.Addr4 == c.Addr4 {
		t.Errorf("%+v", back)
	}
	s.Close()
	s = reopen(t, dir)
	if now, ok := s.Lookup(key(9)); !ok || now.Block4 != heir.Block4 || len(s.members) != 3 {
		t.Errorf("%+v, %d members", now, len(s.members))
	}
}

// Who cannot be forgotten durably stays what it was.
func TestCannotLeave(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	log := new(logBuffer)
	s.Log = log.logger()
	c := mustJoin(t, s, joinBlock(1, first), start)
	before := readAll(t, dir)
	block := filepath.Join(dir, clientsFile+".tmp")
	if err := os.Mkdir(block, 0o700); err != nil {
		t.Fatal(err)
	}
	err := s.Remove(key(1), func([]tunnel.Fingerprint) { t.Error("its session has ended") })
	if err == nil || !strings.Contains(err.Error(), "forget client") {
		t.Errorf("Remove = %v", err)
	}
	if !s.Admitted(c) {
		t.Error("it is not admitted")
	}
	if diff := cmp.Diff(before, readAll(t, dir)); diff != "" {
		t.Errorf("the disk changed: %s", diff)
	}
	// Whether the disk has it is not known now: it is stored before the answer.
	_, err = s.Authorize(join(1, first), start)
	wantRefused(t, err, 503, "unavailable")
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, mustJoin(t, s, join(1, first), start), byText); diff != "" {
		t.Error(diff)
	}
	if err := s.Remove(key(1), nobody); err != nil {
		t.Error(err)
	}
	s.Close()
	if err := s.Remove(key(1), nobody); err != nil {
		t.Errorf("a client that nobody knows: %v", err)
	}
	if n := len(reopen(t, dir).members); n != 0 {
		t.Errorf("%d members", n)
	}
}

func TestListAndRemoveClients(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/16"), Pool6: netip.MustParsePrefix("fd05::/64")})
	office := newToken(t, dir, TokenOptions{Name: "office", Network: "office"})
	if got := clientsOf(t, dir); len(got) > 0 {
		t.Errorf("clients of a new gateway: %v", got)
	}
	s := reopen(t, dir)
	c1 := mustJoin(t, s, join(1, first), start)
	c2 := mustJoin(t, s, joinBlock(2, office), start.Add(time.Minute))
	c3 := mustJoin(t, s, join(3, first), start)
	s.Close()
	want := []ClientInfo{{c1, start}, {c2, start.Add(time.Minute)}, {c3, start}}
	if diff := cmp.Diff(want, clientsOf(t, dir), byText); diff != "" {
		t.Error(diff)
	}
	// The names of keys that the tests make begin alike.
	for arg, want := range map[string]string{
		"":                          "no such client",
		"10.5.0.9":                  "no such client",
		"10.5.0":                    "no such client",
		"::ffff:10.5.0.2":           "no such client",
		"zzz":                       "no such client",
		key(1).String() + "x":       "no such client",
		"AAAA":                      "the keys of 3 clients begin with",
		strings.Repeat("A", 100000): "no such client",
	} {
		if _, err := RemoveClient(dir, arg); err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 300 {
			t.Errorf("remove %q: %v, want %q", arg, err, want)
		}
	}
	if _, err := RemoveClient("/nowhere", "x"); err == nil || !strings.Contains(err.Error(), "quicvpn gateway init") {
		t.Errorf("%v", err)
	}

	// While no gateway runs: by key, and by an address of the block.
	info, err := RemoveClient(dir, key(1).String()[:11])
	if err != nil || info.ID != c1.ID {
		t.Errorf("%+v, %v", info, err)
	}
	if info, err = RemoveClient(dir, "fd05::fe77"); err != nil || info.ID != c2.ID {
		t.Errorf("%+v, %v", info, err)
	}
	if diff := cmp.Diff(want[2:], clientsOf(t, dir), byText); diff != "" {
		t.Error(diff)
	}
	s = reopen(t, dir)
	if len(s.members) != 1 || !s.Admitted(c3) || len(s.pool.used) != 1 {
		t.Errorf("%d members, %d numbers", len(s.members), len(s.pool.used))
	}
	if diff := cmp.Diff(want[2:], clientsOf(t, dir), byText); diff != "" {
		t.Error(diff)
	}

	// While it runs. The key that was removed is welcome.
	calls := make(chan []tunnel.Fingerprint, 1)
	stop := watch(t, s, func(ids []tunnel.Fingerprint) {
		for _, id := range ids {
			if enrolled(s, id) {
				t.Error("a removed client is admitted")
			}
			_, err := s.Authorize(tunnel.Join{Client: id, Secret: first.SecretText()}, start)
			wantRefused(t, err, 503, "unavailable")
		}
		calls <- ids
	})
	defer stop()
	if info, err = RemoveClient(dir, c3.Addr4.String()); err != nil || info.ID != c3.ID {
		t.Errorf("%+v, %v", info, err)
	}
	if ids := <-calls; len(ids) != 1 || ids[0] != c3.ID {
		t.Errorf("gone are %v", ids)
	}
	var again Client
	within(t, patience, "joining anew", func() bool {
		again, err = s.Authorize(join(3, first), start.Add(time.Hour))
		return err == nil
	})
	// It is not the one that was removed, now and after a restart.
	stop()
	s.refresh(func(ids []tunnel.Fingerprint) { t.Errorf("gone are %v", ids) })
	s.Close()
	s = reopen(t, dir)
	if !s.Admitted(again) || again.Addr4 == c3.Addr4 {
		t.Errorf("%+v", again)
	}
	if info, err = RemoveClient(dir, again.Addr6.String()); err != nil || !info.Since.Equal(start.Add(time.Hour)) {
		t.Errorf("%+v, %v", info, err)
	}
	// What is over is not kept for ever.
	if n := strings.Count(readAll(t, dir)[tokensFile], `"since"`); n != 1 {
		t.Errorf("%d removals are on disk:\n%s", n, readAll(t, dir)[tokensFile])
	}
}

// Those of a revoked token are not listed any more, also while no gateway runs.
func TestListWithoutRevoked(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	mustJoin(t, s, join(1, first), start)
	s.Close()
	if _, err := RevokeToken(dir, "first", start); err != nil {
		t.Fatal(err)
	}
	if got := clientsOf(t, dir); len(got) > 0 {
		t.Errorf("%v", got)
	}
	if _, err := RemoveClient(dir, key(1).String()); err == nil {
		t.Error("a revoked client was removed")
	}
}

// TestLeasesAgainstModel does random things to a gateway with a small pool,
// crashes among them, beside a plain model of who should have what.
func TestLeasesAgainstModel(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.8.0.0/21")})
			s := reopen(t, dir)
			model := make(map[tunnel.Fingerprint]Client)
			for i := range 250 {
				now := start.Add(time.Duration(i) * time.Hour)
				n := r.IntN(12)
				old, known := model[key(n)]
				switch op := r.IntN(10); {
				case op == 0: // a crash: what was answered is on disk
					crashed := filepath.Join(t.TempDir(), "copy")
					if err := os.CopyFS(crashed, os.DirFS(dir)); err != nil {
						t.Fatal(err)
					}
					s.Close()
					dir = crashed
					s = reopen(t, dir)
				case op == 1:
					if err := s.Remove(key(n), nobody); err != nil {
						t.Fatal(err)
					}
					delete(model, key(n))
				case op == 2:
					_, err := RemoveClient(dir, key(n).String())
					if (err == nil) != known {
						t.Fatalf("remove client %d: %v", n, err)
					}
					if r.IntN(2) == 0 {
						s.Close()
						s = reopen(t, dir)
					}
					s.refresh(nobody)
					delete(model, key(n))
				default:
					j := join(n, first)
					j.Block = op > 5
					c, err := s.Authorize(j, now)
					if err != nil {
						wantRefused(t, err, 503, "pool-exhausted")
						if blocks(model) < 6 || old.Block4.IsValid() || !j.Block {
							t.Fatalf("%v with %d blocks taken", err, blocks(model))
						}
						break
					}
					if known && (c.Addr4 != old.Addr4 || c.Addr6 != old.Addr6 || old.Block4.IsValid() && c.Block4 != old.Block4) ||
						c.Block4.IsValid() != (j.Block || old.Block4.IsValid()) {
						t.Fatalf("%+v became %+v", old, c)
					}
					model[key(n)] = c
					var all []netip.Prefix
					for _, c := range model {
						all = append(all, netip.PrefixFrom(c.Addr4, 32), netip.PrefixFrom(c.Addr6, 128))
						if c.Block4.IsValid() {
							all = append(all, c.Block4, c.Block6)
						}
					}
					for i, p := range all {
						for _, q := range all[:i] {
							if p.Overlaps(q) {
								t.Fatalf("%v and %v overlap", p, q)
							}
						}
					}
				}
				if infos := clientsOf(t, dir); len(infos) != len(model) {
					t.Fatalf("%d clients are listed, want %d", len(infos), len(model))
				}
			}
		})
	}
}

func blocks(model map[tunnel.Fingerprint]Client) (n int) {
	for _, c := range model {
		if c.Block4.IsValid() {
			n++
		}
	}
	return n
}

// Removals that nobody could have written are not taken.
func TestRemovedRecords(t *testing.T) {
	good := removedRecord{Key: digest(key(1)), Since: start}
	for _, file := range []tokens{{Removed: []removedRecord{good, good}}, {Removed: []removedRecord{{Key: good.Key}}}} {
		if err := file.check(); err == nil {
			t.Errorf("%+v was taken", file)
		}
	}
	if err := (&tokens{Removed: []removedRecord{good}}).check(); err != nil {
		t.Error(err)
	}
}
