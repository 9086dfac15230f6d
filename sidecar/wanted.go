package sidecar

import (
	"net/netip"
	"slices"

	"github.com/quicvpn/quicvpn/tunnel"
)

// wanted is what the namespace should look like, beside what its other
// interfaces ask for.
type wanted struct {
	grant     *tunnel.Grant // nil before the first session
	mtu       int
	gateways  []netip.AddrPort
	resolvers []netip.AddrPort
}

// allowGateways tells the kill switch where gateways will be dialled.
func (n *network) allowGateways(gateways []netip.AddrPort) {
	n.update(func(w *wanted) { w.gateways = gateways })
}

// allowResolver tells the kill switch which name server will be asked.
func (n *network) allowResolver(server netip.AddrPort) {
	n.update(func(w *wanted) {
		if !slices.Contains(w.resolvers, server) {
			w.resolvers = append(slices.Clone(w.resolvers), server)
		}
	})
}

// update changes what is wanted, and makes it so before it returns. What does
// not succeed is complained of, and tried again by keep.
func (n *network) update(change func(*wanted)) {
	n.mu.Lock()
	change(&n.want)
	err := n.syncLocked()
	n.mu.Unlock()
	n.complain(err)
}

// adopt gives the namespace its place in the network, by a session's grant and
// MTU, and returns the sink for the packets that come from the session.
func (n *network) adopt(grant tunnel.Grant, mtu int) tunnel.Sink {
	for i, a := range grant.Addresses {
		grant.Addresses[i] = a.Unmap()
	}
	var before *tunnel.Grant
	n.update(func(w *wanted) {
		before, w.grant, w.mtu = w.grant, &grant, mtu
		var known []netip.Prefix
		if before != nil {
			known = before.Peers
		}
		grant.Peers = n.usableLocked(grant.Peers, known)
	})
	if before == nil || !slices.Equal(before.Addresses, grant.Addresses) || before.Network != grant.Network {
		n.log.Info("this namespace's place in the network", "network", grant.Network, "addresses", grant.Addresses, "mtu", mtu)
		if !wholeInternet(grant) {
			n.log.Info("the gateway carries packets to these destinations only, and refuses others", "routes", grant.Routes)
		}
	}
	return &inbox{device: n.dev.Load, own: grant.Addresses, drops: n.drops}
}

// refresh follows a session's MTU, and the prefixes of the network's other
// clients.
func (n *network) refresh(mtu int, peers []netip.Prefix) {
	var before int
	n.update(func(w *wanted) {
		before, w.mtu = w.mtu, mtu
		grant := *w.grant
		grant.Peers = n.usableLocked(peers, grant.Peers)
		w.grant = &grant
	})
	if mtu != before {
		n.log.Info("the path's MTU changed", "mtu", mtu)
	}
}

// usableLocked returns the peers that can be so here, and says once which not.
func (n *network) usableLocked(peers, before []netip.Prefix) []netip.Prefix {
	links, err := uplinks(n.nl, n.cfg.Interface)
	if err != nil {
		return before // syncLocked fails at the same, and is repeated
	}
	good, bad := usable(*n.want.grant, peers, before, links)
	if bad != "" && bad != n.unusable {
		n.log.Warn("a client of the network announces addresses that cannot be its own here: it is not reached by them, and may not connect from them", "addresses", bad)
	}
	n.unusable = bad
	return good
}
