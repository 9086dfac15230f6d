package gateway

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// checkOverlap refuses pools that overlap an address or a route of this host:
// packets to the one would go where the other lives. What is on the interface
// own, which may be empty, is the gateway's. It looks at the network namespace of
// the calling thread.
func checkOverlap(own string, pools ...netip.Prefix) error {
	taken, err := hostPrefixes(own)
	if err != nil {
		return fmt.Errorf("look for networks of this host that overlap the pools: %w", err)
	}
	for _, pool := range pools {
		for _, t := range taken {
			if pool.Overlaps(t.prefix) {
				flag := "--pool"
				if pool.Addr().Is6() {
					flag = "--pool6"
				}
				return fmt.Errorf("the pool %s overlaps this host's %s: choose another one with %s at `quicvpn gateway init`, or renumber the other network", pool, t.what, flag)
			}
		}
	}
	return nil
}

type hostPrefix struct {
	prefix netip.Prefix
	what   string
}

// hostPrefixes lists what this host uses or reaches, without default routes,
// what is no unicast, and what is on the interface own.
func hostPrefixes(own string) ([]hostPrefix, error) {
	links, err := listDump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	names := make(map[int]string)
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	var all []hostPrefix
	addrs, err := listDump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		name := names[a.LinkIndex]
		if p, ok := netipx.FromStdIPNet(a.IPNet); ok && counts(p) && (name == "" || name != own) {
			all = append(all, hostPrefix{p, fmt.Sprintf("address %s on %s", p, name)})
		}
	}
	// Every table: a route that only policy routing reaches counts as well.
	routes, err := listDump(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_ALL,
			&netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil || r.Type != unix.RTN_UNICAST {
			continue // local ones are the addresses above; others lead nowhere
		}
		name := names[r.LinkIndex]
		if p, ok := netipx.FromStdIPNet(r.Dst); ok && counts(p) && (name == "" || name != own) {
			what := fmt.Sprintf("route to %s", p.Masked())
			if name != "" {
				what += " by " + name
			}
			all = append(all, hostPrefix{p, what})
		}
	}
	return all, nil
}

// counts says whether a pool in the prefix would be in the way. The halves of
// everything are how other VPNs say "default".
func counts(p netip.Prefix) bool {
	a := p.Addr()
	return p.Bits() > 1 && !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast()
}
