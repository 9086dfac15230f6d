package e2e

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// reaches says whether a client's pages can be fetched by another client, at
// each of its addresses in the tunnel.
func (c *client) reaches(to *client) (yes, no []netip.Addr) {
	c.w.t.Helper()
	for _, addr := range to.addresses() {
		ctx, cancel := context.WithTimeout(c.w.ctx, 2*time.Second)
		page, err := c.ns.Get(ctx, pageURL("http", addr))
		cancel()
		if err == nil && strings.HasPrefix(page, netlab.Page) {
			yes = append(yes, addr)
		} else {
			no = append(no, addr)
		}
	}
	return yes, no
}

func TestClientsOfNetworks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	a, b, other := w.client0(), w.addClient("b"), w.addClient("other")
	a.join(w.token)
	b.join(w.token)
	other.join(w.newToken("other", "--network", "other"))
	for _, c := range w.clients {
		c.ns.ServeHTTP(80)
	}
	for _, pair := range []struct {
		from, to *client
		want     bool
	}{{a, b, true}, {b, a, true}, {a, other, false}, {other, a, false}, {b, other, false}} {
		yes, no := pair.from.reaches(pair.to)
		if pair.want && (len(yes) != 2 || len(no) != 0) || !pair.want && (len(yes) != 0 || len(no) != 2) {
			t.Errorf("%s reaches %s at %v and not at %v, want all: %v", pair.from.ns.Name, pair.to.ns.Name, yes, no, pair.want)
		}
	}
	// What a client says to another is seen as from its own address.
	for _, addr := range b.addresses() {
		page, err := a.ns.Get(w.ctx, pageURL("http", addr))
		seen := strings.TrimSpace(strings.TrimPrefix(page, netlab.Page))
		own, perr := netip.ParseAddr(seen)
		if err != nil || perr != nil || !slices.Contains(a.addresses(), own) {
			t.Errorf("seen as %q (%v), want one of %v", seen, err, a.addresses())
		}
	}
	// None of them is reachable from the gateway's internet side, nor is what
	// listens in the gateway's namespace from a client.
	w.Gateway.ServeHTTP(8080)
	for _, addr := range []netip.Addr{netlab.GatewayAddr4, netlab.GatewayAddr6, netlab.EgressAddr4, netlab.EgressAddr6} {
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		if page, err := a.ns.Get(ctx, "http://"+netip.AddrPortFrom(addr, 8080).String()+"/"); err == nil {
			t.Errorf("a client reached the gateway itself at %s: %q", addr, page)
		}
		cancel()
	}
	for _, c := range w.clients {
		c.checkTunnel()
	}
}

// TestClientsWithTheSameSubnet has two clients in homes that chose the same
// addresses.
func TestClientsWithTheSameSubnet(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	home := netip.MustParsePrefix("192.168.1.0/24")
	for _, name := range []string{"home1", "home2"} {
		c := w.watch(w.AddHomeClient(name, home))
		c.join(w.token)
		c.checkPages()
		c.checkTunnel()
	}
	first, second := w.clients[1], w.clients[2]
	second.ns.ServeHTTP(80)
	if yes, no := first.reaches(second); len(yes) != 2 {
		t.Errorf("the first home does not reach the second at %v", no)
	}
	first.checkPages()
}

// TestAllow limits where a token's clients may go.
func TestAllow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.start(w.newToken("narrow", "--allow", "203.0.113.0/26"))
	c.waitFor(netlab.ServerAddr4)
	if _, err := c.page("http", netlab.ServerAddr4); err != nil {
		t.Errorf("an allowed page: %v", err)
	}
	for _, url := range []string{"http://203.0.113.130/", pageURL("http", netlab.ServerAddr6)} {
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		if page, err := c.ns.Get(ctx, url); err == nil {
			t.Errorf("%s is not allowed but came: %q", url, page)
		}
		cancel()
	}
	c.checkTunnel()
}

// TestRevocation ends a live session.
func TestRevocation(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	gone, stays := w.client0(), w.addClient("stays")
	gone.join(w.newToken("gone"))
	stays.join(w.token)
	w.run(w.Gateway, "token", "revoke", "--state-dir", w.gatewayDir(), "gone")
	time.Sleep(time.Second)
	for _, server := range servers {
		if rtts, err := gone.ns.Ping(w.ctx, netlab.Ping{To: server, Count: 5, Interval: 20 * time.Millisecond}); len(rtts) > 0 {
			t.Errorf("a second after its revocation a client still reached %s (%v)", server, err)
		}
	}
	if err := gone.sidecar.WaitLog(w.ctx, "token-revoked"); err != nil {
		t.Error(err)
	}
	stays.checkPages()
	gone.checkTunnel()
}

// TestIdentityStays has a client come back after a stop: same key, same
// addresses, and the token is not needed any more.
func TestIdentityStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	token := w.newToken("once", "--uses", "1")
	c := w.client0()
	c.join(token)
	first := c.addresses()
	c.stop()
	other := w.addClient("other")
	other.join(w.token)
	c.capture = c.uplink.Capture(w.ends...)
	c.join(token)
	if again := c.addresses(); !slices.Equal(again, first) || len(again) != 2 {
		t.Errorf("the client's addresses went from %v to %v", first, again)
	}
	if slices.Equal(other.addresses(), first) {
		t.Errorf("another client got the addresses %v of one that was away", first)
	}
}
