package sidecar

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestStopLeavesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	before := l.snapshot()
	cmd := l.start(childSettings{})
	l.ping(toyRemote4, toyRemote6, toyPeer4, toyPeer6)
	l.stop(cmd)
	if diff := cmp.Diff(before, l.snapshot()); diff != "" {
		t.Errorf("the namespace is not as it was:\n%s", diff)
	}
	for _, want := range []string{"interface=quicvpn0", "kill_switch=on", "10.88.0.5", "fd88::5", "mtu=1400", "queues=", "offloads="} {
		if !strings.Contains(cmd.Log(), want) {
			t.Errorf("the log lacks %q:\n%s", want, cmd.Log())
		}
	}
}

// TestFailedStartLeavesNothing has each step fail for the reason for which it
// fails in the field.
func TestFailedStartLeavesNothing(t *testing.T) {
	t.Parallel()
	noAdmin := []string{"setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"}
	occupy := func(l *lab) {
		l.sh("ip", "link", "add", "quicvpn0", "type", "veth", "peer", "name", "other")
	}
	tests := []struct {
		name    string
		prepare func(l *lab)
		c       childSettings
		wrapper []string
		want    []string
	}{
		{"no NET_ADMIN", nil, childSettings{}, noAdmin, []string{"NET_ADMIN", "--cap-add"}},
		{"no NET_ADMIN, kill switch off", nil, childSettings{KillSwitch: KillSwitchOff}, noAdmin, []string{"NET_ADMIN", "--cap-add"}},
		{"no nftables", nil, childSettings{NoNftables: true}, nil, []string{"lacks nftables", "modprobe"}},
		{"no policy routing", nil, childSettings{NoPolicyRouting: true}, nil, []string{"add routing rule", "no policy routing", "CONFIG_IP_MULTIPLE_TABLES"}},
		{"no TUN device", func(l *lab) { l.Client.Hide("/dev/net") }, childSettings{}, nil, []string{"/dev/net/tun", "--device"}},
		{"interface in use", occupy, childSettings{}, nil, []string{"quicvpn0", "veth", "another name"}},
		{"interface in use, to be kept", occupy, childSettings{KillSwitch: KillSwitchKeep}, nil, []string{"quicvpn0", "another name"}},
		{"persistent TUN device of another program", func(l *lab) {
			l.sh("ip", "tuntap", "add", "quicvpn0", "mode", "tun")
		}, childSettings{}, nil, []string{"quicvpn0", "another name"}},
		{"MTU of 1000", nil, childSettings{MTU: 1000}, nil, []string{"MTU", "1280 to 1500"}},
		{"state directory that cannot be written", nil, childSettings{StateDir: "/proc/nothing"}, nil, []string{"create key"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t)
			if tt.prepare != nil {
				tt.prepare(l)
			}
			before := l.snapshot()
			cmd := l.command(tt.c, tt.wrapper...)
			err := cmd.Run()
			if err == nil {
				t.Fatal("it started and stopped")
			}
			_, said, ok := strings.Cut(cmd.Log(), "FAILED: ")
			if !ok {
				t.Fatalf("it did not fail in order: %v\n%s", err, cmd.Log())
			}
			for _, want := range tt.want {
				if !strings.Contains(said, want) {
					t.Errorf("the error lacks %q: %s", want, said)
				}
			}
			if diff := cmp.Diff(before, l.snapshot()); diff != "" {
				t.Errorf("the namespace is not as it was:\n%s", diff)
			}
		})
	}
}

func TestSecondSidecarIsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	first := l.start(childSettings{})
	running := l.snapshot()
	second := l.command(childSettings{Interface: "other0", StateDir: t.TempDir()})
	if err := second.Run(); err == nil {
		t.Fatal("a second sidecar ran")
	}
	if !strings.Contains(second.Log(), "another quicvpn sidecar runs in this network namespace") {
		t.Errorf("it said: %s", second.Log())
	}
	if diff := cmp.Diff(running, l.snapshot()); diff != "" {
		t.Errorf("it changed the first one's namespace:\n%s", diff)
	}
	l.ping(toyRemote4)
	l.stop(first)
}

// TestStartAfterSIGKILL: nothing is there twice, nothing is in the way, and a
// stop cleans up what the killed one left too.
func TestStartAfterSIGKILL(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	before := l.snapshot()
	cmd := l.start(childSettings{})
	l.ping(toyRemote4)
	running := l.snapshot()
	for range 3 {
		cmd.Kill()
		if left := strings.Join(l.snapshot(), "\n"); !strings.Contains(left, killSwitchTable) {
			t.Fatal("the kill switch went with the process")
		}
		cmd = l.start(childSettings{})
		l.ping(toyRemote4, toyRemote6)
		// The device has another index, and with it nothing else differs.
		if diff := cmp.Diff(running, l.snapshot()); diff != "" {
			t.Errorf("not as at the first start:\n%s", diff)
		}
	}
	l.stop(cmd)
	if diff := cmp.Diff(before, l.snapshot()); diff != "" {
		t.Errorf("the namespace is not as it was:\n%s", diff)
	}
}

