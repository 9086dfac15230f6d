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
	"golang.org/x/sys/unix"
)

// An uplink is an interface beside the tunnel and loopback.
type uplink struct {
	name  string
	flags string // what of its state matters to the way to the gateway
	// addrs are its own addresses, but for those of the link only.
	addrs []netip.Addr
	// onLink are the hosts of the directly connected subnets: without their
	// broadcast addresses, and without subnets so large that they would be a hole
	// in the kill switch.
	onLink []netipx.IPRange
}

// Subnets with shorter prefixes are not taken for a link: nobody has one, but a
// hostile DHCP server may say so to draw traffic out of the tunnel.
const (
	minPrefix4 = 8
	minPrefix6 = 32
	// linkLocal6 has a prefix of its own length.
	linkLocal6 = 10
)

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
		u := uplink{name: a.Name, flags: fmt.Sprintf("%x", a.RawFlags&(unix.IFF_UP|unix.IFF_RUNNING|unix.IFF_LOWER_UP))}
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
	least := minPrefix4
	switch {
	case prefix.Addr().IsLinkLocalUnicast() && prefix.Addr().Is6():
		least = linkLocal6
	case prefix.Addr().Is6():
		least = minPrefix6
	}
	if prefix.Bits() < least || prefix.Addr().IsMulticast() {
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
