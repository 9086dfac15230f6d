package gateway

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// firstHost is the gateway's own address in a pool; zero where there is no pool.
func firstHost(pool netip.Prefix) netip.Addr {
	if !pool.IsValid() {
		return netip.Addr{}
	}
	return pool.Masked().Addr().Next()
}

// ipv6Enabled reports whether the kernel has IPv6 and gives it to an interface.
// Where the operator has turned it off for all, or for new interfaces, that is
// respected.
func ipv6Enabled(iface string) bool {
	return sysctlIs("net/ipv6/conf/all/disable_ipv6", "0") &&
		sysctlIs("net/ipv6/conf/"+iface+"/disable_ipv6", "0")
}

func findLink(name string) (netlink.Link, error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find interface %s: %w", name, err)
	}
	return link, nil
}

// keepForwarding lets the TUN device forward, IPv6 by its own setting where
// force is set. Who turns forwarding off for the whole host turns both off.
func keepForwarding(iface string, force bool) error {
	if force && !sysctlIs(force6(iface), "1") {
		if err := writeSysctl(force6(iface), "1"); err != nil {
			return err
		}
	}
	if sysctlIs(forwarding4(iface), "1") && sysctlIs("net/ipv4/conf/"+iface+"/accept_local", "1") {
		return nil
	}
	link, err := findLink(iface)
	if err != nil {
		return err
	}
	// By netlink and not by /proc/sys, which is read-only in most containers.
	// accept_local: errors of the gateway about a packet from outside come by
	// the device, and from the device's own address.
	return setInetConf(link, map[int]uint32{
		inetConfForwarding:        1,
		inetConfAcceptSourceRoute: 0, // a client could go where its policy does not look
		inetConfAcceptLocal:       1,
	})
}

// setUpLink gives the TUN device what it lacks: its addresses, being up, and the
// routes to the pools. It returns what it did and touches nothing else, so that
// the kernel then tells of no change.
func setUpLink(cfg egressConfig, ipv6 bool) (did []string, err error) {
	link, err := findLink(cfg.iface)
	if err != nil {
		return nil, err
	}
	pools := []netip.Prefix{cfg.pool4}
	if ipv6 && cfg.pool6.IsValid() {
		pools = append(pools, cfg.pool6)
		// No link-local address: nobody is on this link.
		if !sysctlIs("net/ipv6/conf/"+cfg.iface+"/addr_gen_mode", addrGenNone) {
			if err := netlink.LinkSetIP6AddrGenMode(link, inet6AddrGenNone); err != nil {
				return nil, fmt.Errorf("set up interface %s: no link-local address: %w", cfg.iface, err)
			}
		}
	}
	for _, pool := range pools {
		added, err := setAddr(link, firstHost(pool))
		if err != nil {
			return did, err
		}
		if added {
			did = append(did, "address "+firstHost(pool).String())
		}
	}
	if link.Attrs().Flags&net.FlagUp == 0 {
		if err := netlink.LinkSetUp(link); err != nil {
			return did, fmt.Errorf("set interface %s up: %w", cfg.iface, err)
		}
		did = append(did, "up")
	}
	for _, pool := range pools {
		added, err := setRoute(link, pool.Masked())
		if err != nil {
			return did, err
		}
		if added {
			did = append(did, "route "+pool.Masked().String())
		}
	}
	return did, nil
}

// setAddr gives a device an address, unless it has it.
func setAddr(link netlink.Link, ip netip.Addr) (added bool, err error) {
	want := netip.PrefixFrom(ip, ip.BitLen())
	has, err := listDump(func() ([]netlink.Addr, error) { return netlink.AddrList(link, familyOf(ip)) })
	if err != nil {
		return false, fmt.Errorf("list the addresses of interface %s: %w", link.Attrs().Name, err)
	}
	if slices.ContainsFunc(has, func(a netlink.Addr) bool { p, _ := prefixOf(a.IPNet); return p == want }) {
		return false, nil
	}
	addr := &netlink.Addr{IPNet: ipNet(want)}
	if ip.Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	if err := netlink.AddrReplace(link, addr); err != nil {
		return false, fmt.Errorf("add address %s to interface %s: %w", ip, link.Attrs().Name, err)
	}
	return true, nil
}

// setRoute leads a pool to a device, unless it does so already.
func setRoute(link netlink.Link, pool netip.Prefix) (added bool, err error) {
	want := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(pool), Src: firstHost(pool).AsSlice()}
	if pool.Addr().Is4() {
		want.Scope = netlink.SCOPE_LINK
	}
	has, err := listDump(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(familyOf(pool.Addr()), want, netlink.RT_FILTER_OIF|netlink.RT_FILTER_DST|netlink.RT_FILTER_SRC)
	})
	if err != nil {
		return false, fmt.Errorf("list the routes to interface %s: %w", link.Attrs().Name, err)
	}
	if len(has) > 0 {
		return false, nil
	}
	if err := netlink.RouteReplace(want); err != nil {
		return false, fmt.Errorf("route %s to interface %s: %w", pool, link.Attrs().Name, err)
	}
	return true, nil
}

func familyOf(ip netip.Addr) int {
	if ip.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

// inet6AddrGenNone is IN6_ADDR_GEN_MODE_NONE, and addrGenNone its sysctl's text.
const (
	inet6AddrGenNone = 1
	addrGenNone      = "1"
)

// Numbers of the settings in net.ipv4.conf (linux/ip.h).
const (
	inetConfForwarding        = 1
	inetConfAcceptSourceRoute = 9
	inetConfAcceptLocal       = 23
)

// setInetConf sets values of net.ipv4.conf for one interface.
func setInetConf(link netlink.Link, values map[int]uint32) error {
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(link.Attrs().Index)
	req.AddData(msg)
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	conf := spec.AddRtAttr(unix.AF_INET, nil).AddRtAttr(unix.IFLA_INET_CONF, nil)
	for key, v := range values {
		conf.AddRtAttr(key, nl.Uint32Attr(v))
	}
	req.AddData(spec)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("set up interface %s: forward IPv4: %w", link.Attrs().Name, err)
	}
	return nil
}

// hostRoutes returns the routes of all tables, without the kernel's own about
// local addresses.
func hostRoutes() ([]netlink.Route, error) {
	var all []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := listDump(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		})
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, fmt.Errorf("list the host's routes: %w", err)
		}
		all = append(all, routes...)
	}
	return slices.DeleteFunc(all, func(r netlink.Route) bool {
		return r.Table == unix.RT_TABLE_LOCAL || r.Type != unix.RTN_UNICAST
	}), nil
}

// prefixOf converts a destination; that of a default route in either of its
// forms is not ok.
func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	bits, size := n.Mask.Size()
	if size == 32 {
		ip = ip.Unmap()
	}
	return netip.PrefixFrom(ip, bits), ok
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
