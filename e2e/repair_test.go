package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// TestRulesFlushed has something else throw away all rules of a namespace, as
// "nft flush ruleset" in a firewall's start script does.
func TestRulesFlushed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.join(w.token)
	for _, ns := range []*netlab.NS{c.ns, w.Gateway} {
		before := rules(ns)
		if len(before) == 0 {
			t.Fatalf("no rules in %s", ns.Name)
		}
		ns.Nft("flush ruleset")
		for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
			diff := before.Diff(rules(ns))
			if diff == "" {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the rules of %s after a flush are not as before:\n%s", ns.Name, diff)
			}
		}
	}
	c.checkPages()
	c.checkTunnel()
}

// rules returns the part of a snapshot that nftables is, but for what the kernel
// itself adds to sets as packets pass.
func rules(ns *netlab.NS) (rules netlab.Snapshot) {
	for _, line := range ns.Snapshot() {
		if strings.HasPrefix(line, "nft: ") && !strings.Contains(line, " elements = ") {
			rules = append(rules, line)
		}
	}
	return rules
}

// TestSuspended stops each role for longer than a session lives without a word,
// as a suspended laptop or a paused container does.
func TestSuspended(t *testing.T) {
	for _, tt := range []struct {
		name string
		role func(w *world) *netlab.Cmd
	}{
		{"sidecar", func(w *world) *netlab.Cmd { return w.client0().sidecar }},
		{"gateway", func(w *world) *netlab.Cmd { return w.gateway }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, options{})
			w.startGateway()
			c := w.client0()
			c.join(w.token)
			role := tt.role(w).Process
			if err := role.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			time.Sleep(40 * time.Second)
			if err := role.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			c.waitUp()
			c.checkPages()
			c.checkTunnel()
		})
	}
}

// TestGatewayMoves gives the gateway's name another address.
func TestGatewayMoves(t *testing.T) {
	t.Parallel()
	const name = "gw.example.com"
	w := newWorld(t, options{address: name + ":443"})
	second := netip.MustParseAddrPort("198.51.100.3:443")
	c := w.client0()
	capture := c.uplink.Capture(append(w.ends, second)...)
	c.capture = capture // in the place of the one that knows the first address alone
	c.ns.Replace("/etc/hosts", "198.51.100.2 "+name+"\n")
	w.startGateway()
	c.join(w.token)
	w.gateway.Kill()
	w.GatewayIf.Address(netip.PrefixFrom(second.Addr(), 24))
	w.Gateway.Nft("table ip gone { chain in { type filter hook input priority -300; ip daddr 198.51.100.2 drop; }; }")
	c.ns.Replace("/etc/hosts", "198.51.100.3 "+name+"\n")
	w.startGateway()
	c.waitUp()
	c.checkPages()
	c.checkTunnel()
}

// TestManyClients opens several tunnels to one gateway.
func TestManyClients(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	for i := range 10 {
		w.addClient(fmt.Sprint("client", i)).start(w.token)
	}
	for _, c := range w.clients[1:] {
		c.waitUp()
		c.checkPages()
	}
	ctx, cancel := context.WithTimeout(w.ctx, 10*time.Second)
	defer cancel()
	first, last := w.clients[1], w.clients[len(w.clients)-1]
	if err := first.ns.WaitPing(ctx, last.addresses()[0]); err != nil {
		t.Error(err)
	}
}
