package driver

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// newTestNetwork makes a network out of a record, as it is stored.
func newTestNetwork(t *testing.T, r *record) *network {
	t.Helper()
	d := &Driver{cfg: Config{StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}, boot: r.Boot}
	n := d.newNetwork(r)
	t.Cleanup(n.close)
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.save(n.dir); err != nil {
		t.Fatal(err)
	}
	return n
}

// Whoever has IPv6 keeps it where the path carries less than IPv6 needs.
func TestMTU(t *testing.T) {
	v4, v6 := netip.MustParseAddr("172.18.0.2"), netip.MustParseAddr("fd00:1::2")
	for _, tt := range []struct {
		name      string
		path, cap int
		addrs     []netip.Addr
		want      int
		internal  bool
	}{
		{name: "unknown path", addrs: []netip.Addr{v4}, want: 1280},
		{name: "path", path: 1400, addrs: []netip.Addr{v4, v6}, want: 1400},
		{name: "option", path: 1400, cap: 1300, addrs: []netip.Addr{v4, v6}, want: 1300},
		{name: "small path", path: 1233, addrs: []netip.Addr{v4}, want: 1233},
		{name: "small path, IPv6", path: 1233, addrs: []netip.Addr{v4, v6}, want: 1280},
		{name: "internal", internal: true, addrs: []netip.Addr{v4}, want: 1500},
		{name: "internal, option", internal: true, cap: 1300, addrs: []netip.Addr{v4}, want: 1300},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRecord(t)
			r.MTU, r.Internal, r.Exits[0].MTU = tt.cap, tt.internal, tt.path
			n := newTestNetwork(t, r)
			n.mu.Lock()
			defer n.mu.Unlock()
			if got := n.mtuLocked(&endpointRecord{Exit: mainExit, Addrs: tt.addrs}); got != tt.want {
				t.Errorf("%d, want %d", got, tt.want)
			}
		})
	}
}

// An endpoint that is never joined, because the engine was killed, does not keep
// its place.
func TestNeverJoined(t *testing.T) {
	r := newRecord(t)
	r.Endpoints[0].Sandbox = ""
	n := newTestNetwork(t, r)
	check := func(want int) {
		t.Helper()
		if err := netlab.New(t).NS("host").Do(func() error { n.check(); return nil }); err != nil {
			t.Fatal(err)
		}
		stored, err := loadRecord(n.dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(n.record.Endpoints) != want || len(stored.Endpoints) != want {
			t.Errorf("%d endpoints, %d stored, want %d", len(n.record.Endpoints), len(stored.Endpoints), want)
		}
	}
	check(1)
	n.mu.Lock()
	for id, since := range n.idle {
		n.idle[id] = since.Add(-startGrace / 2)
	}
	n.mu.Unlock()
	check(1)
	n.mu.Lock()
	n.idle["e1"] = time.Now().Add(-startGrace)
	n.mu.Unlock()
	check(0)
}

// Only a namespace that is not there is gone: descriptors, for one, may run out.
func TestSandboxGone(t *testing.T) {
	for sandbox, want := range map[string]int{"/proc/self/ns/net": 1, "/dev/null/no-directory": 1, "/nowhere": 0} {
		r := newRecord(t)
		r.Endpoints[0].Sandbox = sandbox
		n := newTestNetwork(t, r)
		n.mu.Lock()
		n.joined["e1"] = &endpoint{record: r.Endpoints[0], mtu: n.mtuLocked(r.Endpoints[0]), moved: true}
		n.mu.Unlock()
		if err := netlab.New(t).NS("host").Do(func() error { n.check(); return nil }); err != nil {
			t.Fatal(err)
		}
		if got := len(n.record.Endpoints); got != want || len(n.joined) != want {
			t.Errorf("%s: %d endpoints, %d joined, want %d", sandbox, got, len(n.joined), want)
		}
	}
}

// A gateway whose key cannot be stored is not there the next time.
func TestExitWithoutKey(t *testing.T) {
	n := newTestNetwork(t, newRecord(t))
	o := exitOptions{}
	if err := o.setToken(newToken(t)); err != nil {
		t.Fatal(err)
	}
	dir := n.dir
	n.dir = filepath.Join(dir, recordFile) // is no directory
	n.mu.Lock()
	defer n.mu.Unlock()
	if x, err := n.exitLocked(o); err == nil || len(n.record.Exits) != 1 || len(n.exits) != 0 {
		t.Errorf("%v, %v: %d exits stored, %d in use", x, err, len(n.record.Exits), len(n.exits))
	}
}
