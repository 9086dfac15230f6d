package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A way is what the way to the gateway looks like: the uplinks, and for each of
// the gateway's addresses the route to it.
type way struct {
	links  string
	routes map[netip.AddrPort]string
}

// lookOut returns the ways to the gateways that there are.
func lookOut(nl *netlink.Handle, mark uint32, links string, gateways []netip.AddrPort) way {
	w := way{links: links, routes: make(map[netip.AddrPort]string)}
	for _, g := range gateways {
		w.routes[g] = routeTo(nl, mark, g.Addr())
	}
	return w
}

// routeTo describes the route to an address, and the interface that it leads to.
func routeTo(nl *netlink.Handle, mark uint32, to netip.Addr) string {
	routes, err := nl.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{Mark: mark})
	text := fmt.Sprintln(err)
	for _, r := range routes {
		text += fmt.Sprintln(r.LinkIndex, r.Src, r.Gw)
		if l, err := nl.LinkByIndex(r.LinkIndex); err == nil {
			text += fmt.Sprintln(l.Attrs().Name, carrier(l.Attrs()))
		}
	}
	return text
}

// carrier is what of an interface's state matters to the way to the gateway.
func carrier(a *netlink.LinkAttrs) string {
	return fmt.Sprintf("%x", a.RawFlags&(unix.IFF_UP|unix.IFF_RUNNING|unix.IFF_LOWER_UP))
}

// isOther reports that it is another way than the one before.
func (w way) isOther(before way) bool {
	if before.routes == nil {
		return false // the first look
	}
	if w.links != before.links {
		return true
	}
	for g, text := range w.routes {
		// An address that was not dialled before is no change of the way.
		if was, ok := before.routes[g]; ok && was != text {
			return true
		}
	}
	return false
}

// noticeLocked tells the connector when the way to the gateway has changed.
func (n *network) noticeLocked(links []uplink) {
	text := ""
	for _, u := range links {
		text += fmt.Sprintln(u.name, u.flags, u.addrs)
	}
	now := lookOut(n.nl, Mark, text, n.want.gateways)
	if now.isOther(n.way) {
		kick(n.moved)
	}
	n.way = now
}

// somewhere stands for the internet at large, where name servers are and
// gateways of which no address is known yet: documentation addresses (RFC 5737,
// RFC 3849) take the default route.
var somewhere = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

const (
	// Changes come in bursts.
	settle = 50 * time.Millisecond
	// anyway is after how long there is a look that nobody asked for, should the
	// kernel's reports fail.
	anyway = 5 * time.Second
)

// follow tells moved when the way to the gateway has changed, until ctx ends.
// Only the interfaces on that way count: on a host with containers others come
// and go all the time.
func (l *Link) follow(ctx context.Context, moved chan<- struct{}) (err error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	w, err := newWatch(unix.NETLINK_ROUTE, routeGroups, l.changed)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	for before := (way{}); ctx.Err() == nil; {
		now := l.look(nl)
		if now.isOther(before) {
			kick(moved)
		}
		before = now
		select {
		case <-ctx.Done():
		case <-l.changed:
			sleep(ctx, settle)
		case <-time.After(anyway):
		}
	}
	return nil
}

func (l *Link) look(nl *netlink.Handle) way {
	l.mu.Lock()
	gateways := l.gateways
	l.mu.Unlock()
	links := ""
	for _, a := range somewhere {
		links += routeTo(nl, l.out.mark, a)
	}
	return lookOut(nl, l.out.mark, links, gateways)
}
