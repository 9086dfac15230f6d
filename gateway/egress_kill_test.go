package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// A childConfig is what an egressChild opens.
type childConfig struct {
	Iface, StateDir string
	Every           bool
}

// egressChild is a process that opens an egress and waits to be killed.
func egressChild(args string) error {
	var c childConfig
	if err := json.Unmarshal([]byte(args), &c); err != nil {
		return err
	}
	_, err := openEgress(egressConfig{
		iface: c.Iface, stateDir: c.StateDir, queues: 2, mtu: 1500, everyForward: c.Every,
		pool4: netip.MustParsePrefix("10.91.0.0/16"), pool6: netip.MustParsePrefix("fd12::/64"),
		drops: new(packet.Drops), log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	fmt.Println("open")
	select {}
}

// child prepares an egressChild on the host; before are the words in front of
// its command.
func (w *world) child(c childConfig, before ...string) *netlab.Cmd {
	w.t.Helper()
	args, err := json.Marshal(c)
	if err != nil {
		w.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	words := append(before, self)
	cmd := w.host.Command(w.t.Context(), words[0], words[1:]...)
	cmd.Env = append(os.Environ(), childEnv+"=egress "+string(args))
	return cmd
}

// kill opens an egress in a process of its own and kills that.
func (w *world) kill(iface string, every bool) {
	w.t.Helper()
	child := w.child(childConfig{Iface: iface, StateDir: w.dir, Every: every})
	if err := child.Start(); err != nil {
		w.t.Fatal(err)
	}
	if err := child.WaitLog(w.t.Context(), "open"); err != nil {
		w.t.Fatal(err)
	}
	child.Kill()
}

func TestEgressAfterKill(t *testing.T) {
	for _, tt := range hosts {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.prepare(tt.sysctls)
			before := w.snapshot()
			w.kill("quicvpn-gw", tt.every)
			killed := strings.Join(w.host.Snapshot(), "\n")
			if !strings.Contains(killed, "table inet quicvpn-gw-quicvpn-gw") {
				t.Error("a killed gateway's firewall is not there")
			}
			if strings.Contains(killed, "dev quicvpn-gw") {
				t.Error("a killed gateway's device or routes are there")
			}
			w.kill("another-name", tt.every) // starts where another was killed
			cfg := w.config()
			cfg.everyForward = tt.every
			e, err := w.tryOpen(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(strings.Join(w.host.Snapshot(), "\n"), "masquerade"); n != 1 && n != 2 {
				t.Errorf("%d rules that masquerade", n)
			}
			if err := e.close(); err != nil {
				t.Errorf("close: %v", err)
			}
			if diff := before.Diff(w.host.Snapshot()); diff != "" {
				t.Errorf("the host is not as it was:\n%s", diff)
			}
		})
	}
}

// A start that fails also takes away what one that was killed has left.
func TestEgressFailsClean(t *testing.T) {
	tests := []struct {
		name   string
		break_ func(w *world)
		cmd    []string // in front of the child's
		want   []string // in the error
		lines  int      // of it; zero means one
	}{
		{
			name:   "pool in use by an address",
			break_: func(w *world) { w.inet.Address(netip.MustParsePrefix("10.91.3.1/24")) },
			want:   []string{"10.91.0.0/16", "10.91.3.1/24", "eth0", "another"},
		},
		{
			name:   "pool in use by a route",
			break_: func(w *world) { w.host.Route(netip.MustParsePrefix("fd12::/56"), inetAddr6) },
			want:   []string{"fd12::/64", "fd12::/56", "eth0", "another"},
		},
		{
			name:   "no /dev/net/tun",
			break_: func(w *world) { w.host.Hide("/dev/net") },
			want:   []string{"/dev/net/tun", "--device"},
		},
		{
			name: "no NET_ADMIN",
			cmd:  []string{"setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"},
			want: []string{"NET_ADMIN"},
		},
		{
			name: "sysctls read-only",
			cmd:  []string{"sh", "-c", `mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0"`},
			want: []string{"net.ipv4.conf.eth0.forwarding=1", "read-only", "--sysctl net.ipv4.ip_forward=1",
				"net.ipv6.conf.all.forwarding=1"},
			lines: 2,
		},
		{
			name:   "sysctls read-only, IPv4 as wanted",
			break_: func(w *world) { w.host.Sysctl("net.ipv4.ip_forward", "1") },
			cmd:    []string{"sh", "-c", `mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0"`},
			want:   []string{"set sysctl net.ipv6.conf.all.forwarding=1", "read-only", "--sysctl net.ipv6.conf.all.forwarding=1"},
		},
		{
			name: "a name in use",
			break_: func(w *world) {
				if out, err := w.host.Command(w.t.Context(), "ip", "link", "add", "quicvpn-gw", "type", "bridge").CombinedOutput(); err != nil {
					w.t.Fatalf("%v: %s", err, out)
				}
			},
			want: []string{"quicvpn-gw", "in use", "another name"},
		},
		{
			name: "a damaged journal",
			break_: func(w *world) {
				if err := os.WriteFile(filepath.Join(w.dir, "host.json"), []byte("{"), 0o600); err != nil {
					w.t.Fatal(err)
				}
			},
			want: []string{"host.json", "damaged", "remove"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			if tt.break_ != nil {
				tt.break_(w)
			}
			before := w.snapshot()
			child := w.child(childConfig{Iface: "quicvpn-gw", StateDir: w.dir}, tt.cmd...)
			out, err := child.CombinedOutput()
			if err == nil {
				t.Fatal("it started")
			}
			if n := bytes.Count(out, []byte("\n")); n != max(tt.lines, 1) {
				t.Errorf("says it in %d lines:\n%s", n, out)
			}
			for _, want := range tt.want {
				if !strings.Contains(string(out), want) {
					t.Errorf("says %q, want something about %q", out, want)
				}
			}
			if diff := before.Diff(w.host.Snapshot()); diff != "" {
				t.Errorf("the host is not as it was:\n%s", diff)
			}
		})
	}
}

// A start that fails after one that was killed leaves nothing of either.
func TestEgressFailsCleanAfterKill(t *testing.T) {
	w := newWorld(t)
	before := w.snapshot()
	w.kill("quicvpn-gw", false)
	w.inet.Address(netip.MustParsePrefix("10.91.3.1/24"))
	if _, err := w.tryOpen(w.config()); err == nil || !strings.Contains(err.Error(), "10.91.3.1/24") {
		t.Fatalf("error: %v", err)
	}
	if out, err := w.host.Command(t.Context(), "ip", "addr", "del", "10.91.3.1/24", "dev", "eth0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if diff := before.Diff(w.host.Snapshot()); diff != "" {
		t.Errorf("the host is not as it was:\n%s", diff)
	}
}

// With everything as wanted, a container whose /proc/sys is read-only is enough.
func TestEgressWithReadOnlySysctls(t *testing.T) {
	w := newWorld(t)
	w.prepare("net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
	child := w.child(childConfig{Iface: "quicvpn-gw", StateDir: w.dir},
		"sh", "-c", `mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0"`)
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if err := child.WaitLog(t.Context(), "open"); err != nil {
		t.Error(err)
	}
	child.Kill()
}

// A journal of another boot or another namespace is not followed.
func TestEgressForgetsOtherHosts(t *testing.T) {
	w := newWorld(t)
	w.kill("quicvpn-gw", false)
	path := filepath.Join(w.dir, "host.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var j journal
	if err := json.Unmarshal(text, &j); err != nil {
		t.Fatal(err)
	}
	j.Owner.Boot = "another"
	if text, err = json.Marshal(j); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := w.tryOpen(w.config())
	if err != nil {
		t.Fatal(err)
	}
	if err := e.close(); err != nil {
		t.Fatal(err)
	}
	if got := w.sysctl("net/ipv4/conf/eth0/forwarding"); got != "1" {
		t.Errorf("what was so at the start of this boot was changed to %s", got)
	}
	if _, err := os.Stat(path); err == nil || !os.IsNotExist(err) {
		t.Errorf("the journal: %v, want %v", err, fs.ErrNotExist)
	}
}

// A device of the gateway's name that is there already, with the addresses and
// routes of before, is the gateway's and no network in the pools' way.
func TestEgressTakesItsDeviceOver(t *testing.T) {
	w := newWorld(t)
	before := w.snapshot()
	w.run("ip", "tuntap", "add", "quicvpn-gw", "mode", "tun", "multi_queue", "vnet_hdr")
	w.run("ip", "addr", "add", "10.91.0.1/32", "dev", "quicvpn-gw")
	w.run("ip", "link", "set", "quicvpn-gw", "up")
	w.run("ip", "route", "add", "10.91.0.0/16", "dev", "quicvpn-gw")
	w.run("ip", "-6", "route", "add", "fd12::/64", "dev", "quicvpn-gw")
	e, err := w.tryOpen(w.config())
	if err != nil {
		t.Fatal(err)
	}
	running := strings.Join(w.host.Snapshot(), "\n")
	for _, want := range []string{"10.91.0.0/16 dev quicvpn-gw", "src 10.91.0.1", "fd12::/64 dev quicvpn-gw", "src fd12::1", "inet6 fd12::1/128"} {
		if !strings.Contains(running, want) {
			t.Errorf("lacks %q", want)
		}
	}
	if err := e.close(); err != nil {
		t.Error(err)
	}
	if diff := before.Diff(w.host.Snapshot()); diff != "" {
		t.Errorf("the host is not as it was:\n%s", diff)
	}
}
