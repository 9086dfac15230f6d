package sidecar

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A network is what the sidecar puts into its namespace, and keeps there as it
// is wanted whatever else changes it.
type network struct {
	cfg   Config
	log   *slog.Logger
	drops *packet.Drops
	nl    *netlink.Handle

	// changed receives a value when the kernel reports any change; moved when
	// the way to the gateway may have become another.
	changed chan struct{}
	moved   chan struct{}
	watches []*watch

	// dev is nil while the device is opened again.
	dev atomic.Pointer[device]

	mu       sync.Mutex // guards what follows
	kill     *killSwitch
	routes   *routing
	names    *namesFile // nil where resolv.conf is left alone
	heir     bool       // the kill switch was there before this run
	want     wanted
	way      way
	noIPv6   string // why there is no IPv6, as last said
	overlap  string // of addresses, as last said
	unusable string // of what clients announce, as last said
	trouble  repeated
}

func newNetwork(cfg Config, drops *packet.Drops) (*network, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	n := &network{
		cfg: cfg, log: cfg.Log, drops: drops, nl: nl,
		changed: make(chan struct{}, 1),
		moved:   make(chan struct{}, 1),
		want:    wanted{mtu: cmp.Or(cfg.MTU, minIPv6MTU)},
	}
	if cfg.ResolvConf {
		n.names = newNamesFile(cfg.StateDir, cfg.Log)
	}
	return n, nil
}

// setUp does the steps up to the routes. Where it fails, takeDown undoes those
// that were done.
func (n *network) setUp() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.names != nil {
		if err := n.names.check(); err != nil {
			return err
		}
	}
	err := n.watch()
	if err != nil {
		return err
	}
	if n.heir, err = n.killSwitchStep(); err != nil {
		return err
	}
	if n.heir {
		n.log.Info("took over the kill switch that an earlier run left")
	}
	if err := n.openDevice(); err != nil {
		return err
	}
	n.routes = newRouting(n.nl)
	return n.syncLocked()
}

// watch listens for changes, from before the first of our own.
func (n *network) watch() error {
	w, err := newWatch(unix.NETLINK_ROUTE, routeGroups, n.changed)
	if err != nil {
		return err
	}
	n.watches = append(n.watches, w)
	if n.cfg.KillSwitch == KillSwitchOff {
		return nil
	}
	if w, err = newWatch(unix.NETLINK_NETFILTER, 1<<(unix.NFNLGRP_NFTABLES-1), n.changed); err != nil {
		return explainNftables(err)
	}
	n.watches = append(n.watches, w)
	return nil
}

// killSwitchStep sets the rules before there is a device. heir says that an
// earlier run left them.
func (n *network) killSwitchStep() (heir bool, err error) {
	if n.cfg.KillSwitch == KillSwitchOff {
		n.log.Warn("the kill switch is off: while there is no tunnel, traffic may leave beside it")
		// Without rights, or without nftables, there is none to remove.
		if stands, err := killSwitchStands(); err != nil || !stands {
			return false, nil
		}
		return false, removeKillSwitch()
	}
	heir, err = killSwitchStands()
	if err != nil {
		return false, explainNftables(err)
	}
	links, err := uplinks(n.nl, n.cfg.Interface)
	if err != nil {
		return heir, err
	}
	k := &killSwitch{log: n.log}
	if err := k.want(n.policyLocked(links)); err != nil {
		return heir, err
	}
	n.kill = k
	return heir, nil
}

func (n *network) policyLocked(links []uplink) policy {
	p := policy{tun: n.cfg.Interface, gateways: n.want.gateways, resolvers: n.want.resolvers, uplinks: links}
	if g := n.want.grant; g != nil {
		p.own, p.peers, p.gatewaySelf = g.Addresses, g.Peers, g.Gateway
	}
	return p
}

// takeDown undoes setUp, last step first. After a graceful stop the kill switch
// goes, unless it is to be kept; after a failed start it goes if it was not
// there before.
func (n *network) takeDown(graceful bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	for _, w := range n.watches {
		errs = append(errs, w.Close())
	}
	if n.names != nil {
		errs = append(errs, n.names.restore())
	}
	keep := n.kill != nil && (n.cfg.KillSwitch == KillSwitchKeep && (graceful || n.heir) || !graceful && n.heir)
	if !keep && n.want.grant != nil {
		errs = append(errs, endConnections(n.want.grant.Addresses))
	}
	if n.routes != nil {
		errs = append(errs, n.routes.remove())
	}
	if dev := n.dev.Load(); dev != nil {
		errs = append(errs, dev.Close())
	}
	switch {
	case n.kill == nil:
	case keep:
		n.log.Warn("the kill switch stays: nothing leaves this namespace; to remove it: nft delete table inet " + killSwitchTable)
	default:
		errs = append(errs, removeKillSwitch())
	}
	n.nl.Close()
	return errors.Join(errs...)
}

