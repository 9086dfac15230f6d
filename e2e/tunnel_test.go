package e2e

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestPagesThroughTheTunnelAndNothingLeft(t *testing.T) {
	for _, tt := range []struct {
		name    string
		address string
		hosts   string
	}{
		{"IPv4", gatewayEnd4.String(), ""},
		{"IPv6", gatewayEnd6.String(), ""},
		{"by name", "gw.example.com:443", "198.51.100.2 gw.example.com\n2001:db8:2::2 gw.example.com\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, options{address: tt.address})
			c := w.client0()
			if tt.hosts != "" {
				c.ns.Replace("/etc/hosts", tt.hosts)
			}
			beforeClient, beforeGateway := c.ns.Snapshot(), w.Gateway.Snapshot()
			w.startGateway()
			c.join(w.token)
			c.checkPages()
			c.checkTunnel()
			c.stop()
			w.stopRole(w.gateway)
			if diff := beforeClient.Diff(c.ns.Snapshot()); diff != "" {
				t.Errorf("the client's namespace is not as before:\n%s", diff)
			}
			if diff := beforeGateway.Diff(w.Gateway.Snapshot()); diff != "" {
				t.Errorf("the gateway's namespace is not as before:\n%s", diff)
			}
			c.checkTunnel()
			w.clients = nil // from here on the clear way is right
			if seen, err := c.page("http", netlab.ServerAddr4); err != nil || seen != "192.0.2.2" {
				t.Errorf("without a tunnel: seen as %q (%v), want 192.0.2.2", seen, err)
			}
		})
	}
}

// TestNoWayAround tries what programs do that want a certain interface.
func TestNoWayAround(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.join(w.token)
	for _, iface := range []string{"eth0", "192.0.2.2"} {
		for _, server := range servers {
			curl := c.ns.Command(w.ctx, "curl", "--silent", "--show-error", "--max-time", "3", "--interface", iface, pageURL("http", server))
			if out, err := curl.Output(); err == nil && !strings.Contains(string(out), netlab.EgressAddr4.String()) &&
				!strings.Contains(string(out), netlab.EgressAddr6.String()) {
				t.Errorf("curl --interface %s got past the tunnel: %q", iface, out)
			}
		}
	}
	for _, resolver := range []string{"192.0.2.1:53", "203.0.113.10:53", "[2001:db8:1::1]:53", "[2001:db8:3::10]:53"} {
		conn, err := c.ns.DialContext(w.ctx, "udp", resolver)
		if err != nil {
			continue // refused is right as well
		}
		// Refused here or sent through the tunnel: the capture judges.
		_, _ = conn.Write([]byte("a query"))
		conn.Close()
	}
	c.checkTunnel()
}

// TestKilledSidecar kills it without a chance to clean up.
func TestKilledSidecar(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	before := c.ns.Snapshot()
	c.join(w.token)
	c.sidecar.Kill()
	for _, server := range servers {
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		if page, err := c.ns.Get(ctx, pageURL("http", server)); err == nil {
			t.Errorf("a page came without a sidecar: %q", page)
		}
		cancel()
	}
	c.join(w.token)
	c.checkPages()
	c.checkTunnel()
	c.stop()
	if diff := before.Diff(c.ns.Snapshot()); diff != "" {
		t.Errorf("after a kill, a start and a stop the namespace is not as before:\n%s", diff)
	}
}

// TestKilledGateway starts one in the house of one that was killed.
func TestKilledGatewayLeavesNoTrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	before := w.Gateway.Snapshot()
	c := w.client0()
	w.startGateway()
	c.join(w.token)
	addresses := c.addresses()
	w.gateway.Kill()
	w.startGateway()
	c.waitUp()
	if again := c.addresses(); len(again) != 2 || !slices.Equal(again, addresses) {
		t.Errorf("the client's addresses went from %v to %v", addresses, again)
	}
	w.stopRole(w.gateway)
	if diff := before.Diff(w.Gateway.Snapshot()); diff != "" {
		t.Errorf("after a kill, a start and a stop the namespace is not as before:\n%s", diff)
	}
}

// addresses returns the addresses of the client's TUN device, without link-local.
func (c *client) addresses() (own []netip.Addr) {
	c.w.t.Helper()
	for _, p := range c.ns.Iface("quicvpn0").Addresses() {
		if !p.Addr().IsLinkLocalUnicast() {
			own = append(own, p.Addr())
		}
	}
	return own
}

func TestStopWhileConnecting(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	c := w.client0()
	before := c.ns.Snapshot()
	c.start(w.token)
	if err := c.sidecar.WaitLog(w.ctx, "cannot connect"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.page("http", netlab.ServerAddr4); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a page while there is no tunnel: %v, want an error at once", err)
	}
	c.stop()
	if diff := before.Diff(c.ns.Snapshot()); diff != "" {
		t.Errorf("the namespace is not as before:\n%s", diff)
	}
}
