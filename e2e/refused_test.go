package e2e

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/token"
)

// change returns a file with the token of another file after edit.
func (w *world) change(name, file string, edit func(*token.Token)) string {
	w.t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		w.t.Fatal(err)
	}
	tok, err := token.Parse(strings.TrimSpace(string(raw)))
	if err != nil {
		w.t.Fatal(err)
	}
	edit(&tok)
	return w.save(name, tok.Encode()+"\n")
}

// TestJoinFails covers what lets no tunnel come up: the sidecar says why, lets
// nothing out, and leaves nothing behind when it is stopped.
func TestJoinFails(t *testing.T) {
	for _, tt := range []struct {
		name string
		// address in the token; empty for the gateway's
		address string
		// prepare returns the file of the token to join with.
		prepare func(w *world) string
		// says are what the sidecar must say.
		says []string
	}{
		{"unknown token", "", func(w *world) string {
			w.startGateway()
			return w.change("unknown", w.token, func(t *token.Token) { t.Secret[0] ^= 1 })
		}, []string{"token-unknown"}},
		{"revoked token", "", func(w *world) string {
			w.startGateway()
			file := w.newToken("gone")
			w.run(w.Gateway, "token", "revoke", "--state-dir", w.gatewayDir(), "gone")
			return file
		}, []string{"token-revoked"}},
		{"used-up token", "", func(w *world) string {
			w.startGateway()
			file := w.newToken("once", "--uses", "1")
			w.addClient("first").join(file)
			return file
		}, []string{"token-used-up"}},
		{"expired token", "", func(w *world) string {
			w.startGateway()
			file := w.newToken("short", "--expires", "1s")
			time.Sleep(1100 * time.Millisecond)
			return file
		}, []string{"token-expired"}},
		{"wrong pin", "", func(w *world) string {
			w.startGateway()
			return w.change("pin", w.token, func(t *token.Token) { t.Pin[0] ^= 1 })
		}, []string{"the gateway's key is not the one in the token"}},
		{"no gateway", "", func(w *world) string { return w.token },
			[]string{"nothing listens at 198.51.100.2:443 by UDP"}},
		{"no such address", "198.51.100.77:443", func(w *world) string { return w.token },
			[]string{"198.51.100.77:443"}},
		{"no such name", "gw.example.com:443", func(w *world) string {
			w.client0().ns.Replace("/etc/resolv.conf", "nameserver 127.0.0.1\n")
			return w.token
		}, []string{"gw.example.com", "cannot be resolved"}},
		{"UDP blocked", "", func(w *world) string {
			w.startGateway()
			w.Uplink.Nft("table inet f { chain c { type filter hook forward priority 0; meta l4proto udp drop; }; }")
			return w.token
		}, []string{"no answer from 198.51.100.2:443", "UDP"}},
		{"client's own subnet overlaps", "", func(w *world) string {
			w.startGateway()
			lan := w.Lab.NS("lan")
			w.Lab.Link(w.client0().ns, lan, netlab.LinkConfig{
				A: netlab.End{Name: "lan0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.91.0.77/16")}},
			})
			return w.token
		}, []string{"10.91.0.0/16", "lan0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, options{address: tt.address})
			c := w.client0()
			file := tt.prepare(w)
			before := c.ns.Snapshot()
			c.start(file)
			ctx, cancel := context.WithTimeout(w.ctx, 30*time.Second)
			defer cancel()
			for _, say := range tt.says {
				if err := c.sidecar.WaitLog(ctx, say); err != nil {
					t.Fatal(err)
				}
			}
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(c.sidecar.Log(), strings.TrimSpace(string(raw))) {
				t.Error("the log holds the join token")
			}
			for _, server := range servers {
				ctx, cancel := context.WithTimeout(w.ctx, 500*time.Millisecond)
				if page, err := c.ns.Get(ctx, pageURL("http", server)); err == nil {
					t.Errorf("a page came without a tunnel: %q", page)
				}
				cancel()
			}
			c.stop()
			if diff := before.Diff(c.ns.Snapshot()); diff != "" {
				t.Errorf("the namespace is not as before:\n%s", diff)
			}
		})
	}
}

// TestBlockedUDPComesBack opens the way after it was closed.
func TestBlockedUDPComesBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	w.Uplink.Nft("table inet f { chain c { type filter hook forward priority 0; meta l4proto udp drop; }; }")
	c := w.client0()
	c.start(w.token)
	ctx, cancel := context.WithTimeout(w.ctx, 30*time.Second)
	defer cancel()
	if err := c.sidecar.WaitLog(ctx, "no answer"); err != nil {
		t.Fatal(err)
	}
	w.Uplink.Nft("delete table inet f")
	c.waitUp()
	c.checkPages()
}

