package sidecar

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// The rules, in the order of their priorities:
//
//	from an uplink's own address     lookup main
//	all                              lookup main, but for its default routes
//	all but what has our mark        lookup our table
//
// The first takes answers back to where the question came in, and makes the
// reverse path filter (rp_filter=1) accept what comes in beside the tunnel,
// which otherwise needs the sysctl src_valid_mark. The second leaves on-link
// destinations where they are.
const (
	prioritySource = Table - 2
	priorityOnLink = Table - 1
	priorityTunnel = Table
)

// A routeKind is where the default route of our table leads.
type routeKind int

const (
	// unreachable makes programs fail at once, and try the other IP version.
	unreachable routeKind = iota
	intoTunnel
)

// routing keeps the rules and our routing table as they are wanted.
type routing struct {
	h *netlink.Handle
	// families are those that the kernel has.
	families []int
}

func newRouting(h *netlink.Handle) *routing {
	r := &routing{h: h, families: []int{unix.AF_INET}}
	if haveIPv6() {
		r.families = append(r.families, unix.AF_INET6)
	}
	return r
}

// want makes rules and routes what they should be, and touches nothing that is
// so already.
func (r *routing) want(tun int, links []uplink, kind4, kind6 routeKind) error {
	for _, f := range r.families {
		kind := kind4
		if f == unix.AF_INET6 {
			kind = kind6
		}
		// The table first: rules to an empty one lead past it.
		if err := r.wantRoute(f, kind, tun); err != nil {
			return err
		}
		if err := r.wantRules(f, addresses(links, f == unix.AF_INET)); err != nil {
			return err
		}
	}
	return nil
}

// remove takes the rules and routes away.
func (r *routing) remove() error {
	var errs []error
	for _, f := range r.families {
		errs = append(errs, r.setRules(f, nil))
		routes, err := r.routes(f)
		errs = append(errs, err)
		for _, route := range routes {
			errs = append(errs, r.delRoute(route))
		}
	}
	return errors.Join(errs...)
}

// A ruleKey is what tells our rules from each other.
type ruleKey struct {
	priority, table, suppress int
	src                       netip.Prefix
	mark                      uint32
	invert                    bool
}

func keyOf(r netlink.Rule) ruleKey {
	k := ruleKey{priority: r.Priority, table: r.Table, suppress: r.SuppressPrefixlen, mark: r.Mark, invert: r.Invert}
	if r.Src != nil {
		k.src, _ = netipx.FromStdIPNet(r.Src)
	}
	return k
}

func (r *routing) wantRules(family int, own []netip.Addr) error {
	var want []netlink.Rule
	for _, a := range own {
		rule := newRule(family, prioritySource, unix.RT_TABLE_MAIN)
		rule.Src = hostNet(a)
		want = append(want, rule)
	}
	rule := newRule(family, priorityOnLink, unix.RT_TABLE_MAIN)
	rule.SuppressPrefixlen = 0
	want = append(want, rule)
	rule = newRule(family, priorityTunnel, Table)
	rule.Mark, rule.Mask, rule.Invert = Mark, new(uint32(0xffffffff)), true
	want = append(want, rule)
	return r.setRules(family, want)
}

// setRules adds the rules that are missing, then deletes those of our
// priorities that are not wanted, or are there twice.
func (r *routing) setRules(family int, want []netlink.Rule) error {
	rules, err := again(func() ([]netlink.Rule, error) { return r.h.RuleList(family) })
	if err != nil {
		return fmt.Errorf("list routing rules: %w", explainRouting(err))
	}
	missing := make(map[ruleKey]netlink.Rule)
	for _, w := range want {
		missing[keyOf(w)] = w
	}
	var surplus []netlink.Rule
	for _, have := range rules {
		if have.Priority < prioritySource || have.Priority > priorityTunnel {
			continue
		}
		k := keyOf(have)
		if _, ok := missing[k]; !ok {
			surplus = append(surplus, have)
		}
		delete(missing, k)
	}
	for _, w := range want {
		if _, ok := missing[keyOf(w)]; !ok {
			continue
		}
		if err := r.h.RuleAdd(&w); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add routing rule (%v): %w", w, explainRouting(err))
		}
	}
	for _, s := range surplus {
		if err := r.h.RuleDel(&s); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete routing rule (%v): %w", s, explainRouting(err))
		}
	}
	return nil
}

func newRule(family, priority, table int) netlink.Rule {
	r := *netlink.NewRule()
	r.Family, r.Priority, r.Table = family, priority, table
	return r
}

// routes lists our table.
func (r *routing) routes(family int) ([]netlink.Route, error) {
	routes, err := again(func() ([]netlink.Route, error) {
		return r.h.RouteListFiltered(family, &netlink.Route{Table: Table}, netlink.RT_FILTER_TABLE)
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // a table that was never used
	}
	if err != nil {
		return nil, fmt.Errorf("list routing table %d: %w", Table, explainRouting(err))
	}
	return routes, nil
}

// wantRoute makes the default route the only one of our table.
func (r *routing) wantRoute(family int, kind routeKind, tun int) error {
	want := netlink.Route{Family: family, Table: Table, Dst: defaultNet(family), Type: unix.RTN_UNREACHABLE}
	if kind == intoTunnel {
		want.Type, want.LinkIndex, want.Scope = unix.RTN_UNICAST, tun, netlink.SCOPE_LINK
	}
	is := func(have netlink.Route) bool {
		return have.Type == want.Type && (have.Dst == nil || ones(have.Dst) == 0) &&
			(kind == unreachable || have.LinkIndex == tun)
	}
	routes, err := r.routes(family)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(routes, is) {
		if err := r.h.RouteReplace(&want); err != nil {
			return fmt.Errorf("set the default route of table %d: %w", Table, explainRouting(err))
		}
		if routes, err = r.routes(family); err != nil {
			return err
		}
	}
	for _, have := range routes {
		if is(have) {
			continue
		}
		if err := r.delRoute(have); err != nil {
			return err
		}
	}
	return nil
}

func (r *routing) delRoute(route netlink.Route) error {
	if route.Dst == nil {
		route.Dst = defaultNet(route.Family)
	}
	if err := r.h.RouteDel(&route); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete route %v of table %d: %w", route.Dst, Table, explainRouting(err))
	}
	return nil
}

func explainRouting(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: this needs the capability NET_ADMIN (--cap-add NET_ADMIN)", err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: this kernel has no policy routing (CONFIG_IP_MULTIPLE_TABLES)", err)
	}
	return err
}

func defaultNet(family int) *net.IPNet {
	if family == unix.AF_INET {
		return &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	}
	return &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
}

func hostNet(a netip.Addr) *net.IPNet {
	return netipx.PrefixIPNet(netip.PrefixFrom(a, a.BitLen()))
}

func ones(n *net.IPNet) int {
	bits, _ := n.Mask.Size()
	return bits
}
