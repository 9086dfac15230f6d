package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// joinBlock is a join that asks for a block.
func joinBlock(n int, tok token.Token) tunnel.Join {
	j := join(n, tok)
	j.Block = true
	return j
}

func TestBlockIsLeased(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/16"), Pool6: netip.MustParsePrefix("fd05::/64")})
	s := reopen(t, dir)
	plain := mustJoin(t, s, join(1, first), start)
	if plain.Block4.IsValid() || plain.Block6.IsValid() {
		t.Errorf("a block that nobody asked for: %+v", plain)
	}
	// One that comes with the enrolment, and one that comes later.
	host := mustJoin(t, s, joinBlock(2, first), start)
	later := mustJoin(t, s, joinBlock(1, first), start)
	want := plain
	want.Block4, want.Block6 = netip.MustParsePrefix("10.5.253.0/24"), netip.MustParsePrefix("fd05::fd00/120")
	if diff := cmp.Diff(want, later, byText); diff != "" {
		t.Error(diff)
	}
	if host.Block4 != netip.MustParsePrefix("10.5.254.0/24") || host.Block6 != netip.MustParsePrefix("fd05::fe00/120") || host.Addr4 != netip.MustParseAddr("10.5.0.3") {
		t.Errorf("%+v", host)
	}
	check := func() {
		t.Helper()
		for _, c := range []Client{host, later} {
			for _, j := range []tunnel.Join{{Client: c.ID}, {Client: c.ID, Block: true}} {
				if diff := cmp.Diff(c, mustJoin(t, s, j, start), byText); diff != "" {
					t.Error(diff)
				}
			}
			if now, ok := s.Lookup(c.ID); !ok || cmp.Diff(c, now, byText) != "" || !s.Admitted(c) {
				t.Errorf("looked up as %+v", now)
			}
		}
	}
	check()
	if listed(t, dir)[0].Used != 2 {
		t.Error("a block counts as an enrolment")
	}
	// A grant from before the block is still good, one with another is not.
	if !s.Admitted(plain) {
		t.Error("a client without its block is not admitted")
	}
	other := later
	other.Block4 = host.Block4
	if s.Admitted(other) {
		t.Error("a client with another's block is admitted")
	}
	s.Close()
	s = reopen(t, dir)
	check()
	third := mustJoin(t, s, joinBlock(3, first), start)
	if third.Block4.Overlaps(host.Block4) || third.Block4.Overlaps(later.Block4) {
		t.Errorf("%v is leased twice", third.Block4)
	}
	// Revoked, it is free again.
	if _, err := RevokeToken(dir, "first", start); err != nil {
		t.Fatal(err)
	}
	s.refresh(func([]tunnel.Fingerprint) {})
	for run, taken := range s.pool.taken {
		if taken != 0 {
			t.Errorf("of run %d are %d taken", run, taken)
		}
	}
}

// TestBlockIsDurableBeforeAnswer takes a copy of the disk at each answer.
func TestBlockIsDurableBeforeAnswer(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	mustJoin(t, s, join(0, first), start)
	for n := range 5 {
		c := mustJoin(t, s, joinBlock(n, first), start)
		crashed := filepath.Join(t.TempDir(), "copy")
		if err := os.CopyFS(crashed, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c, mustJoin(t, reopen(t, crashed), tunnel.Join{Client: key(n)}, start), byText); diff != "" {
			t.Error(diff)
		}
	}
}

func TestNoBlockLeft(t *testing.T) {
	small := func(pool4, pool6 string) (*State, token.Token) {
		dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix(pool4), Pool6: netip.MustParsePrefix(pool6)})
		return reopen(t, dir), first
	}
	for _, pools := range [][2]string{{"10.5.0.0/24", "fd05::/64"}, {"10.5.0.0/16", "fd05::/120"}} {
		s, first := small(pools[0], pools[1])
		c := mustJoin(t, s, join(1, first), start)
		for n := 1; n <= 2; n++ {
			_, err := s.Authorize(joinBlock(n, first), start)
			var r *tunnel.RefusedError
			if !errors.As(err, &r) || r.Status != 503 || r.Code != "pool-exhausted" || !strings.Contains(r.Text, "larger --pool, such as 10.91.0.0/16") ||
				!strings.Contains(r.Text, pools[0]) || !strings.Contains(r.Text, pools[1]) {
				t.Errorf("%v: %v", pools, err)
			}
		}
		// Who is not enrolled for it is not, and who was before still is.
		if len(s.members) != 1 || len(s.pool.used) != 1 {
			t.Errorf("%v: %d members with %d numbers", pools, len(s.members), len(s.pool.used))
		}
		if diff := cmp.Diff(c, mustJoin(t, s, join(1, first), start), byText); diff != "" {
			t.Error(diff)
		}
	}

	s, first := small("10.5.0.0/21", "fd05::/64") // of 8 runs, 6 can be blocks
	for n := range 6 {
		mustJoin(t, s, joinBlock(n, first), start)
	}
	_, err := s.Authorize(joinBlock(6, first), start)
	wantRefused(t, err, 503, "pool-exhausted")
	if !strings.Contains(err.Error(), "quicvpn client remove") || !strings.Contains(err.Error(), "--pool") {
		t.Errorf("%v does not say what to do", err)
	}
	mustJoin(t, s, join(6, first), start)
	if err := s.Remove(key(3), func([]tunnel.Fingerprint) {}); err != nil {
		t.Fatal(err)
	}
	mustJoin(t, s, joinBlock(6, first), start)
}