// report says once what was set up.
func (n *network) report() {
	dev := n.dev.Load()
	n.log.Info("the namespace is set up",
		"interface", n.cfg.Interface, "queues", len(dev.queues), "offloads", dev.dev.Offloads().String(),
		"kill_switch", n.cfg.KillSwitch.String(), "table", Table, "mark", fmt.Sprintf("%#x", Mark))
	if conf, err := os.ReadFile(resolvConf); err == nil && n.cfg.KillSwitch != KillSwitchOff && !n.cfg.ResolvConf {
		links, err := uplinks(n.nl, n.cfg.Interface)
		if err != nil {
			n.log.Warn("name servers on the link are not looked for", "error", err)
		}
		for _, a := range serversOnLink(conf, links) {
			n.log.Warn("names will not be resolved by this name server: it is on the same link, and beside the tunnel it is not asked; "+
				"put another in its place, such as 9.9.9.9", "nameserver", a, "file", resolvConf)
		}
	}
}

// syncLocked makes the namespace what it should be.
func (n *network) syncLocked() error {
	links, err := uplinks(n.nl, n.cfg.Interface)
	if err != nil {
		return err
	}
	if n.kill != nil {
		if err := n.kill.want(n.policyLocked(links)); err != nil {
			return err
		}
	}
	n.noticeLocked(links)
	n.warnLocked(links)
	dev := n.dev.Load()
	if dev == nil {
		return nil // being opened again
	}
	v4, v6 := n.grantedLocked()
	if err := dev.want(n.nl, n.want.mtu, slices.Concat(v4, v6)); err != nil {
		return err
	}
	kind := func(addrs []netip.Addr) routeKind {
		if len(addrs) > 0 {
			return intoTunnel
		}
		return unreachable
	}
	if err := n.routes.want(dev.dev.Index(), links, kind(v4), kind(v6)); err != nil {
		return err
	}
	if n.names != nil {
		return n.names.want(n.askableLocked(v4, v6))
	}
	return nil
}

// keptNames returns where resolv.conf is kept while it is not as it was.
func (n *network) keptNames() string {
	if n.names == nil {
		return ""
	}
	return n.names.kept
}

// askableLocked returns the gateway's own addresses in the network that can be
// asked from those of the device.
func (n *network) askableLocked(v4, v6 []netip.Addr) (askable []netip.Addr) {
	if n.want.grant == nil {
		return nil
	}
	for _, a := range n.want.grant.Gateway {
		if a.Is4() && len(v4) > 0 || a.Is6() && len(v6) > 0 {
			askable = append(askable, a)
		}
	}
	return askable
}

// grantedLocked returns the addresses that the device gets, and says where they
// are fewer than were granted.
func (n *network) grantedLocked() (v4, v6 []netip.Addr) {
	if n.want.grant == nil {
		return nil, nil
	}
	for _, a := range n.want.grant.Addresses {
		if a.Is4() {
			v4 = append(v4, a)
		} else {
			v6 = append(v6, a)
		}
	}
	why := ""
	switch off := ipv6Off(n.cfg.Interface); {
	case off != "":
		why = off
	case len(v6) == 0:
		why = "the gateway granted no IPv6 address"
	case n.want.mtu < minIPv6MTU:
		why = fmt.Sprintf("the path carries packets of %d bytes, and IPv6 needs %d", n.want.mtu, minIPv6MTU)
	}
	if why != n.noIPv6 {
		if why != "" {
			n.log.Warn("no IPv6 through the tunnel; IPv6 destinations are unreachable", "why", why)
		} else {
			n.log.Info("IPv6 goes through the tunnel")
		}
		n.noIPv6 = why
	}
	if why != "" {
		v6 = nil
	}
	return v4, v6
}

// keep repairs what something else has changed, until ctx ends.
func (n *network) keep(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.changed:
		case <-time.After(anyway):
		}
		n.mu.Lock()
		err := n.syncLocked()
		n.mu.Unlock()
		if ctx.Err() == nil {
			n.complain(err)
		}
		sleep(ctx, settle)
	}
}

// complain logs what could not be set, not each time.
func (n *network) complain(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil {
		n.trouble = repeated{}
		return
	}
	if times, say := n.trouble.say(err.Error(), time.Now()); say {
		n.log.Error("cannot keep the namespace as it should be; trying again", "error", err, "times", times)
	}
}
