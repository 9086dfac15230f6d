package sidecar

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
)

// An uplink is an interface beside the tunnel and loopback.
type uplink struct {
	name  string
	flags string // what of its state matters to the way to the gateway
	// addrs are its own addresses, but for those of the link only.
	addrs []netip.Addr
	// subnets are those that are directly connected.
	subnets []netip.Prefix
	// onLink are the hosts of the subnets that may be reached beside the tunnel,
	// without their broadcast addresses.
	onLink []netipx.IPRange
}

// localRanges hold what may be reached beside the tunnel where it is on the link:
// private networks (RFC 1918, RFC 6598, RFC 4193), link-local addresses, and those
// for documentation (RFC 5737, RFC 3849). A router advertisement or a DHCP server
// can call any other destination on-link, to draw its traffic out of the tunnel.
var localRanges = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.0.2.0/24"),
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"),
	netip.MustParsePrefix("2001:db8::/32"),
	netip.MustParsePrefix("fc00::/7"),
	netip.MustParsePrefix("fe80::/10"),
}

// local reports that all of p is in one of localRanges.
func local(p netip.Prefix) bool { return within(p, localRanges) }

// within reports that all of p is in one of the ranges.
func within(p netip.Prefix, ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Bits() <= p.Bits() && r.Contains(p.Addr()) })
}

// uplinks lists the interfaces beside the tunnel, by name.
func uplinks(h *netlink.Handle, tun string) ([]uplink, error) {
	links, err := again(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	addrs, err := again(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var all []uplink
	for _, l := range links {
		a := l.Attrs()
		if a.Flags&net.FlagLoopback != 0 || a.Name == tun {
			continue
		}
		u := uplink{name: a.Name, flags: carrier(a)}
		var set netipx.IPSetBuilder
		for _, ad := range addrs {
			if ad.LinkIndex == a.Index {
				u.take(ad, &set)
			}
		}
		ips, err := set.IPSet()
		if err != nil {
			return nil, fmt.Errorf("subnets of %s: %w", a.Name, err)
		}
		u.onLink = ips.Ranges()
		slices.SortFunc(u.addrs, netip.Addr.Compare)
		slices.SortFunc(u.subnets, netip.Prefix.Compare)
		u.subnets = slices.Compact(u.subnets)
		all = append(all, u)
	}
	slices.SortFunc(all, func(a, b uplink) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

// take adds one address and its subnet.
func (u *uplink) take(a netlink.Addr, set *netipx.IPSetBuilder) {
	own, ok := netip.AddrFromSlice(a.IP)
	if !ok {
		return
	}
	own = own.Unmap()
	if !own.IsLinkLocalUnicast() || own.Is4() {
		u.addrs = append(u.addrs, own)
	}
	net := a.IPNet
	if a.Peer != nil && a.Peer.IP != nil {
		net = a.Peer // point to point: the subnet is the other end's
	}
	prefix, ok := netipx.FromStdIPNet(net)
	if !ok {
		return
	}
	prefix = prefix.Masked()
	u.subnets = append(u.subnets, prefix)
	if !local(prefix) {
		return
	}
	set.AddPrefix(prefix)
	if r := netipx.RangeOfPrefix(prefix); prefix.Addr().Is4() && prefix.Bits() < 31 {
		set.Remove(r.From()) // the network's own address is an old form of broadcast
		set.Remove(r.To())
	}
}

// addresses are all the uplinks' own addresses of one IP version.
func addresses(links []uplink, is4 bool) []netip.Addr {
	var all []netip.Addr
	for _, u := range links {
		for _, a := range u.addrs {
			if a.Is4() == is4 && !slices.Contains(all, a) {
				all = append(all, a)
			}
		}
	}
	return all
}

// again repeats a dump that a change has interrupted.
func again[T any](dump func() ([]T, error)) ([]T, error) {
	for range 5 {
		list, err := dump()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return list, err
		}
	}
	return dump()
}
