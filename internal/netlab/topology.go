package netlab

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// The fixed places of a Topology. All are documentation addresses (RFC 5737,
// RFC 3849), which no policy about private networks concerns.
var (
	GatewayAddr4 = netip.MustParseAddr("198.51.100.2")
	GatewayAddr6 = netip.MustParseAddr("2001:db8:2::2")
	// EgressAddr4 and EgressAddr6 are what the internet sees the gateway as.
	EgressAddr4 = netip.MustParseAddr("203.0.113.2")
	EgressAddr6 = netip.MustParseAddr("2001:db8:3::2")
	ServerAddr4 = netip.MustParseAddr("203.0.113.10")
	ServerAddr6 = netip.MustParseAddr("2001:db8:3::10")
)

// A Topology is the network that a tunnel is for:
//
//	client --- uplink --- gateway --- internet
//	              |___________________|
//	                   the clear way
//
// Without a tunnel the client reaches the internet in clear, past the gateway:
// what leaks does arrive, and the internet sees who sent it.
type Topology struct {
	Lab                               *Lab
	Client, Uplink, Gateway, Internet *NS

	ClientIf        *Iface // the client's end of its link to the uplink
	UplinkClientIf  *Iface // the other end of it
	UplinkGatewayIf *Iface // the uplink's end of its link to the gateway
	GatewayIf       *Iface // the gateway's end of it
	EgressIf        *Iface // the gateway's end of its link to the internet
	InternetIf      *Iface // the other end of it

	clients int
}

// NewTopology builds a topology; cfg's MTU and Rate are those of the links on
// both sides of the uplink, its ends are not used.
func NewTopology(tb TB, cfg LinkConfig) *Topology {
	tb.Helper()
	l := New(tb)
	t := &Topology{Lab: l, Uplink: l.NS("uplink"), Gateway: l.NS("gateway"), Internet: l.NS("internet")}
	t.UplinkGatewayIf, t.GatewayIf = l.Link(t.Uplink, t.Gateway, LinkConfig{
		A:   End{Name: "gw", Addresses: []netip.Prefix{prefix("198.51.100.1/24"), prefix("2001:db8:2::1/64")}},
		B:   End{Addresses: []netip.Prefix{netip.PrefixFrom(GatewayAddr4, 24), netip.PrefixFrom(GatewayAddr6, 64)}},
		MTU: cfg.MTU, Rate: cfg.Rate,
	})
	t.EgressIf, t.InternetIf = l.Link(t.Gateway, t.Internet, LinkConfig{
		A: End{Name: "eth1", Addresses: []netip.Prefix{netip.PrefixFrom(EgressAddr4, 25), netip.PrefixFrom(EgressAddr6, 64)}},
		B: End{Addresses: []netip.Prefix{netip.PrefixFrom(ServerAddr4, 25), netip.PrefixFrom(ServerAddr6, 64)}},
	})
	l.Link(t.Uplink, t.Internet, LinkConfig{
		A: End{Name: "clear", Addresses: []netip.Prefix{prefix("203.0.113.129/25"), prefix("2001:db8:4::1/64")}},
		B: End{Name: "clear", Addresses: []netip.Prefix{prefix("203.0.113.130/25"), prefix("2001:db8:4::2/64")}},
	})
	t.Uplink.Forward()
	t.Uplink.DefaultRoute(netip.MustParseAddr("203.0.113.130"), netip.MustParseAddr("2001:db8:4::2"))
	t.Gateway.DefaultRoute(ServerAddr4, ServerAddr6)
	t.Gateway.Route(prefix("192.0.2.0/24"), netip.MustParseAddr("198.51.100.1"))
	t.Gateway.Route(prefix("2001:db8:1::/48"), netip.MustParseAddr("2001:db8:2::1"))
	t.Internet.routeFrom(prefix("192.0.2.0/24"), netip.MustParseAddr("203.0.113.129"), ServerAddr4)
	t.Internet.routeFrom(prefix("2001:db8:1::/48"), netip.MustParseAddr("2001:db8:4::1"), ServerAddr6)
	t.ClientIf, t.UplinkClientIf = t.AddClient("client", cfg)
	t.Client = t.ClientIf.NS
	return t
}

