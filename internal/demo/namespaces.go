package main

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// demo is one run in network namespaces. It follows this order:
//
//  1. build the network; measure the bare way
//  2. from now on watch the uplink
//  3. gateway init, gateway run, sidecar; wait for the tunnel
//  4. fetch pages by IPv4 and IPv6; measure the tunnel
//  5. judge what crossed the uplink
//  6. stop both, and compare their namespaces with before
type demo struct {
	*stage
	binary string
}

var (
	gatewayEnd = netip.AddrPortFrom(netlab.GatewayAddr4, 443)
	iperfEnd   = netip.AddrPortFrom(netlab.ServerAddr4, 5201)
)

func (d *demo) run(ctx context.Context) {
	start := time.Now()
	d.say("", "client --- uplink --- gateway --- internet, each a network namespace")

	top := netlab.NewTopology(d.tb, netlab.LinkConfig{})
	top.Internet.ServeHTTP(80)
	top.Internet.ServeIperf(ctx, iperfEnd.Port())
	bareUp, bareDown := d.measure(ctx, top)
	beforeClient, beforeGateway := top.Client.Snapshot(), top.Gateway.Snapshot()

	capture := top.ClientIf.Capture(gatewayEnd)

	gateway, sidecar := d.startTunnel(ctx, top)
	for _, server := range []netip.Addr{netlab.ServerAddr4, netlab.ServerAddr6} {
		d.fetch(ctx, top, server)
	}
	up, down := d.measure(ctx, top)
	d.say("iperf3, 1 flow", "%8s  %8s   Gbit/s", "up", "down")
	d.say("  bare veth", "%8.2f  %8.2f", bareUp, bareDown)
	d.say("  tunnel", "%8.2f  %8.2f", up, down)

	traffic := capture.Traffic()
	d.say("uplink", "%d packets of the tunnel, %d in clear, %d of port 53", traffic.Tunnel, traffic.Clear, traffic.DNS)
	if problem := traffic.Problem(); problem != "" {
		d.tb.Fatalf("the capture of the client's uplink: %s", problem)
	}

	for _, role := range []*netlab.Cmd{sidecar, gateway} {
		if err := role.Stop(10 * time.Second); err != nil {
			d.tb.Fatalf("stop %s: %v", role.Args[1], err)
		}
	}
	if diff := beforeClient.Diff(top.Client.Snapshot()) + beforeGateway.Diff(top.Gateway.Snapshot()); diff != "" {
		d.tb.Fatalf("the namespaces of the client and the gateway are not as before:\n%s", diff)
	}
	d.say("after the stop", "links, routes, rules, nftables and sysctls are as before")
	d.say("", "OK, in %.1f s", time.Since(start).Seconds())
}

// startTunnel runs the gateway and the sidecar and returns once the internet
// answers through the tunnel.
func (d *demo) startTunnel(ctx context.Context, top *netlab.Topology) (gateway, sidecar *netlab.Cmd) {
	dir := d.tb.TempDir()
	gatewayDir, sidecarDir := filepath.Join(dir, "gateway"), filepath.Join(dir, "sidecar")
	tokenFile := filepath.Join(dir, "token")

	init := top.Gateway.Command(ctx, d.binary, "gateway", "init", "--state-dir", gatewayDir, "--address", gatewayEnd.String())
	token, err := init.Output()
	if err != nil {
		d.tb.Fatalf("gateway init: %v: %s", err, init.Log())
	}
	if err := os.WriteFile(tokenFile, token, 0o600); err != nil {
		d.tb.Fatalf("keep the join token: %v", err)
	}
	d.say("gateway init", "a join token of %d letters: %.12s…", len(strings.TrimSpace(string(token))), token)

	gateway = top.Gateway.Start(ctx, d.binary, "gateway", "run", "--state-dir", gatewayDir)
	start := time.Now()
	sidecar = top.Client.Start(ctx, d.binary, "sidecar", "--token-file", tokenFile, "--state-dir", sidecarDir)
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for _, server := range []netip.Addr{netlab.ServerAddr4, netlab.ServerAddr6} {
		// Nothing is sent before the route is there: it would be in clear.
		err := top.Client.WaitRoute(ctx, server, "quicvpn0")
		if err == nil {
			err = top.Client.WaitPing(ctx, server)
		}
		if err != nil {
			d.tb.Fatalf("the tunnel did not come up: %v", err)
		}
	}
	d.say("tunnel", "up %d ms after the sidecar's start", time.Since(start).Milliseconds())
	return gateway, sidecar
}

// fetch gets a page through the tunnel; its server must see the gateway.
func (d *demo) fetch(ctx context.Context, top *netlab.Topology, server netip.Addr) {
	family, seen := "IPv4", netlab.EgressAddr4
	if server.Is6() {
		family, seen = "IPv6", netlab.EgressAddr6
	}
	url := "http://" + netip.AddrPortFrom(server, 80).String() + "/"
	curl := top.Client.Command(ctx, "curl", "--silent", "--show-error", "--fail", "--max-time", "10", url)
	page, err := curl.Output()
	if err != nil {
		d.tb.Fatalf("fetch a page by %s: %v: %s", family, err, curl.Log())
	}
	if want := netlab.Page + seen.String() + "\n"; string(page) != want {
		d.tb.Fatalf("fetch a page by %s: got %q, want %q", family, page, want)
	}
	d.say("curl by "+family, "%s says: %s", url, strings.TrimSpace(string(page)))
}

// measure returns the Gbit/s from the client to the internet and back.
func (d *demo) measure(ctx context.Context, top *netlab.Topology) (up, down float64) {
	for _, m := range []struct {
		to      *float64
		reverse bool
	}{{&up, false}, {&down, true}} {
		r, err := top.Client.Iperf(ctx, netlab.Iperf{Server: iperfEnd, Reverse: m.reverse, Duration: 3 * time.Second})
		if err != nil {
			d.tb.Fatalf("measure: %v", err)
		}
		*m.to = r.Bits / 1e9
	}
	return up, down
}
