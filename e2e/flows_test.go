package e2e

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// With --tcp flow connections end in the sidecar, and the gateway connects: to a
// program all is as it would be without.
func TestTCPFlow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.join(w.token, "--tcp", "flow")
	c.checkPages()

	ctx, cancel := context.WithTimeout(w.ctx, 30*time.Second)
	defer cancel()
	dial := func(to netip.AddrPort) error {
		conn, err := c.ns.DialContext(ctx, "tcp", to.String())
		if err == nil {
			conn.Close()
		}
		return err
	}
	for _, server := range servers {
		if err := dial(netip.AddrPortFrom(server, 81)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("a port where nobody listens: %v", err)
		}
	}
	if err := dial(netip.MustParseAddrPort("10.1.2.3:80")); !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.EACCES) {
		t.Errorf("a private address: %v", err)
	}
	if n := w.gatewayConnections("80"); n != 0 {
		t.Errorf("the gateway has %d connections too many", n)
	}

	// A connection is the gateway's while it lasts, and ends with the session.
	conn, err := c.ns.DialContext(ctx, "tcp", netip.AddrPortFrom(netlab.ServerAddr4, 80).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if n := w.gatewayConnections("80"); n != 1 {
		t.Errorf("the gateway has %d connections to the server, want 1", n)
	}
	w.gateway.Kill()
	w.startGateway()
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadAll(conn); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after the gateway's restart the connection ends with %v, want a reset", err)
	}
	c.waitUp()
	c.checkPages()
	c.checkTunnel()
	c.stop()
}

// gatewayConnections counts the gateway's own connections to a port, and waits a
// moment for them to end.
func (w *world) gatewayConnections(port string) (n int) {
	w.t.Helper()
	for range 20 {
		out, err := w.Gateway.Command(w.ctx, "ss", "--no-header", "--numeric", "--tcp", "state", "established", "dport", "=", port).Output()
		if err != nil {
			w.t.Fatal(err)
		}
		if n = strings.Count(string(out), "\n"); n == 0 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	return n
}
