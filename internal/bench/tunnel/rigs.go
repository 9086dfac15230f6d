package main

import (
	"bufio"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

var (
	iperfEnd   = netip.AddrPortFrom(netlab.ServerAddr4, 5201)
	gatewayEnd = netip.AddrPortFrom(netlab.GatewayAddr4, 443)
)

// A rig is a network with one way from its client to its server. In all of them
// the gateway's kernel forwards between the tunnel and the internet and
// masquerades; the bare one has a router in the place of the gateway.
type rig struct {
	name    string
	top     *netlab.Topology
	tunnels []*netlab.Cmd // the client's end first; none in the bare rig
	others  []*netlab.Cmd
}

func newRig(ctx context.Context, tb netlab.TB, name string) *rig {
	top := netlab.NewTopology(tb, netlab.LinkConfig{})
	return &rig{name: name, top: top, others: []*netlab.Cmd{top.Internet.ServeIperf(ctx, iperfEnd.Port())}}
}

// bareRig has no tunnel: client, uplink, internet.
func bareRig(ctx context.Context, tb netlab.TB) *rig { return newRig(ctx, tb, "bare veth") }

// quicvpnRig runs quicvpn as a user would.
func quicvpnRig(ctx context.Context, tb netlab.TB, binary string) *rig {
	r := newRig(ctx, tb, "quicvpn")
	token, gateway := startGateway(ctx, tb, r.top, binary)
	dir := tb.TempDir()
	r.tunnels = []*netlab.Cmd{
		r.top.Client.Start(ctx, binary, "sidecar", "--token-file", token, "--state-dir", filepath.Join(dir, "sidecar")),
		gateway,
	}
	r.waitTunnel(ctx, tb, "quicvpn0")
	return r
}

// startGateway runs a gateway and returns the file that holds its join token.
func startGateway(ctx context.Context, tb netlab.TB, top *netlab.Topology, binary string) (token string, gateway *netlab.Cmd) {
	dir := tb.TempDir()
	state, token := filepath.Join(dir, "gateway"), filepath.Join(dir, "token")
	init := top.Gateway.Command(ctx, binary, "gateway", "init", "--state-dir", state, "--address", gatewayEnd.String())
	out, err := init.Output()
	if err != nil {
		tb.Fatalf("gateway init: %v: %s", err, init.Log())
	}
	if err := os.WriteFile(token, out, 0o600); err != nil {
		tb.Fatalf("keep the join token: %v", err)
	}
	return token, top.Gateway.Start(ctx, binary, "gateway", "run", "--state-dir", state)
}

// wireguardRig runs two wireguard-go, set up through their sockets.
func wireguardRig(ctx context.Context, tb netlab.TB, binary string) *rig {
	r := newRig(ctx, tb, "wireguard-go")
	keys := make([]*ecdh.PrivateKey, 2)
	for i := range keys {
		key, err := ecdh.X25519().GenerateKey(rand.Reader)
		if err != nil {
			tb.Fatalf("make a key: %v", err)
		}
		keys[i] = key
	}
	const config = "set=1\nprivate_key=%s\n%spublic_key=%s\nallowed_ip=0.0.0.0/0\nallowed_ip=::/0\n%s\n"
	for i, end := range []struct {
		ns        *netlab.NS
		own, peer string
		address   string
	}{
		{r.top.Client, "", fmt.Sprintf("endpoint=%s\n", gatewayEnd), "10.90.0.2/24"},
		{r.top.Gateway, fmt.Sprintf("listen_port=%d\n", gatewayEnd.Port()), "", "10.90.0.1/24"},
	} {
		end.ns.Hide("/run") // the socket's name is the same for all
		cmd := end.ns.Command(ctx, binary, "wg0")
		cmd.Env = append(os.Environ(), "WG_PROCESS_FOREGROUND=1", "LOG_LEVEL=error")
		if err := cmd.Start(); err != nil {
			tb.Fatalf("%v", err)
		}
		r.tunnels = append(r.tunnels, cmd)
		text := fmt.Sprintf(config, hex.EncodeToString(keys[i].Bytes()), end.own,
			hex.EncodeToString(keys[1-i].PublicKey().Bytes()), end.peer)
		if err := end.ns.Do(func() error { return uapi(ctx, "/run/wireguard/wg0.sock", text) }); err != nil {
			tb.Fatalf("set up wireguard-go in %s: %v; it printed: %s", end.ns.Name, err, cmd.Log())
		}
		wg := end.ns.Iface("wg0")
		wg.Address(netip.MustParsePrefix(end.address))
		wg.Up()
	}
	r.top.Gateway.Forward()
	r.top.Gateway.Masquerade(r.top.EgressIf.Name)
	gateway := netip.PrefixFrom(gatewayEnd.Addr(), 32)
	r.top.Client.Route(gateway, netip.MustParseAddr("192.0.2.1"))
	nl := r.top.Client.Netlink()
	link, err := nl.LinkByName("wg0")
	if err == nil {
		err = nl.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}})
	}
	if err != nil {
		tb.Fatalf("route through wireguard-go: %v", err)
	}
	r.waitTunnel(ctx, tb, "wg0")
	return r
}

// uapi sends a configuration to wireguard's socket, once it is there.
func uapi(ctx context.Context, socket, config string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var conn net.Conn
	for {
		var err error
		if conn, err = new(net.Dialer).DialContext(ctx, "unix", socket); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, config); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	if strings.TrimSpace(answer) != "errno=0" {
		return fmt.Errorf("configuration refused: %s", answer)
	}
	return nil
}

// waitTunnel returns once the server answers through the interface.
func (r *rig) waitTunnel(ctx context.Context, tb netlab.TB, iface string) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	err := r.top.Client.WaitRoute(ctx, iperfEnd.Addr(), iface)
	if err == nil {
		err = r.top.Client.WaitPing(ctx, iperfEnd.Addr())
	}
	if err != nil {
		for _, c := range r.tunnels {
			tb.Logf("%s printed:\n%s", c.Args[0], c.Log())
		}
		tb.Fatalf("the tunnel of %s did not come up: %v", r.name, err)
	}
}

func (r *rig) stop() {
	for _, c := range append(r.tunnels, r.others...) {
		c.Kill()
	}
}