// The last addresses may be those of the last run that could be a block.
func TestBlockAndAddressCompete(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/22"), Pool6: netip.MustParsePrefix("fd05::/118")})
	s := reopen(t, dir)
	for n := range 254 + 255 { // all of run 0 and, if it opens it, of run 1 or 3
		mustJoin(t, s, join(n, first), start)
	}
	now := start
	joined := 0
	for n := 1000; ; n++ {
		now = now.Add(time.Minute)
		if _, err := s.Authorize(joinBlock(n, first), now); err != nil {
			wantRefused(t, err, 503, "pool-exhausted")
			break
		}
		joined++
	}
	if len(s.members) != 509+joined {
		t.Errorf("%d members, %d with a block", len(s.members), joined)
	}
	// Whoever was refused left nothing behind.
	count := 0
	for _, ok := s.pool.allocate(); ok; _, ok = s.pool.allocate() {
		count++
	}
	if free := 1023 - 2 - 509 - joined*(blockSize+1); count != free {
		t.Errorf("%d addresses are free, want %d with %d blocks", count, free, joined)
	}
}

// A block that cannot be stored is not leased, and what was before is.
func TestCannotStoreBlock(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	c := mustJoin(t, s, join(1, first), start)
	before := readAll(t, dir)
	block := filepath.Join(dir, clientsFile+".tmp")
	if err := os.Mkdir(block, 0o700); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for n := range 20 {
		wg.Go(func() {
			_, err := s.Authorize(joinBlock(1+n%2, first), start)
			wantRefused(t, err, 503, "unavailable")
		})
	}
	wg.Wait()
	if diff := cmp.Diff(c, mustJoin(t, s, join(1, first), start), byText); diff != "" {
		t.Error(diff)
	}
	if len(s.members) != 1 {
		t.Errorf("%d members", len(s.members))
	}
	if diff := cmp.Diff(before, readAll(t, dir)); diff != "" {
		t.Errorf("the disk changed: %s", diff)
	}
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	c = mustJoin(t, s, joinBlock(1, first), start)
	free := 0
	for _, ok := s.pool.allocateBlock(); ok; _, ok = s.pool.allocateBlock() {
		free++
	}
	if free != 253 { // of 254
		t.Errorf("%d blocks are free", free)
	}
	s.Close()
	if diff := cmp.Diff(c, mustJoin(t, reopen(t, dir), join(1, first), start), byText); diff != "" {
		t.Error(diff)
	}
}

// Joins of one key at once, with and without the wish for a block, get one block.
func TestBlockBurst(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	var wg sync.WaitGroup
	var mu sync.Mutex
	blocks := make(map[netip.Prefix]tunnel.Fingerprint)
	for n := range 200 {
		wg.Go(func() {
			j := join(n%20, first)
			j.Block = n%3 > 0
			c, err := s.Authorize(j, start)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if !c.Block4.IsValid() && !j.Block {
				return
			}
			if id, ok := blocks[c.Block4]; ok && id != c.ID || !c.Block4.IsValid() {
				t.Errorf("%v has %v", c.ID, c.Block4)
			}
			blocks[c.Block4] = c.ID
		})
	}
	wg.Wait()
	if len(blocks) != 20 {
		t.Errorf("%d blocks for 20 clients", len(blocks))
	}
	s.Close()
	s = reopen(t, dir)
	for block, id := range blocks {
		if c, ok := s.Lookup(id); !ok || c.Block4 != block {
			t.Errorf("%v has %v after a restart, want %v", id, c.Block4, block)
		}
	}
}

// A token gives a burst of blocks, and then no faster than it may.
func TestBlockRate(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	s := reopen(t, dir)
	const most = enrolBurst / blockCost
	for n := range most {
		mustJoin(t, s, joinBlock(n, first), start)
	}
	_, err := s.Authorize(joinBlock(most, first), start)
	wantRefused(t, err, 503, "enrolment-rate")
	for n := range most {
		mustJoin(t, s, joinBlock(n, first), start)
	}
	mustJoin(t, s, joinBlock(most, first), start.Add(blockCost*time.Second))
}

