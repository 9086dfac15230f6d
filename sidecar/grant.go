package sidecar

import (
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A grant holds less than this: an address for each IP version, and the pools.
const (
	maxAddresses = 8
	maxPeers     = 16
	maxGateway   = 4
)

// noHosts are unicast addresses in form, but no host's: "this network" and
// reserved ones (RFC 6890), and IPv6 that contains IPv4 or is deprecated.
var noHosts = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("::/96"),
	netip.MustParsePrefix("64:ff9b::/96"),
	netip.MustParsePrefix("2002::/16"),
	netip.MustParsePrefix("fec0::/10"),
}

// checkGrant refuses what a gateway must not give: addresses that are no host's,
// those of this namespace's own networks, whose connections would then go to the
// gateway, and a network that neighbours here are part of.
func checkGrant(g tunnel.Grant, links []uplink) error {
	if len(g.Addresses) == 0 || len(g.Addresses) > maxAddresses || len(g.Gateway) > maxGateway || len(g.Peers) > maxPeers {
		return fmt.Errorf("the gateway gave this client %d addresses, itself %d and the network %d prefixes: up to %d, %d and %d are possible",
			len(g.Addresses), len(g.Gateway), len(g.Peers), maxAddresses, maxGateway, maxPeers)
	}
	for _, a := range g.Addresses {
		a = a.Unmap()
		if !a.IsGlobalUnicast() || within(netip.PrefixFrom(a, a.BitLen()), noHosts) {
			return fmt.Errorf("the gateway gave this client the address %v, which is no host's", a)
		}
		for _, u := range links {
			if slices.Contains(u.addrs, a) {
				return fmt.Errorf("the gateway gave this client the address %v, which its interface %s has already: "+
					"choose another --pool at the gateway, or another subnet here", a, u.name)
			}
			for _, s := range u.subnets {
				if s.Contains(a) {
					return fmt.Errorf("the gateway gave this client the address %v, which is in the subnet %v of its interface %s: "+
						"choose another --pool at the gateway, or another subnet here", a, s, u.name)
				}
			}
		}
	}
	for _, p := range g.Peers {
		if !isNetwork(p) {
			return fmt.Errorf("the gateway says that the network's clients are in %v, which is not one network's: choose another --pool at the gateway", p)
		}
	}
	if both := overlaps(g, links); both != "" {
		return fmt.Errorf("addresses overlap: %s: choose another --pool at the gateway, or another subnet here", both)
	}
	return nil
}

// isNetwork reports that p may be a network's addresses: private ones, or no more
// than somebody may own.
func isNetwork(p netip.Prefix) bool {
	least := 8
	if p.Addr().Is6() {
		least = 32
	}
	return p.IsValid() && !p.Addr().Is4In6() && (local(p) || p.Bits() >= least)
}

// wholeInternet reports that the routes are default routes, for every IP version
// that the client has an address of.
func wholeInternet(g tunnel.Grant) bool {
	return !slices.ContainsFunc(g.Addresses, func(a netip.Addr) bool {
		return !slices.ContainsFunc(g.Routes, func(r netip.Prefix) bool { return r.Bits() == 0 && r.Contains(a) })
	})
}

// overlaps says where the network and what is on the links here have addresses
// in common; empty if nowhere.
func overlaps(g tunnel.Grant, links []uplink) string {
	for _, peers := range g.Peers {
		for _, u := range links {
			for _, r := range u.onLink {
				if netipx.RangeOfPrefix(peers).Overlaps(r) {
					return fmt.Sprintf("the network's %v and %v of %s", peers, subnet(r), u.name)
				}
			}
		}
	}
	return ""
}

// subnet names a range by the prefix around it.
func subnet(r netipx.IPRange) netip.Prefix {
	p := netip.PrefixFrom(r.From(), r.From().BitLen())
	for !p.Contains(r.To()) {
		p = netip.PrefixFrom(p.Addr(), p.Bits()-1)
	}
	return p.Masked()
}

// warnLocked says once which neighbours hide clients of the network.
func (n *network) warnLocked(links []uplink) {
	if n.want.grant == nil {
		return
	}
	now := overlaps(*n.want.grant, links)
	if now != "" && now != n.overlap {
		n.log.Warn("addresses overlap: the network's clients at such addresses cannot be reached; choose another --pool at the gateway, or another subnet here", "overlap", now)
	}
	n.overlap = now
}

// check refuses a grant that cannot be used here.
func (n *network) check(g tunnel.Grant) error {
	links, err := uplinks(n.nl, n.cfg.Interface)
	if err != nil {
		return err
	}
	return checkGrant(g, links)
}
