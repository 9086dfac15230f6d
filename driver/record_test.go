package driver

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/quicvpn/quicvpn/driver/publish"
)

func newRecord(t *testing.T) *record {
	t.Helper()
	return &record{
		Version: recordVersion, ID: "0123456789ab", Boot: "a boot",
		Subnets:  []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16"), netip.MustParsePrefix("fd00:1::/64")},
		Gateways: []netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:1::1")},
		MTU:      1400, Queues: 2,
		Exits: []*exitRecord{{
			Name: mainExit, Token: newToken(t),
			Block: []netip.Prefix{netip.MustParsePrefix("10.91.255.0/24"), netip.MustParsePrefix("fd00:2::ff00/120")},
		}},
		Endpoints: []*endpointRecord{{
			ID: "e1", Exit: mainExit, Addrs: []netip.Addr{netip.MustParseAddr("172.18.0.2")}, Number: 3, Sandbox: "/run/docker/netns/1",
			Ports: []publish.Port{{Protocol: "tcp", HostPort: 8080, ContainerPort: 80}},
		}},
	}
}

func recordDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "0123456789ab")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestRecord(t *testing.T) {
	dir, want := recordDir(t), newRecord(t)
	if err := want.save(dir); err != nil {
		t.Fatal(err)
	}
	got, err := loadRecord(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Error(diff)
	}
	info, err := os.Stat(filepath.Join(dir, recordFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v: it holds a token", info.Mode(), err)
	}
}

// A record that ends anywhere before its end is an error that names the file,
// and neither half a network nor a new one.
func TestRecordCut(t *testing.T) {
	dir, r := recordDir(t), newRecord(t)
	if err := r.save(dir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, recordFile)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(whole) - 1 { // without the last line's end it is whole
		if err := os.WriteFile(path, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := loadRecord(dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) {
			t.Fatalf("cut after %d bytes of %d: error %v, want one that names %s", n, len(whole), err, path)
		}
		if strings.Contains(err.Error(), r.Exits[0].Token) {
			t.Fatalf("the error %q shows the token", err)
		}
	}
}

// A write that is cut off leaves the old record in place.
func TestRecordLeftover(t *testing.T) {
	dir, r := recordDir(t), newRecord(t)
	if err := r.save(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, recordFile+".tmp"), []byte(`{"Version"`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadRecord(dir); err != nil {
		t.Error(err)
	}
}

func TestRecordRefused(t *testing.T) {
	tests := []struct {
		name   string
		break_ func(*record)
		want   string
	}{
		{"version", func(r *record) { r.Version++ }, "install the release that wrote it"},
		{"another network's", func(r *record) { r.ID = "ba9876543210" }, "it is of network"},
		{"no exit", func(r *record) { r.Exits = nil }, "names no gateway"},
		{"exit of an internal one", func(r *record) { r.Internal = true }, "names no gateway"},
		{"token", func(r *record) { r.Exits[0].Token = "qv1_" }, "token"},
		{"path as a name", func(r *record) { r.Exits[0].Name = "../x"; r.Endpoints = nil }, "exit name"},
		{"block", func(r *record) { r.Exits[0].Block[0] = netip.MustParsePrefix("10.0.0.0/8") }, "no block"},
		{"endpoint without exit", func(r *record) { r.Endpoints[0].Exit = "other" }, "no gateway"},
		{"endpoint ID", func(r *record) { r.Endpoints[0].ID = "../../x" }, "endpoint ID"},
		{"number", func(r *record) { r.Endpoints[0].Number = 256 }, "the number 256"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir, r := recordDir(t), newRecord(t)
			tt.break_(r)
			if err := r.save(dir); err != nil {
				t.Fatal(err)
			}
			if _, err := loadRecord(dir); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestFreeNumber(t *testing.T) {
	r, last := newRecord(t), 0
	r.Endpoints = nil
	seen := make(map[int]bool)
	for range blockSize - 2 {
		n, err := r.freeNumber(mainExit, last)
		if err != nil {
			t.Fatal(err)
		}
		if n < 1 || n > 254 || seen[n] {
			t.Fatalf("number %d after %d others", n, len(seen))
		}
		seen[n], last = true, n
		r.Endpoints = append(r.Endpoints, &endpointRecord{ID: "e", Exit: mainExit, Number: n})
	}
	if _, err := r.freeNumber(mainExit, last); err == nil || !strings.Contains(err.Error(), "create another network") {
		t.Errorf("with all numbers given: %v", err)
	}
	if n, err := r.freeNumber("other", last); err != nil || n != 1 {
		t.Errorf("of another exit: %d, %v", n, err)
	}
	// One that was freed comes again after all others.
	r.Endpoints = r.Endpoints[1:]
	if n, err := r.freeNumber(mainExit, 7); err != nil || n != 1 {
		t.Errorf("the freed one: %d, %v", n, err)
	}
}

func TestNth(t *testing.T) {
	r := newRecord(t)
	got := r.Exits[0].addrs(3)
	want := []netip.Addr{netip.MustParseAddr("10.91.255.3"), netip.MustParseAddr("fd00:2::ff03")}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Error(diff)
	}
}

func FuzzLoadRecord(f *testing.F) {
	f.Add([]byte(`{"Version":1,"ID":"x","Internal":true}`))
	f.Add([]byte(`{"Version":1,"ID":"x","Exits":[null],"Endpoints":[null]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := filepath.Join(t.TempDir(), "x")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, recordFile), b, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := loadRecord(dir)
		if err != nil {
			return
		}
		for _, e := range r.Endpoints { // as the driver would
			if x := r.exit(e.Exit); x != nil {
				x.addrs(e.Number)
			}
		}
	})
}