// TestClientsFileWithBlocks reads files that a gateway did not write.
func TestClientsFileWithBlocks(t *testing.T) {
	dir, first := newState(t, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/16"), Pool6: netip.MustParsePrefix("fd05::/64")})
	id := listed(t, dir)[0].ID
	record := func(n int, addr, rest string) string {
		return fmt.Sprintf(`{"key":%q,"token":%q,"addr4":"10.5.%s","addr6":"fd05::%s","since":"2026-03-01T12:00:00Z"%s}`,
			key(n), id, addr, strings.NewReplacer("0.5", "5", "0.6", "6", "9.1", "901").Replace(addr), rest)
	}
	write := func(records ...string) {
		t.Helper()
		text := fmt.Sprintf(`{"version":1,"clients":[%s],"enrolled":{%q:9}}`, strings.Join(records, ","), id)
		if err := durable.Replace(filepath.Join(dir, clientsFile), []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	const block9 = `,"block4":"10.5.9.0/24","block6":"fd05::900/120"`
	for name, tc := range map[string]struct {
		records []string
		want    string
	}{
		"from before blocks":       {[]string{record(1, "0.5", ""), record(2, "0.6", "")}, ""},
		"a block":                  {[]string{record(1, "0.5", block9), record(2, "0.6", "")}, ""},
		"a block twice":            {[]string{record(1, "0.5", block9), record(2, "0.6", block9)}, "the block 10.5.9.0/24 of client number 2"},
		"an address in a block":    {[]string{record(1, "0.5", block9), record(2, "9.1", "")}, "client number 2 has the addresses of another"},
		"a block over an address":  {[]string{record(1, "9.1", ""), record(2, "0.6", block9)}, "the block 10.5.9.0/24 of client number 2"},
		"a block of its own":       {[]string{record(1, "9.1", block9)}, "the block 10.5.9.0/24 of client number 1"},
		"of other pools":           {[]string{record(1, "0.5", `,"block4":"10.6.9.0/24","block6":"fd05::900/120"`)}, "the block 10.6.9.0/24 of client number 1"},
		"half a block":             {[]string{record(1, "0.5", `,"block4":"10.5.9.0/24"`)}, "the block 10.5.9.0/24 of client number 1"},
		"the other half":           {[]string{record(1, "0.5", `,"block6":"fd05::900/120"`)}, "of client number 1"},
		"halves of two":            {[]string{record(1, "0.5", `,"block4":"10.5.9.0/24","block6":"fd05::a00/120"`)}, "the block 10.5.9.0/24 of client number 1"},
		"larger":                   {[]string{record(1, "0.5", `,"block4":"10.5.8.0/23","block6":"fd05::800/119"`)}, "the block 10.5.8.0/23 of client number 1"},
		"with the gateway's":       {[]string{record(1, "9.1", `,"block4":"10.5.0.0/24","block6":"fd05::/120"`)}, "the block 10.5.0.0/24 of client number 1"},
		"with the broadcast's":     {[]string{record(1, "0.5", `,"block4":"10.5.255.0/24","block6":"fd05::ff00/120"`)}, "the block 10.5.255.0/24 of client number 1"},
		"no prefix":                {[]string{record(1, "0.5", `,"block4":"10.5.9.0"`)}, "is damaged"},
		"something newer":          {[]string{record(1, "0.5", `,"block5":"10.5.9.0/24"`)}, "is damaged"},
		"a block without a client": {[]string{`{` + block9[1:] + `}`}, "client number 1 is not valid"},
	} {
		t.Run(name, func(t *testing.T) {
			write(tc.records...)
			s, err := OpenState(dir)
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), clientsFile) {
					t.Errorf("error %v, want one with %q that names the file", err, tc.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			c := mustJoin(t, s, joinBlock(1, first), start)
			if want := netip.MustParsePrefix("10.5.9.0/24"); c.Block4.IsValid() && strings.Contains(name, "a block") && c.Block4 != want {
				t.Errorf("the block is %v, want %v", c.Block4, want)
			}
		})
	}
}

// FuzzClientsFile opens states with any clients.json: an error, or leases that
// do not overlap.
func FuzzClientsFile(f *testing.F) {
	dir, first := newState(f, InitOptions{Pool4: netip.MustParsePrefix("10.5.0.0/20"), Pool6: netip.MustParsePrefix("fd05::/64")})
	s := reopen(f, dir)
	mustJoin(f, s, join(1, first), start)
	mustJoin(f, s, joinBlock(2, first), start)
	s.Close()
	whole := readAll(f, dir)[clientsFile]
	f.Add(whole)
	f.Add(strings.Replace(whole, "10.5.14.0/24", "10.5.0.0/24", 1))
	f.Add(strings.Replace(whole, `"block6"`, `"block4"`, 1))
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(filepath.Join(dir, clientsFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := OpenState(dir)
		if err != nil {
			if !strings.Contains(err.Error(), clientsFile) {
				t.Errorf("%v does not name the file", err)
			}
			return
		}
		defer s.Close()
		var all []netip.Prefix
		for id := range s.members {
			c, _ := s.Lookup(id)
			all = append(all, netip.PrefixFrom(c.Addr4, 32))
			if c.Block4.IsValid() {
				all = append(all, c.Block4)
			}
		}
		for i, p := range all {
			for _, q := range all[:i] {
				if p.Overlaps(q) {
					t.Errorf("%v and %v overlap", p, q)
				}
			}
		}
	})
}
