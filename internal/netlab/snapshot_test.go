package netlab

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestSnapshotShowsEveryChange(t *testing.T) {
	l := New(t)
	n := l.NS("one")
	l.Link(n, l.NS("other"), LinkConfig{A: End{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}}})
	before := n.Snapshot()
	if diff := before.Diff(n.Snapshot()); diff != "" {
		t.Errorf("nothing changed, but:\n%s", diff)
	}
	ip := func(args string) {
		t.Helper()
		n.read("ip", strings.Fields(args)...)
	}
	for _, tt := range []struct {
		name     string
		do, undo func()
	}{
		{"link", func() { ip("link add d0 type veth") }, func() { ip("link del d0") }},
		{"address", func() { ip("addr add 192.0.2.9/24 dev eth0") }, func() { ip("addr del 192.0.2.9/24 dev eth0") }},
		{"address 6", func() { ip("addr add 2001:db8::9/64 dev eth0 nodad") }, func() { ip("addr del 2001:db8::9/64 dev eth0") }},
		{"route in a table", func() { ip("route add default via 192.0.2.2 table 77") }, func() { ip("route del default table 77") }},
		{"rule", func() { ip("rule add fwmark 7 lookup 77") }, func() { ip("rule del fwmark 7 lookup 77") }},
		{"rule 6", func() { ip("-6 rule add fwmark 7 lookup 77") }, func() { ip("-6 rule del fwmark 7 lookup 77") }},
		{"nftables", func() { n.Nft("table inet x { chain y { accept; }; }") }, func() { n.Nft("delete table inet x") }},
		{"empty table", func() { n.Nft("table ip6 x") }, func() { n.Nft("delete table ip6 x") }},
		{"sysctl", func() { n.Sysctl("net.ipv4.ip_forward", "1") }, func() { n.Sysctl("net.ipv4.ip_forward", "0") }},
		{"sysctl of a link", func() { n.Sysctl("net.ipv6.conf.eth0.forwarding", "1") }, func() { n.Sysctl("net.ipv6.conf.eth0.forwarding", "0") }},
	} {
		tt.do()
		if before.Diff(n.Snapshot()) == "" {
			t.Errorf("%s: no difference", tt.name)
		}
		tt.undo()
		if diff := before.Diff(n.Snapshot()); diff != "" {
			t.Errorf("%s: undone, but:\n%s", tt.name, diff)
		}
	}
}

func TestDescriptors(t *testing.T) {
	before, err := Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	after, err := Descriptors(os.Getpid())
	if err != nil || len(after) != len(before)+1 || !slices.Contains(after, path) {
		t.Errorf("descriptors %v (%v), want those before and %s", after, err, path)
	}
	if _, err := Descriptors(1 << 30); err == nil {
		t.Error("no error for a process that is not there")
	}
}
