package dnsforward

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func addrPorts(list ...string) (all []netip.AddrPort) {
	for _, s := range list {
		all = append(all, netip.MustParseAddrPort(s))
	}
	return all
}

func TestParse(t *testing.T) {
	local := addrPorts("127.0.0.1:53")
	for name, tt := range map[string]struct {
		conf string
		want []netip.AddrPort
	}{
		"empty":    {"", local},
		"comments": {"# nameserver 192.0.2.1\n; nameserver 192.0.2.2\nsearch example.com\noptions edns0\n", local},
		"some":     {"nameserver 192.0.2.1\n  nameserver\t2001:db8::1 # the other\nnameserver fe80::1%eth0\r\nnameserver 127.0.0.53", addrPorts("192.0.2.1:53", "[2001:db8::1]:53", "[fe80::1%eth0]:53", "127.0.0.53:53")},
		"nonsense": {"nameserver\nnameserver example.com\nnameserver 192.0.2.1:53\nnameserver 224.0.0.1\nnameservers 192.0.2.3\nnameserver 192.0.2.2\n", addrPorts("192.0.2.2:53")},
		"none usable is not the same as none named": {"nameserver example.com\n", nil},
	} {
		if diff := cmp.Diff(tt.want, parse(tt.conf), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestServersOfAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	var log strings.Builder
	pool := netip.MustParsePrefix("10.91.0.0/16")
	f, err := New(Config{File: file, Loops: pool.Contains, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	is := func(when string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(addrPorts(want...), f.servers.list(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	is("without the file", "127.0.0.1:53")
	write("nameserver 192.0.2.1\n")
	is("with the file", "192.0.2.1:53")
	is("unchanged", "192.0.2.1:53")
	write("nameserver 192.0.2.2\n")
	is("replaced by one of the same size", "192.0.2.2:53")
	if err := os.WriteFile(file, []byte("nameserver 192.0.2.3\nnameserver 192.0.2.4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	is("changed in place", "192.0.2.3:53", "192.0.2.4:53")
	write("nameserver 10.91.0.7\nnameserver 192.0.2.5\n")
	for range 3 {
		is("with one that is a client", "192.0.2.5:53")
	}
	if n := strings.Count(log.String(), "10.91.0.7"); n != 1 {
		t.Errorf("said %d times:\n%s", n, &log)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	is("removed", "127.0.0.1:53")
	if err := os.Mkdir(file, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		is("unreadable", "127.0.0.1:53")
	}
	if n := strings.Count(log.String(), "cannot be read"); n != 1 {
		t.Errorf("said %d times:\n%s", n, &log)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	write("nameserver 10.91.0.7\n")
	is("with none but a client")
	if r := ask(t, f, "udp", about("a.test.", dns.TypeA)); r.Rcode != dns.RcodeServerFailure {
		t.Errorf("the answer is\n%v", r)
	}
}

func TestNewRefuses(t *testing.T) {
	for server, want := range map[string]string{
		"10.91.0.7:53": "clients have addresses there",
		"0.0.0.0:53":   "not the address of one",
		"224.0.0.1:53": "not the address of one",
		"192.0.2.1:0":  "not the address of one",
	} {
		_, err := New(Config{Servers: addrPorts("192.0.2.1:53", server), Loops: netip.MustParsePrefix("10.91.0.0/16").Contains})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), server) {
			t.Errorf("%s: error %v, want one about %q", server, err, want)
		}
	}
}
