package dockerlab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A network is what a namespace had before its engine.
type network struct {
	links   []int // indexes
	rules   []string
	routes  []string
	ruleset string
	sysctls map[string]string
}

func (e *Engine) remember() network {
	e.tb.Helper()
	n := network{sysctls: map[string]string{}}
	links, err := e.outside.Netlink().LinkList()
	e.check(err)
	for _, l := range links {
		n.links = append(n.links, l.Attrs().Index)
	}
	for _, r := range e.rules() {
		n.rules = append(n.rules, r.String())
	}
	for _, r := range e.routes() {
		n.routes = append(n.routes, r.String())
	}
	list := e.outside.Command(context.Background(), "nft", "-s", "list", "ruleset")
	out, err := list.Output()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, list.Log())
	}
	e.check(err)
	n.ruleset = string(out)
	for _, key := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv6.conf.default.forwarding"} {
		e.check(e.outside.Do(func() error {
			value, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(key, ".", "/"))
			n.sysctls[key] = strings.TrimSpace(string(value))
			return err
		}))
	}
	return n
}

func (e *Engine) rules() []netlink.Rule {
	e.tb.Helper()
	rules, err := e.outside.Netlink().RuleList(netlink.FAMILY_ALL)
	e.check(err)
	return rules
}

// routes returns those of all tables but the kernel's own.
func (e *Engine) routes() []netlink.Route {
	e.tb.Helper()
	all := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
	routes, err := e.outside.Netlink().RouteListFiltered(netlink.FAMILY_ALL, all, netlink.RT_FILTER_TABLE)
	e.check(err)
	return slices.DeleteFunc(routes, func(r netlink.Route) bool { return r.Table == unix.RT_TABLE_LOCAL })
}

// restore removes what has come since: links with their addresses, rules,
// routes, the firewall's rules, and the memory of connections. Nothing is
// forwarded that was not before.
func (n network) restore(e *Engine) {
	e.tb.Helper()
	nl := e.outside.Netlink()
	links, err := nl.LinkList()
	e.check(err)
	for _, l := range links {
		if slices.Contains(n.links, l.Attrs().Index) {
			continue
		}
		// One end of a pair takes the other with it.
		if err := nl.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			e.check(fmt.Errorf("delete %s: %w", l.Attrs().Name, err))
		}
	}
	for _, r := range e.rules() {
		if !slices.Contains(n.rules, r.String()) {
			e.check(nl.RuleDel(&r))
		}
	}
	for _, r := range e.routes() {
		if !slices.Contains(n.routes, r.String()) {
			e.check(nl.RouteDel(&r))
		}
	}
	e.outside.Nft("flush ruleset\n" + n.ruleset)
	for key, value := range n.sysctls {
		e.outside.Sysctl(key, value)
	}
	e.check(nl.ConntrackTableFlush(netlink.ConntrackTable))
}
