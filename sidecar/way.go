package sidecar

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// A way is what the way to the gateway looks like: the uplinks, and for each of
// the gateway's addresses the route to it.
type way struct {
	links  string
	routes map[netip.AddrPort]string
}

// noticeLocked tells the connector when the way to the gateway has changed.
func (n *network) noticeLocked(links []uplink) {
	now := way{routes: make(map[netip.AddrPort]string)}
	for _, u := range links {
		now.links += fmt.Sprintln(u.name, u.flags, u.addrs)
	}
	for _, g := range n.want.gateways {
		routes, err := n.nl.RouteGetWithOptions(g.Addr().AsSlice(), &netlink.RouteGetOptions{Mark: Mark})
		text := fmt.Sprintln(err)
		for _, r := range routes {
			text += fmt.Sprintln(r.LinkIndex, r.Src, r.Gw)
		}
		now.routes[g] = text
	}
	changed := n.way.routes != nil && now.links != n.way.links
	for g, text := range now.routes {
		// An address that was not dialled before is no change of the way.
		if before, ok := n.way.routes[g]; ok && before != text {
			changed = true
		}
	}
	n.way = now
	if changed {
		kick(n.moved)
	}
}