// SetPathMTU has the uplink forward no larger packets between the first client
// and the gateway, while both ends' links keep their MTU. It answers larger ones
// with ICMP.
func (t *Topology) SetPathMTU(mtu int) {
	t.Lab.tb.Helper()
	for _, hop := range []struct {
		to  netip.Addr
		out *Iface
	}{
		{GatewayAddr4, t.UplinkGatewayIf}, {GatewayAddr6, t.UplinkGatewayIf},
		{prefix("192.0.2.2/32").Addr(), t.UplinkClientIf}, {prefix("2001:db8:1::2/128").Addr(), t.UplinkClientIf},
	} {
		err := t.Uplink.nl.RouteReplace(&netlink.Route{
			Dst: ipNet(netip.PrefixFrom(hop.to, hop.to.BitLen())), LinkIndex: hop.out.Index, MTU: mtu,
		})
		hop.out.check("set the path MTU", err)
	}
}

// AddClient adds a namespace behind the uplink, with addresses of its own, and
// returns both ends of its link. At most 14 fit.
func (t *Topology) AddClient(name string, cfg LinkConfig) (client, uplink *Iface) {
	t.Lab.tb.Helper()
	n := t.clients
	t.clients++
	ns := t.Lab.NS(name)
	client, uplink = t.Lab.Link(ns, t.Uplink, LinkConfig{
		A: End{Addresses: []netip.Prefix{
			prefix("192.0.2.%d/28", n*16+2), prefix("2001:db8:1:%x::2/64", n)}},
		B: End{Name: fmt.Sprintf("client%d", n), Addresses: []netip.Prefix{
			prefix("192.0.2.%d/28", n*16+1), prefix("2001:db8:1:%x::1/64", n)}},
		MTU: cfg.MTU, Rate: cfg.Rate,
	})
	ns.DefaultRoute(prefix("192.0.2.%d/28", n*16+1).Addr(), prefix("2001:db8:1:%x::1/64", n).Addr())
	return client, uplink
}

// AddHomeClient adds a client as homes have it: behind a router of its own that
// masquerades, in the given IPv4 network (the router has the first address, the
// client the second), without IPv6. Several may have the same network.
func (t *Topology) AddHomeClient(name string, lan netip.Prefix) (client *Iface) {
	t.Lab.tb.Helper()
	wan, _ := t.AddClient(name+"-router", LinkConfig{})
	router := wan.NS
	router.Forward()
	router.Masquerade(wan.Name)
	first := lan.Masked().Addr().Next()
	client, _ = t.Lab.Link(t.Lab.NS(name), router, LinkConfig{
		A: End{Addresses: []netip.Prefix{netip.PrefixFrom(first.Next(), lan.Bits())}},
		B: End{Name: "lan", Addresses: []netip.Prefix{netip.PrefixFrom(first, lan.Bits())}},
	})
	client.NS.DefaultRoute(first)
	return client
}

// WaitReady returns once a TCP connection from the namespace to the address
// succeeds.
func (n *NS) WaitReady(ctx context.Context, addr netip.AddrPort) error {
	for {
		c, err := n.DialContext(ctx, "tcp", addr.String())
		if err == nil {
			return c.Close()
		}
		if sleep(ctx, retry) != nil {
			return fmt.Errorf("connect from %s to %s: %w", n.Name, addr, err)
		}
	}
}

// prefix parses what this package writes itself.
func prefix(format string, args ...any) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf(format, args...))
}

// WaitRoute returns once what is for dst leaves the namespace by the interface.
func (n *NS) WaitRoute(ctx context.Context, dst netip.Addr, iface string) error {
	for {
		link, err := n.nl.LinkByName(iface)
		if err == nil {
			var routes []netlink.Route
			routes, err = n.nl.RouteGet(dst.AsSlice())
			if err == nil && len(routes) == 1 && routes[0].LinkIndex == link.Attrs().Index {
				return nil
			}
		}
		if sleep(ctx, retry) != nil {
			return fmt.Errorf("wait for the route of %s to %s by %s: %w (%v)", n.Name, dst, iface, ctx.Err(), err)
		}
	}
}
