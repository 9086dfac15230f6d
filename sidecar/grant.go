package sidecar

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A grant holds less than this: an address for each IP version, and the pools.
const (
	maxAddresses = 8
	maxPools     = 16
	maxGateway   = 4
)

// maxPeers bounds what is taken of what the network's clients announce.
const maxPeers = 1024

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
	if len(g.Addresses) == 0 || len(g.Addresses) > maxAddresses || len(g.Gateway) > maxGateway || len(pools(g)) > maxPools {
		return fmt.Errorf("the gateway gave this client %d addresses, itself %d and the network %d prefixes: up to %d, %d and %d are possible",
			len(g.Addresses), len(g.Gateway), len(pools(g)), maxAddresses, maxGateway, maxPools)
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
	for _, p := range pools(g) {
		if !isNetwork(p) {
			return fmt.Errorf("the gateway says that the network's clients are in %v, which is not one network's: choose another --pool at the gateway", p)
		}
		if both := overlap(p, links); both != "" {
			return fmt.Errorf("addresses overlap: %s: choose another --pool at the gateway, or another subnet here", both)
		}
	}
	return nil
}

// pools returns those of the peers that the gateway has the client's own
// addresses from. The others are what clients have announced.
func pools(g tunnel.Grant) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(g.Peers), func(p netip.Prefix) bool { return !isPool(g, p) })
}

func isPool(g tunnel.Grant, p netip.Prefix) bool {
	return slices.ContainsFunc(g.Addresses, func(a netip.Addr) bool { return p.Contains(a.Unmap()) })
}

// usable returns the peers that can be so here, and says which cannot. A client
// that announces what is on the link here, or half the internet, gets neither:
// the network's other clients would decide who may reach this namespace and whom
// it reaches. What was in force before the link came stays: a DHCP server could
// draw its traffic out of the tunnel otherwise.
func usable(g tunnel.Grant, peers, before []netip.Prefix, links []uplink) (good []netip.Prefix, bad string) {
	for _, p := range peers[:min(len(peers), maxPeers)] {
		switch {
		case isPool(g, p), slices.Contains(before, p):
		case !isNetwork(p):
			bad = fmt.Sprintf("%v is not one network's", p)
			continue
		default:
			if both := overlap(p, links); both != "" {
				bad = both
				continue
			}
		}
		good = append(good, p)
	}
	return good, bad
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

// overlap says where a prefix of the network and what is on the links here have
// addresses in common; empty if nowhere.
func overlap(p netip.Prefix, links []uplink) string {
	for _, u := range links {
		for _, r := range u.onLink {
			if netipx.RangeOfPrefix(p).Overlaps(r) {
				return fmt.Sprintf("the network's %v and %v of %s", p, subnet(r), u.name)
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
	now := ""
	for _, p := range n.want.grant.Peers {
		now = cmp.Or(now, overlap(p, links))
	}
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
