package gateway

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink/nl"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
)

// An egressConfig says what leads out of the pools.
type egressConfig struct {
	iface        string // of the TUN device
	stateDir     string
	queues, mtu  int
	pool4, pool6 netip.Prefix
	drops        *packet.Drops
	log          *slog.Logger
	// everyForward uses IPv6's all.forwarding even where the kernel can forward
	// by interface.
	everyForward bool
}

// An egress is the gateway's way out through the kernel: the TUN device with its
// addresses and routes, the firewall, and what else the host needs to forward.
// It keeps them as they should be until close, which leaves the host as it was.
type egress struct {
	cfg   egressConfig
	ns    *netNS
	dev   *tun.Device
	index int // of the device
	fw    *firewall
	ctl   *sysctls
	made  []string          // tables that this run, or one before, has made
	watch *nl.NetlinkSocket // tells of changes of the device, addresses and routes

	// ipv6 says whether IPv6 leaves, too. The kernel may be without, or the
	// operator may have turned it off.
	ipv6 bool
	// host holds the addresses of the gateway's host.
	host atomic.Pointer[map[netip.Addr]struct{}]

	mu        sync.Mutex // guards what follows, and the order of changes to the host
	allow     map[netip.Prefix]struct{}
	ifaces    []string // by which answers to clients come
	open      forced
	lastErr   string // of refresh, so that it is logged once
	closeErr  error
	closeOnce sync.Once
}

// openEgress prepares the host. After an error the host is as it was, and also
// what an earlier run left behind is gone.
func openEgress(cfg egressConfig) (_ *egress, err error) {
	e := &egress{cfg: cfg, allow: make(map[netip.Prefix]struct{})}
	if e.ns, err = currentNetNS(); err != nil {
		return nil, err
	}
	if err := e.ns.do(e.prepare); err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, nil
}

// prepare does, in this order: what can be refused without having changed
// anything; the device, which is down; the firewall; forwarding; the device's
// addresses. So nothing is ever forwarded that the firewall does not see.
func (e *egress) prepare() (err error) {
	if e.ctl, err = openSysctls(e.cfg.stateDir); err != nil {
		return err
	}
	e.fw = newFirewall(e.cfg.iface, e.cfg.pool4, e.cfg.pool6)
	stale := e.ctl.setTable(e.fw.table)
	if stale != "" {
		e.made = append(e.made, stale)
	}
	if err := checkOverlap(e.cfg.iface, e.cfg.pool4, e.cfg.pool6); err != nil {
		return err
	}
	e.dev, err = tun.Open(tun.Config{Name: e.cfg.iface, Queues: e.cfg.queues, MTU: e.cfg.mtu, Drops: e.cfg.drops})
	if err != nil {
		return err
	}
	link, err := findLink(e.cfg.iface)
	if err != nil {
		return err
	}
	e.index = link.Attrs().Index
	e.setUpIPv6()
	if e.watch, err = subscribe(); err != nil {
		return err
	}
	e.made = append(e.made, e.fw.table)
	if err := e.refreshLocked(true); err != nil {
		return err
	}
	if stale != "" && stale != e.fw.table {
		if err := removeTable(stale); err != nil {
			return fmt.Errorf("remove the firewall of an earlier run: %w", err)
		}
	}
	if _, err := setUpLink(e.cfg, e.ipv6); err != nil {
		return err
	}
	return e.warnBlockers()
}

// setUpIPv6 finds out whether IPv6 can leave, and by which setting.
func (e *egress) setUpIPv6() {
	e.ipv6 = ipv6Enabled(e.cfg.iface)
	if !e.ipv6 {
		e.fw.pool6 = netip.Prefix{}
		e.cfg.log.Warn("IPv6 is off on this host: clients have it among themselves, and only IPv4 leaves the gateway")
		return
	}
	// By interface, unless the kernel is older than 6.17, or /proc/sys is
	// read-only: all.forwarding may have been set by who started the container.
	e.cfg.everyForward = e.cfg.everyForward || writeSysctl(force6(e.cfg.iface), "1") != nil
}

// close puts the host back as it was before. Forwarding ends before the firewall
// that bounds it.
func (e *egress) close() error {
	e.closeOnce.Do(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		var errs []error
		if e.watch != nil {
			e.watch.Close()
		}
		if e.dev != nil {
			errs = append(errs, e.dev.Close())
		}
		errs = append(errs, e.ns.do(e.undo), e.ns.close())
		if err := errors.Join(errs...); err != nil {
			e.closeErr = fmt.Errorf("leave the host as it was: %w", err)
		}
	})
	return e.closeErr
}

// undo puts settings and firewall back. The journal ends when all is done.
func (e *egress) undo() error {
	if e.ctl == nil {
		return nil
	}
	if err := e.ctl.restore(); err != nil {
		return err
	}
	for _, table := range e.made {
		if err := removeTable(table); err != nil {
			return fmt.Errorf("remove the firewall: %w", err)
		}
	}
	return e.ctl.end()
}
