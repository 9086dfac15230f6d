package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// settle is how long changes of the host are let pile up before they are
	// looked at: a new container or interface makes many.
	settle = 50 * time.Millisecond
	// recheck is for what the kernel tells nobody of, such as rules that
	// another program flushed.
	recheck = 5 * time.Second

	// defaultBits is the longest prefix of what counts as a default route: some
	// set two halves of the address space in its place.
	defaultBits = 1
)

// subscribe opens the socket on which the kernel tells of changes.
func subscribe() (*nl.NetlinkSocket, error) {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK,
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("watch the host's interfaces, addresses and routes: %w", err)
	}
	return s, nil
}

// keep looks after the host until ctx ends: its addresses, which clients may not
// reach; the interfaces that have to forward; the firewall; the device.
func (e *egress) keep(ctx context.Context) error {
	changed := make(chan struct{}, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		listen(e.watch, e.matters, changed)
	}()
	defer func() {
		e.watch.Close()
		<-done
	}()
	tick := time.NewTicker(recheck)
	defer tick.Stop()
	for {
		all := false
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			all = true
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(settle):
			}
		case <-tick.C:
		}
		e.refresh(all)
	}
}

// listen signals changes that matter, until the socket is closed.
func listen(watch *nl.NetlinkSocket, matters func(syscall.NetlinkMessage) bool, changed chan<- struct{}) {
	for {
		msgs, _, err := watch.Receive()
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS): // what was lost may have mattered
		case err != nil:
			return
		case !slices.ContainsFunc(msgs, matters):
			continue
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

// matters tells what is worth a look: all about addresses and the device. A
// router has many routes, which change all the time.
func (e *egress) matters(m syscall.NetlinkMessage) bool {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return len(m.Data) >= unix.SizeofIfInfomsg && nl.DeserializeIfInfomsg(m.Data).Index == int32(e.index)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return e.routeMatters(m.Data)
	}
	return true
}

