package gateway

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// A world is a gateway's host between the internet and a LAN.
//
//	internet 203.0.113.10 --- eth0 .2 host eth1 .1 --- 198.51.100.10 lan
type world struct {
	t                   *testing.T
	host, internet, lan *netlab.NS
	inet                *netlab.Iface // the host's end to the internet
	dir                 string        // state
	log                 *logBuffer
}

var (
	hostAddr4, hostAddr6 = netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8:3::2")
	inetAddr4, inetAddr6 = netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:3::10")
	lanAddr4, lanAddr6   = netip.MustParseAddr("198.51.100.10"), netip.MustParseAddr("2001:db8:5::10")
)

func newWorld(t *testing.T) *world {
	t.Helper()
	l := netlab.New(t)
	w := &world{t: t, host: l.NS("host"), internet: l.NS("internet"), lan: l.NS("lan"), dir: t.TempDir(), log: new(logBuffer)}
	w.inet, _ = l.Link(w.host, w.internet, netlab.LinkConfig{
		A: netlab.End{Addresses: prefixes("203.0.113.2/24 2001:db8:3::2/64")},
		B: netlab.End{Addresses: prefixes("203.0.113.10/24 2001:db8:3::10/64")},
	})
	l.Link(w.host, w.lan, netlab.LinkConfig{
		A: netlab.End{Name: "eth1", Addresses: prefixes("198.51.100.1/24 2001:db8:5::1/64")},
		B: netlab.End{Addresses: prefixes("198.51.100.10/24 2001:db8:5::10/64")},
	})
	w.host.DefaultRoute(inetAddr4, inetAddr6)
	w.lan.DefaultRoute(netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8:5::1"))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s", w.log)
		}
	})
	return w
}

func (w *world) config() egressConfig {
	return egressConfig{
		iface: "quicvpn-gw", stateDir: w.dir, queues: 2, mtu: 1500,
		pool4: netip.MustParsePrefix("10.91.0.0/16"), pool6: netip.MustParsePrefix("fd12::/64"),
		drops: new(packet.Drops), log: slog.New(slog.NewTextHandler(w.log, nil)),
	}
}

