package sidecar

import (
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/quicvpn/quicvpn/tunnel"
)

// maxAddresses is far more than one for each IP version.
const maxAddresses = 8

// checkGrant refuses what a gateway must not give: addresses that are no host's,
// those that this namespace has by itself, whose connections would then go to
// the gateway, and a network that neighbours here are part of.
func checkGrant(g tunnel.Grant, links []uplink) error {
	if len(g.Addresses) == 0 || len(g.Addresses) > maxAddresses {
		return fmt.Errorf("the gateway gave this client %d addresses", len(g.Addresses))
	}
	for _, a := range g.Addresses {
		a = a.Unmap()
		if !a.IsGlobalUnicast() || a == broadcast {
			return fmt.Errorf("the gateway gave this client the address %v, which is no host's", a)
		}
		for _, u := range links {
			if slices.Contains(u.addrs, a) {
				return fmt.Errorf("the gateway gave this client the address %v, which its interface %s has already: "+
					"choose another --pool at the gateway, or another subnet here", a, u.name)
			}
		}
	}
	if both := overlaps(g, links); both != "" {
		return fmt.Errorf("addresses overlap: %s: choose another --pool at the gateway, or another subnet here", both)
	}
	return nil
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

// check refuses a session whose grant cannot be used here.
func (n *network) check(s session) error {
	links, err := uplinks(n.nl, n.cfg.Interface)
	if err != nil {
		return err
	}
	return checkGrant(s.Grant(), links)
}