// TestFailedStartAfterSIGKILL: the kill switch of the killed one must not be
// lifted by a start that fails.
func TestFailedStartAfterSIGKILL(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.start(childSettings{}).Kill()
	l.Client.Hide("/dev/net")
	cmd := l.command(childSettings{})
	if err := cmd.Run(); err == nil {
		t.Fatal("it started without /dev/net/tun")
	}
	if left := strings.Join(l.snapshot(), "\n"); !strings.Contains(left, killSwitchTable) {
		t.Error("the failed start lifted the kill switch")
	}
	if !strings.Contains(cmd.Log(), "nft delete table inet "+killSwitchTable) {
		t.Errorf("it does not say how to remove it: %s", cmd.Log())
	}
}

func TestKillSwitchModes(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	before := l.snapshot()
	stands := func() bool { return strings.Contains(strings.Join(l.snapshot(), "\n"), killSwitchTable) }

	cmd := l.start(childSettings{KillSwitch: KillSwitchKeep})
	l.ping(toyRemote4)
	l.stop(cmd)
	if !stands() {
		t.Error("keep: it went with a graceful stop")
	}
	if rtts, err := l.Client.Ping(l.ctx, netlab.Ping{To: netlab.ServerAddr4, Wait: 100 * time.Millisecond}); len(rtts) > 0 {
		t.Errorf("keep: the internet answers after the stop (%v)", err)
	}

	cmd = l.start(childSettings{KillSwitch: KillSwitchOff})
	if stands() {
		t.Error("off: that of an earlier run stands")
	}
	l.ping(toyRemote4, toyRemote6)
	l.gw.inject(toyPacket, advertisement())
	l.ping(toyRemote6)
	if routes := l.sh("ip", "-6", "route"); strings.Contains(routes, "2001:db8:1::/64 dev quicvpn0") {
		t.Errorf("off: the gateway's router advertisement was taken:\n%s", routes)
	}
	if !strings.Contains(cmd.Log(), "kill switch is off") {
		t.Error("off: not said")
	}
	l.stop(cmd)
	if diff := cmp.Diff(before, l.snapshot()); diff != "" {
		t.Errorf("the namespace is not as it was:\n%s", diff)
	}
}

func TestIPv6(t *testing.T) {
	t.Parallel()
	t.Run("off by sysctl", func(t *testing.T) {
		l := newLab(t)
		l.Client.Sysctl("net.ipv6.conf.all.disable_ipv6", "1")
		l.Client.Sysctl("net.ipv6.conf.default.disable_ipv6", "1")
		before := l.snapshot()
		cmd := l.start(childSettings{})
		l.ping(toyRemote4)
		if !strings.Contains(cmd.Log(), "disable_ipv6 is 1") {
			t.Errorf("not said:\n%s", cmd.Log())
		}
		l.stop(cmd)
		if diff := cmp.Diff(before, l.snapshot()); diff != "" {
			t.Errorf("the namespace is not as it was:\n%s", diff)
		}
	})
	t.Run("not granted", func(t *testing.T) {
		l := newLab(t)
		l.gw.set(func() {
			l.gw.grant.Grant.Addresses = []netip.Addr{toyOwn4}
			l.gw.grant.Grant.Routes = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
		})
		cmd := l.start(childSettings{})
		l.ping(toyRemote4)
		l.unreachable6()
		if !strings.Contains(cmd.Log(), "these destinations only") || !strings.Contains(cmd.Log(), "[203.0.113.0/24]") {
			t.Errorf("the routes are not said:\n%s", cmd.Log())
		}
		if !strings.Contains(cmd.Log(), "granted no IPv6 address") {
			t.Errorf("not said:\n%s", cmd.Log())
		}
		l.stop(cmd)
	})
	t.Run("path too narrow, and wide again", func(t *testing.T) {
		l := newLab(t)
		cmd := l.start(childSettings{})
		l.ping(toyRemote4, toyRemote6)
		running := l.snapshot()
		l.gw.inject(toyMTU, []byte{1200 >> 8, 1200 & 0xff})
		if err := cmd.WaitLog(l.ctx, "the path carries packets of 1200 bytes, and IPv6 needs 1280"); err != nil {
			t.Error(err)
		}
		l.ping(toyRemote4)
		l.unreachable6()
		l.gw.inject(toyMTU, []byte{1400 >> 8, 1400 & 0xff})
		if err := cmd.WaitLog(l.ctx, "IPv6 goes through the tunnel"); err != nil {
			t.Error(err)
		}
		l.ping(toyRemote4, toyRemote6)
		if diff := cmp.Diff(running, l.snapshot()); diff != "" {
			t.Errorf("not as before:\n%s", diff)
		}
		l.stop(cmd)
	})
}