// open opens an egress in the host and keeps it until the test's end.
func (w *world) open(cfg egressConfig) *egress {
	w.t.Helper()
	e, err := w.tryOpen(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var kept sync.WaitGroup
	kept.Go(func() {
		if err := e.keep(ctx); err != nil {
			w.t.Errorf("keep: %v", err)
		}
	})
	w.t.Cleanup(func() {
		cancel()
		kept.Wait()
		if err := e.close(); err != nil {
			w.t.Errorf("close: %v", err)
		}
	})
	return e
}

func (w *world) tryOpen(cfg egressConfig) (e *egress, err error) {
	err = w.host.Do(func() error {
		e, err = openEgress(cfg)
		return err
	})
	return e, err
}

// snapshot returns the state of the host once it no longer changes by itself.
func (w *world) snapshot() (now netlab.Snapshot) {
	w.t.Helper()
	var before netlab.Snapshot
	within(w.t, patience, "a quiet host", func() bool {
		before, now = now, w.host.Snapshot()
		return slices.Equal(before, now) && !strings.Contains(strings.Join(now, "\n"), "tentative")
	})
	return now
}

func (w *world) sysctl(key string) (value string) {
	w.t.Helper()
	if err := w.host.Do(func() (err error) {
		value, err = readSysctl(key)
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	return value
}

// hosts are the kinds of host that the way out is set up on.
var hosts = []struct {
	name    string
	sysctls string // net.… = value, before
	every   bool   // IPv6 by all.forwarding
	want    string // while it runs
	ipv6    bool
}{
	{
		name: "an ordinary host", ipv6: true,
		want: "ipv4/conf/eth0/forwarding=1 ipv4/conf/eth1/forwarding=0 ipv4/ip_forward=0 ipv4/conf/quicvpn-gw/forwarding=1 " +
			"ipv6/conf/all/forwarding=0 ipv6/conf/eth0/force_forwarding=1 ipv6/conf/eth1/force_forwarding=0 " +
			"ipv6/conf/quicvpn-gw/force_forwarding=1 ipv6/conf/eth0/accept_ra=1",
	},
	{
		name: "a kernel before 6.17", every: true, ipv6: true,
		sysctls: "net.ipv6.conf.eth1.forwarding=1 net.ipv6.conf.lo.accept_ra=1",
		want: "ipv4/conf/eth0/forwarding=1 ipv4/ip_forward=0 ipv6/conf/all/forwarding=1 ipv6/conf/eth0/accept_ra=2 " +
			"ipv6/conf/eth0/force_forwarding=0 ipv6/conf/default/accept_ra=2 ipv6/conf/eth1/accept_ra=1",
	},
	{
		name: "a router", ipv6: true,
		sysctls: "net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
		want:    "ipv4/ip_forward=1 ipv6/conf/all/forwarding=1 ipv6/conf/eth0/force_forwarding=0 ipv6/conf/eth0/accept_ra=1",
	},
	{
		name: "strict source checks", ipv6: true,
		sysctls: "net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.default.rp_filter=1",
		want:    "ipv4/conf/eth0/forwarding=1",
	},
	{
		name:    "no IPv6",
		sysctls: "net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1",
		want:    "ipv4/conf/eth0/forwarding=1 ipv6/conf/all/forwarding=0 ipv6/conf/eth0/force_forwarding=0 ipv6/conf/quicvpn-gw/disable_ipv6=1",
	},
}

func (w *world) prepare(sysctls string) {
	for kv := range strings.FieldsSeq(sysctls) {
		key, value, _ := strings.Cut(kv, "=")
		w.host.Sysctl(key, value)
	}
}

func TestEgressLeavesTheHostAsItWas(t *testing.T) {
	for _, tt := range hosts {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.prepare(tt.sysctls)
			before := w.snapshot()
			cfg := w.config()
			cfg.everyForward = tt.every
			e, err := w.tryOpen(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if e.ipv6 != tt.ipv6 {
				t.Errorf("IPv6: %v", e.ipv6)
			}
			if said := strings.Contains(w.log.String(), "IPv6 is off"); said == tt.ipv6 {
				t.Error("the log does not say the truth about IPv6")
			}
			for kv := range strings.FieldsSeq(tt.want) {
				key, value, _ := strings.Cut(kv, "=")
				if got := w.sysctl("net/" + key); got != value {
					t.Errorf("%s is %s, want %s", key, got, value)
				}
			}
			running := strings.Join(w.host.Snapshot(), "\n")
			for _, want := range []string{"10.91.0.0/16 dev quicvpn-gw", "inet 10.91.0.1/32", "table inet quicvpn-gw-quicvpn-gw", "masquerade"} {
				if !strings.Contains(running, want) {
					t.Errorf("lacks %q", want)
				}
			}
			if got := strings.Contains(running, "fd12::/64 dev quicvpn-gw"); got != tt.ipv6 {
				t.Errorf("routes the IPv6 pool: %v", got)
			}
			if strings.Contains(running, "inet6 fe80") && strings.Contains(running, "quicvpn-gw inet6 fe80") {
				t.Error("the device has a link-local address")
			}
			if err := e.close(); err != nil {
				t.Errorf("close: %v", err)
			}
			if err := e.close(); err != nil {
				t.Errorf("close again: %v", err)
			}
			if diff := before.Diff(w.host.Snapshot()); diff != "" {
				t.Errorf("the host is not as it was:\n%s", diff)
			}
			if left, err := filepath.Glob(w.dir + "/*"); err != nil || len(left) > 0 {
				t.Errorf("left in the state directory: %v", left)
			}
		})
	}
}