func (e *egress) routeMatters(b []byte) bool {
	if len(b) < unix.SizeofRtMsg {
		return true
	}
	if dstBits := b[1]; dstBits <= defaultBits {
		return true
	}
	attrs, err := nl.ParseRouteAttr(b[unix.SizeofRtMsg:])
	if err != nil {
		return true
	}
	for _, a := range attrs {
		if dst, ok := netip.AddrFromSlice(a.Value); ok && a.Attr.Type == unix.RTA_DST && e.inPools(dst) {
			return true
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.allow) > 0
}

func (e *egress) inPools(ip netip.Addr) bool {
	return e.cfg.pool4.Contains(ip) || e.cfg.pool6.Contains(ip)
}

// letThrough sees to it that answers from the prefixes are forwarded.
func (e *egress) letThrough(prefixes []netip.Prefix) {
	e.mu.Lock()
	grown := false
	for _, p := range prefixes {
		if _, known := e.allow[p]; !known {
			e.allow[p] = struct{}{}
			grown = true
		}
	}
	e.mu.Unlock()
	if grown {
		e.refresh(true)
	}
}

// refresh brings everything up to date; all includes what the kernel tells
// changes of. What fails is tried again at the next occasion, and said once.
func (e *egress) refresh(all bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.ns.do(func() error { return errors.Join(e.refreshLocked(all), e.repairLink()) })
	if err == nil {
		e.lastErr = ""
	} else if text := err.Error(); text != e.lastErr {
		e.lastErr = text
		e.cfg.log.Warn("the way out may not be complete", "error", err)
	}
}

func (e *egress) refreshLocked(all bool) error {
	if all {
		host, err := hostAddrs()
		if err != nil {
			return err
		}
		e.host.Store(&host)
		if e.ifaces, err = e.interfaces(); err != nil {
			return err
		}
	}
	if err := keepForwarding(e.cfg.iface, e.ipv6 && !e.cfg.everyForward); err != nil {
		return err
	}
	planned := e.ctl.planForwarding(e.cfg.iface, e.ifaces, e.ipv6, e.cfg.everyForward)
	if err := e.ctl.save(); err != nil {
		return errors.Join(planned, err)
	}
	// The firewall first, so that what forwards is bounded from the start.
	if err := e.refreshFirewall(); err != nil {
		return errors.Join(planned, err)
	}
	return errors.Join(planned, e.ctl.apply())
}

// repairLink undoes what another program did to the device.
func (e *egress) repairLink() error {
	did, err := setUpLink(e.cfg, e.ipv6)
	if len(did) > 0 {
		e.cfg.log.Warn("another program changed the interface, which is put back; find out which one", "interface", e.cfg.iface, "repaired", did)
	}
	return err
}

func (e *egress) refreshFirewall() error {
	open := e.ctl.forced()
	if e.fw.rules > 0 {
		intact, err := e.fw.intact()
		if err != nil {
			return fmt.Errorf("look at the firewall: %w", err)
		}
		if intact && open.equal(e.open) {
			return nil
		}
		if !intact {
			e.cfg.log.Warn("the firewall rules were changed by another program and are put back", "table", e.fw.table)
		}
	}
	if err := e.installFirewall(open); err != nil {
		return fmt.Errorf("set up the firewall: %w", err)
	}
	e.open = open
	return nil
}

// installFirewall does without the limit of connections where the kernel cannot
// count them.
func (e *egress) installFirewall(open forced) error {
	err := e.fw.install(open)
	limit := e.fw.limit
	if limit == nil || !errors.Is(err, unix.ENOENT) {
		return err
	}
	e.fw.limit = nil
	if err := e.fw.install(open); err != nil {
		e.fw.limit = limit // that was not it
		return err
	}
	e.cfg.log.Warn("the kernel cannot count connections, so one client may use up the ports that all share: " +
		"run `modprobe nft_connlimit` on the host and start the gateway anew")
	return nil
}

// interfaces returns those by which answers to clients come: of the default
// routes, and of the routes to what clients are allowed by name.
func (e *egress) interfaces() ([]string, error) {
	routes, err := hostRoutes()
	if err != nil {
		return nil, err
	}
	var indices []int
	for _, r := range routes {
		if !e.needs(r) {
			continue
		}
		if len(r.MultiPath) == 0 {
			indices = append(indices, r.LinkIndex)
		}
		for _, hop := range r.MultiPath {
			indices = append(indices, hop.LinkIndex)
		}
	}
	slices.Sort(indices)
	var names []string
	for _, i := range slices.Compact(indices) {
		link, err := netlink.LinkByIndex(i)
		if err != nil {
			continue // gone since
		}
		if name := link.Attrs().Name; name != e.cfg.iface && name != "lo" {
			names = append(names, name)
		}
	}
	return names, nil
}

func (e *egress) needs(r netlink.Route) bool {
	dst, ok := prefixOf(r.Dst)
	if !ok || dst.Bits() <= defaultBits {
		return true
	}
	for p := range e.allow {
		if p.Overlaps(dst) {
			return true
		}
	}
	return false
}

// isHost reports whether an address is one of the gateway's host.
func (e *egress) isHost(ip netip.Addr) bool {
	_, is := (*e.host.Load())[ip]
	return is
}

// hostAddrs returns the addresses of the host.
func hostAddrs() (map[netip.Addr]struct{}, error) {
	addrs, err := listDump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list the host's addresses: %w", err)
	}
	host := make(map[netip.Addr]struct{}, len(addrs))
	for _, a := range addrs {
		if p, ok := prefixOf(a.IPNet); ok {
			host[p.Addr()] = struct{}{}
		}
		// The far end of a point-to-point link is not the host.
	}
	return host, nil
}

// listDump repeats a listing that a change has interrupted, a few times.
func listDump[T any](list func() ([]T, error)) (all []T, err error) {
	for range 5 {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return all, nil // of this moment or the last: the next change is told of
}