// TestRoleEnds covers what a role cannot run with: it ends, says what to do, and
// leaves nothing behind.
func TestRoleEnds(t *testing.T) {
	const dropAdmin = "setpriv --bounding-set=-net_admin --inh-caps=-net_admin "
	for _, tt := range []struct {
		name    string
		prepare func(w *world, ns *netlab.NS)
		prefix  string // of the command line, with a space after it
		role    string // "gateway" or "sidecar"
		args    []string
		code    int
		says    []string
	}{
		{"sidecar without /dev/net/tun", func(_ *world, ns *netlab.NS) { ns.Hide("/dev/net") }, "", "sidecar", nil,
			1, []string{"/dev/net/tun", "--device"}},
		{"gateway without /dev/net/tun", func(_ *world, ns *netlab.NS) { ns.Hide("/dev/net") }, "", "gateway", []string{"--egress", "kernel"},
			1, []string{"/dev/net/tun", "--device"}},
		{"sidecar without NET_ADMIN", nil, dropAdmin, "sidecar", nil, 1, []string{"NET_ADMIN"}},
		{"gateway without NET_ADMIN", nil, dropAdmin, "gateway", []string{"--egress", "kernel"}, 1, []string{"NET_ADMIN"}},
		{"sidecar without NET_ADMIN or kill switch", nil, dropAdmin, "sidecar", []string{"--kill-switch", "off"}, 1, []string{"NET_ADMIN"}},
		{"gateway's port in use", func(w *world, ns *netlab.NS) {
			pc, err := ns.ListenPacket("udp", ":443")
			if err != nil {
				w.t.Fatal(err)
			}
			w.t.Cleanup(func() { pc.Close() })
		}, "", "gateway", nil, 1, []string{"443", "in use"}},
		{"gateway's pool overlaps its subnet", func(w *world, ns *netlab.NS) {
			w.Lab.Link(ns, w.Lab.NS("lan"), netlab.LinkConfig{
				A: netlab.End{Name: "lan0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.91.7.1/24")}},
			})
		}, "", "gateway", nil, 1, []string{"10.91.0.0/16", "10.91.7.1/24 on lan0"}},
		{"gateway's interface in use", func(w *world, ns *netlab.NS) {
			w.Lab.Link(ns, w.Lab.NS("lan"), netlab.LinkConfig{A: netlab.End{Name: "taken0"}})
		}, "", "gateway", []string{"--interface", "taken0"}, 1, []string{"taken0"}},
		{"sidecar's interface in use", nil, "", "sidecar", []string{"--interface", "eth0"}, 1, []string{"eth0"}},
		{"MTU 1000 of a sidecar", nil, "", "sidecar", []string{"--mtu", "1000"}, 2, []string{"--mtu", "1280 to 1500"}},
		{"MTU 100000 of a sidecar", nil, "", "sidecar", []string{"--mtu", "100000"}, 2, []string{"--mtu", "1280 to 1500"}},
		{"MTU 1000 of a gateway", nil, "", "gateway", []string{"--mtu", "1000"}, 2, []string{"--mtu", "1280 to 1500"}},
		{"MTU 100000 of a gateway", nil, "", "gateway", []string{"--mtu", "100000"}, 2, []string{"--mtu", "1280 to 1500"}},
		{"no queues", nil, "", "sidecar", []string{"--queues", "1000"}, 2, []string{"--queues", "1 to 256"}},
		{"gateway not set up", func(w *world, _ *netlab.NS) {
			if err := os.RemoveAll(w.gatewayDir()); err != nil {
				w.t.Fatal(err)
			}
		}, "", "gateway", nil, 1, []string{"gateway init"}},
		{"two gateways", func(w *world, ns *netlab.NS) {
			w.startGateway()
			if err := w.gateway.WaitLog(w.ctx, "443"); err != nil {
				w.t.Fatal(err)
			}
		}, "", "gateway", nil, 1, []string{"another"}},
		{"damaged token", func(w *world, _ *netlab.NS) {
			w.save("token", "qv1_AAAA\n")
		}, "", "sidecar", nil, 2, []string{"damaged"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, options{})
			ns := w.client0().ns
			args := w.client0().args(w.token, tt.args...)
			if tt.role == "gateway" {
				ns = w.Gateway
				args = append([]string{"gateway", "run", "--state-dir", w.gatewayDir()}, tt.args...)
			}
			if tt.prepare != nil {
				tt.prepare(w, ns)
			}
			before := ns.Snapshot()
			line := append(strings.Fields(tt.prefix), append([]string{program}, args...)...)
			ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
			defer cancel()
			c := ns.Command(ctx, line[0], line[1:]...)
			err := c.Run()
			if c.ProcessState == nil || c.ProcessState.ExitCode() != tt.code {
				t.Errorf("it ended with %v, want exit code %d; it printed:\n%s", err, tt.code, c.Log())
			}
			last := lastLine(c.Log())
			for _, say := range append(tt.says, "quicvpn: ") {
				if !strings.Contains(last, say) {
					t.Errorf("its last line lacks %q:\n%s", say, c.Log())
				}
			}
			w.checkLog(c)
			if diff := before.Diff(ns.Snapshot()); diff != "" {
				t.Errorf("the namespace is not as before:\n%s", diff)
			}
		})
	}
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// TestReadOnlySysctlsThatAreRight runs both roles where sysctls cannot be written but already
// have the wanted values.
func TestReadOnlySysctlsThatAreRight(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.Gateway.Forward()
	for _, ns := range []*netlab.NS{w.Gateway, w.Client} {
		ns.ReadOnly("/proc/sys")
	}
	w.startGateway()
	w.client0().join(w.token)
	w.client0().checkPages()
	w.client0().checkTunnel()
}
