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

// TestGatewayKilledUnderLoad kills the gateway in the middle of a TCP connection
// and starts it again: the same connection goes on.
func TestGatewayKilledUnderLoad(t *testing.T) {
	for _, tt := range []struct {
		name    string
		reverse bool
	}{{"up", false}, {"down", true}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			// Slow enough that the sender's buffers do not hide a pause.
			w := newWorld(t, options{link: netlab.LinkConfig{Rate: 50e6}})
			w.startGateway()
			c := w.client0()
			c.join(w.token)
			server := netip.AddrPortFrom(netlab.ServerAddr4, 5201)
			w.Internet.ServeIperf(w.ctx, server.Port())

			type outcome struct {
				result netlab.IperfResult
				err    error
			}
			done := make(chan outcome, 1)
			go func() {
				r, err := c.ns.Iperf(w.ctx, netlab.Iperf{Server: server, Reverse: tt.reverse, Duration: 12 * time.Second})
				done <- outcome{r, err}
			}()
			time.Sleep(3 * time.Second)
			killed := w.gateway
			killed.Kill()
			w.startGateway()
			o := <-done
			if o.err != nil {
				t.Fatalf("the connection did not survive: %v\nsidecar:\n%s", o.err, c.sidecar.Log())
			}
			if log := c.sidecar.Log(); !strings.Contains(log, "the session ended") {
				t.Errorf("the gateway was not away:\n%s", log)
			}
			// Once the gateway is back, TCP's next try may still be seconds away.
			var last float64
			for _, bytes := range o.result.Steps[max(len(o.result.Steps)-20, 0):] {
				last += bytes
			}
			if last < 2e6 {
				t.Errorf("in its last two seconds the connection moved %.0f bytes, want megabytes; each tenth of a second: %.0f", last, o.result.Steps)
			}
			c.checkTunnel()
		})
	}
}

// TestLinkDown takes away a link for half a minute.
func TestLinkDown(t *testing.T) {
	for _, tt := range []struct {
		name string
		link func(w *world) *netlab.Iface
	}{
		{"the client's", func(w *world) *netlab.Iface { return w.UplinkClientIf }},
		{"the gateway's", func(w *world) *netlab.Iface { return w.UplinkGatewayIf }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, options{})
			w.startGateway()
			c := w.client0()
			c.join(w.token)
			addresses := c.addresses()
			before, err := netlab.Descriptors(c.sidecar.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			link := tt.link(w)
			link.Down()
			down := time.Now()
			for time.Since(down) < 30*time.Second {
				ctx, cancel := context.WithTimeout(w.ctx, time.Second)
				if page, err := c.ns.Get(ctx, pageURL("http", netlab.ServerAddr4)); err == nil {
					t.Errorf("a page came while the link was down: %q", page)
				}
				cancel()
				time.Sleep(time.Second)
			}
			link.Up()
			c.waitUp()
			c.checkPages()
			c.checkTunnel()
			if again := c.addresses(); len(again) != 2 || !slices.Equal(again, addresses) {
				t.Errorf("the client's addresses went from %v to %v", addresses, again)
			}
			after, err := netlab.Descriptors(c.sidecar.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			if len(after) > len(before)+1 { // a probe may be under way
				t.Errorf("the sidecar had %d descriptors before and has %d after: %v", len(before), len(after), after)
			}
		})
	}
}

// TestUplinkChanges gives the client another uplink while a session is open, as
// when a laptop goes from cable to wireless.
func TestUplinkChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.join(w.token)
	second, _ := w.Lab.Link(c.ns, w.Uplink, netlab.LinkConfig{
		A: netlab.End{Name: "wlan0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.242/28")}},
		B: netlab.End{Name: "wlan", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.241/28")}},
	})
	watched := second.Capture(w.ends...)
	c.uplink.Down()
	c.ns.DefaultRoute(netip.MustParseAddr("192.0.2.241"))
	c.waitUp()
	c.checkPages()
	if problem := watched.Traffic().Problem(); problem != "" {
		t.Errorf("the second uplink: %s", problem)
	}
}