// unreachable6 checks that IPv6 fails at once.
func (l *lab) unreachable6() {
	l.t.Helper()
	l.eventually(func() error {
		start := time.Now()
		_, err := l.Client.Ping(l.ctx, netlab.Ping{To: toyRemote6, Wait: 10 * time.Millisecond})
		if err == nil {
			return errors.New("an IPv6 packet could be sent")
		}
		if took := time.Since(start); took > time.Second {
			return fmt.Errorf("it took %v to fail", took)
		}
		return nil
	})
}

// TestReversePathFilter: neither the strict filter nor a read-only /proc/sys,
// as containers have it, is in the way.
func TestReversePathFilter(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, name := range []string{"all", "default", "eth0"} {
		l.Client.Sysctl("net.ipv4.conf."+name+".rp_filter", "1")
	}
	l.sh("mount", "-o", "bind", "/proc/sys", "/proc/sys")
	l.sh("mount", "-o", "remount,bind,ro", "/proc/sys")
	cmd := l.start(childSettings{})
	l.ping(toyRemote4, toyRemote6)
	l.stop(cmd)
}

func TestMTUIsCapped(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{MTU: 1300})
	link := l.link("quicvpn0")
	if got := link.Attrs().MTU; got != 1300 {
		t.Errorf("MTU %d, want 1300", got)
	}
	l.stop(cmd)
}

func (l *lab) link(name string) netlink.Link {
	l.t.Helper()
	link, err := l.Client.Netlink().LinkByName(name)
	if err != nil {
		l.t.Fatal(err)
	}
	return link
}

// TestReconnects: a gateway that falls silent, one that ends the session, one
// that gives other addresses, and a process that is stopped for a while.
func TestReconnects(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{})
	l.ping(toyRemote4)
	joins := func() (n int) { l.gw.set(func() { n = l.gw.joins }); return n }

	n := joins()
	l.gw.inject(toyEnd, nil)
	l.eventually(func() error {
		if joins() == n {
			return errors.New("no new session after the end")
		}
		return nil
	})
	l.ping(toyRemote4)

	l.gw.set(func() { l.gw.dead = true })
	if err := cmd.WaitLog(l.ctx, "does not answer"); err != nil {
		t.Fatal(err)
	}
	l.gw.set(func() {
		l.gw.dead = false
		l.gw.grant.Grant.Addresses = []netip.Addr{netip.MustParseAddr("10.88.0.6"), netip.MustParseAddr("fd88::6")}
	})
	l.gw.inject(toyEnd, nil)
	if err := cmd.WaitLog(l.ctx, "10.88.0.6"); err != nil {
		t.Fatal(err)
	}
	l.ping(toyRemote4, toyRemote6)
	if text := l.sh("ip", "addr", "show", "quicvpn0"); strings.Contains(text, "10.88.0.5") || strings.Contains(text, "fd88::5") {
		t.Errorf("the old addresses are still there:\n%s", text)
	}

	l.sh("kill", "-STOP", fmt.Sprint(cmd.Process.Pid))
	time.Sleep(2 * time.Second)
	l.sh("kill", "-CONT", fmt.Sprint(cmd.Process.Pid))
	l.ping(toyRemote4, toyRemote6)
	l.stop(cmd)
}

// TestFollowsTheGatewaysName: by /etc/hosts, which is read at each attempt.
func TestFollowsTheGatewaysName(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	hosts := filepath.Join(t.TempDir(), "hosts")
	write := func(a netip.Addr) {
		if err := os.WriteFile(hosts, []byte(a.String()+" gateway.example\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(netip.MustParseAddr("198.51.100.77"))
	l.sh("mount", "--bind", hosts, "/etc/hosts")
	cmd := l.command(childSettings{Address: fmt.Sprintf("gateway.example:%d", toyPort)})
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.WaitLog(l.ctx, "the namespace is set up"); err != nil {
		t.Fatal(err)
	}
	l.eventually(func() error {
		if !strings.Contains(l.sh("nft", "list", "ruleset"), "198.51.100.77") {
			return errors.New("the first address is not dialled")
		}
		return nil
	})
	write(netlab.GatewayAddr6)
	if err := cmd.WaitLog(l.ctx, "msg=connected"); err != nil {
		t.Fatal(err)
	}
	l.ping(toyRemote4)
	l.stop(cmd)
}
