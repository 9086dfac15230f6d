package tun

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// Kernels of all ages, and what is left on each.
func TestOfferDegrades(t *testing.T) {
	for _, c := range []struct {
		name   string
		cfg    Config
		kernel int // what it accepts
		want   string
	}{
		{"all", Config{}, ^0, "read checksum+tso+uso, write none"},
		{"without USO", Config{}, ^offloadUSO, "read checksum+tso, write none (the kernel lacks uso, 6.2 has it)"},
		{"without ECN", Config{}, ^(offloadUSO | unix.TUN_F_TSO_ECN), "read checksum+tso, write none (the kernel lacks uso, 6.2 has it)"},
		{"without TSO", Config{}, unix.TUN_F_CSUM, "read checksum, write none (the kernel lacks tso; the kernel lacks uso, 6.2 has it)"},
		{"nothing", Config{}, 0, "read none, write none (the kernel lacks checksum offload; the kernel lacks tso; the kernel lacks uso, 6.2 has it)"},
		{"TSO off", Config{DisableTSO: true}, ^0, "read checksum+uso, write none (tso turned off)"},
		{"USO off", Config{DisableUSO: true}, ^offloadUSO, "read checksum+tso, write none (uso turned off)"},
		{"both off", Config{DisableTSO: true, DisableUSO: true}, unix.TUN_F_CSUM, "read checksum, write none (tso turned off; uso turned off)"},
	} {
		tried := map[int]int{}
		o, err := offer(c.cfg, func(flags int) error {
			tried[flags]++
			if flags&^c.kernel != 0 {
				return unix.EINVAL
			}
			return nil
		})
		if err != nil || o.String() != c.want {
			t.Errorf("%s: %q, %v; want %q", c.name, o, err, c.want)
		}
		for flags, n := range tried {
			if n > 1 {
				t.Errorf("%s: %x tried %d times", c.name, flags, n)
			}
		}
	}
	if _, err := offer(Config{}, func(int) error { return unix.EBADFD }); !errors.Is(err, unix.EBADFD) {
		t.Errorf("another error: %v", err)
	}
	if _, err := offer(Config{}, func(int) error { return unix.EINVAL }); !errors.Is(err, unix.EINVAL) {
		t.Errorf("refuses even nothing: %v", err)
	}
}

func TestProbeDegrades(t *testing.T) {
	for _, c := range []struct {
		name     string
		cfg      Config
		tcp, udp error
		want     string
	}{
		{"up", Config{}, nil, nil, "read none, write tso+uso"},
		{"down", Config{}, unix.EIO, unix.EIO, "read none, write tso+uso"},
		{"6.6.44", Config{}, unix.EINVAL, unix.EIO, "read none, write uso (the kernel refuses to take tso: invalid argument)"},
		{"neither", Config{}, unix.EINVAL, unix.EINVAL, "read none, write none (the kernel refuses to take tso: invalid argument; the kernel refuses to take uso: invalid argument)"},
		{"off", Config{DisableTSO: true, DisableUSO: true}, nil, nil, "read none, write none"},
	} {
		var o Offloads
		o.probe(c.cfg, func(b []byte) error {
			if b[vnetLen+9] == unix.IPPROTO_TCP {
				return c.tcp
			}
			return c.udp
		})
		if o.String() != c.want {
			t.Errorf("%s: %q, want %q", c.name, o, c.want)
		}
	}
}

// The kernel under test has all of it, and nothing of a probe gets anywhere: a
// device that is up, in a namespace that forwards all it gets.
func TestProbeDoesNotLeak(t *testing.T) {
	lab := netlab.New(t)
	ns, far := lab.NS("router"), lab.NS("far")
	out, _ := lab.Link(ns, far, netlab.LinkConfig{
		A: netlab.End{Name: "out0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}},
		B: netlab.End{Name: "in0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24")}},
	})
	ns.Forward()
	ns.DefaultRoute(netip.MustParseAddr("192.0.2.2"))
	ns.Sysctl("net.ipv4.conf.all.log_martians", "0")
	d := open(t, ns, Config{Name: "keep0", Persist: true})
	if err := d.SetUp(); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	watch := out.Capture()
	before := counter(t, ns, "snmp", "Ip", "InReceives")
	wrong := counter(t, ns, "netstat", "IpExt", "InCsumErrors")
	d = open(t, ns, Config{Name: "keep0"})
	if got := d.Offloads().String(); got != "read checksum+tso+uso, write tso+uso" {
		t.Errorf("offloads: %s", got)
	}
	if n := counter(t, ns, "netstat", "IpExt", "InCsumErrors") - wrong; n != 2 {
		t.Errorf("%d packets dropped for their checksum, want the 2 probes", n)
	}
	if n := counter(t, ns, "snmp", "Ip", "InReceives") - before; n != 2 {
		t.Errorf("%d packets received, want the 2 probes", n)
	}
	for _, c := range []string{"ForwDatagrams", "InDelivers", "OutRequests"} {
		if n := counter(t, ns, "snmp", "Ip", c); n != 0 {
			t.Errorf("%s: %d", c, n)
		}
	}
	if traffic := watch.Traffic(); traffic.Clear != 0 {
		t.Errorf("seen outside: %+v", traffic)
	}
}

// counter reads one of /proc/net/snmp's or /proc/net/netstat's numbers.
func counter(t *testing.T, ns *netlab.NS, file, group, name string) int {
	t.Helper()
	n := -1
	err := ns.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if f[0] != group+":" {
				continue
			}
			if names == nil {
				names = f
				continue
			}
			if i := slices.Index(names, name); i > 0 {
				n, err = strconv.Atoi(f[i])
				return err
			}
		}
		return errors.New("there is no " + group + " " + name)
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}
