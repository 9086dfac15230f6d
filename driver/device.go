package driver

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/quicvpn/quicvpn/internal/nsenter"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
)

// Devices are persistent, so that they outlive the driver with their addresses
// and routes, and known by their alias, because the engine renames them.

const aliasPrefix = "quicvpn:"

func alias(endpoint string) string { return aliasPrefix + endpoint }

// deviceName is what a device is called in the host's namespace.
func deviceName(endpoint string) string { return "qv" + short(endpoint) }

// openDevice makes an endpoint's device in the namespace of the driver.
func openDevice(endpoint string, queues, mtu int, drops *packet.Drops) (*tun.Device, error) {
	device, err := tun.Open(tun.Config{
		Name: deviceName(endpoint), Alias: alias(endpoint), Queues: queues, MTU: mtu, Persist: true, Drops: drops,
	})
	if err != nil {
		return nil, fmt.Errorf("make the container's device: %w", err)
	}
	return device, nil
}

// reopenDevice takes up a device of an earlier run, where it is now: in the
// sandbox, or still with the driver, where the engine takes it from as soon as it
// gets there.
func reopenDevice(sandbox, endpoint string, queues int, drops *packet.Drops) (device *tun.Device, mtu int, err error) {
	open := func() error {
		link, err := findDevice(endpoint)
		if err != nil {
			return err
		}
		mtu = link.Attrs().MTU
		device, err = tun.Open(tun.Config{Name: link.Attrs().Name, Queues: queues, Persist: true, Drops: drops})
		return err
	}
	// First where it leaves from, so that it is not missed in between.
	if err = open(); errors.Is(err, errNoDevice) {
		err = nsenter.Do(sandbox, open)
	}
	return device, mtu, err
}

// errNoDevice is the error where a namespace does not have an endpoint's device.
var errNoDevice = errors.New("the container's device is gone")

// findDevice looks for an endpoint's device in the namespace of the thread.
func findDevice(endpoint string) (netlink.Link, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		if l.Attrs().Alias == alias(endpoint) {
			return l, nil
		}
	}
	return nil, errNoDevice
}

// deleteDevice removes an endpoint's device from the driver's namespace, if it
// is there. Its name is enough: a container that may change its network may have
// given it another alias before the engine moved it back.
func deleteDevice(endpoint string) error {
	link, err := netlink.LinkByName(deviceName(endpoint))
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return fmt.Errorf("remove the container's device: %w", err)
	}
	return nil
}

// deleteStrays removes devices of ours that no container has: the engine gives
// back those of containers that end.
func (d *Driver) deleteStrays() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		endpoint, ours := strings.CutPrefix(l.Attrs().Alias, aliasPrefix)
		if !ours || l.Attrs().Name != deviceName(endpoint) || d.hasJoined(endpoint) {
			continue
		}
		d.cfg.Log.Info("remove a device that no container has", "device", l.Attrs().Name)
		if err := netlink.LinkDel(l); err != nil {
			return fmt.Errorf("remove %s: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

// hasJoined reports whether a device is one that was taken up.
func (d *Driver) hasJoined(endpoint string) bool {
	return slices.ContainsFunc(d.all(), func(n *network) bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.joined[endpoint] != nil
	})
}

// mtuLocked is the MTU that a container's device has to have. Before the path is
// known it is what every path carries.
func (n *network) mtuLocked(e *endpointRecord) int {
	if n.record.Internal {
		return cmp.Or(n.record.MTU, maxMTU)
	}
	mtu := minMTU
	if x := n.record.exit(e.Exit); x != nil && x.MTU != 0 {
		mtu = x.MTU
	}
	if n.record.MTU != 0 {
		mtu = min(mtu, n.record.MTU)
	}
	if slices.ContainsFunc(e.Addrs, netip.Addr.Is6) {
		// With less the kernel takes IPv6 off the device, with addresses and routes
		// that nobody brings back. TCP does not mind a path that carries less, and
		// other packets that do not fit are answered.
		mtu = max(mtu, minMTU)
	}
	return mtu
}

// syncMTULocked gives every device its MTU. One that is on its way into a
// sandbox is looked for again later.
func (n *network) syncMTULocked() {
	for id, e := range n.joined {
		mtu := n.mtuLocked(e.record)
		if e.mtu == mtu {
			continue
		}
		err := nsenter.Do(e.record.Sandbox, func() error {
			link, err := findDevice(id)
			if err != nil {
				return err
			}
			return netlink.LinkSetMTU(link, mtu)
		})
		switch {
		case err == nil:
			e.mtu = mtu
		case errors.Is(err, nsenter.ErrGone), errors.Is(err, errNoDevice):
		default:
			n.log.Warn("set the MTU of a container's device", "mtu", mtu, "error", err)
		}
	}
}

// startGrace is how long a container may take from CreateEndpoint to Join, and
// from Join until its device is in its sandbox.
const startGrace = time.Minute

// check looks for sandboxes that are gone, and for endpoints that nobody joins or
// deletes, which the engine has not told, and follows what devices were late for.
func (n *network) check() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	n.syncMTULocked()
	lost := false
	for id, e := range n.joined {
		var err error
		if e.moved {
			err = nsenter.Do(e.record.Sandbox, func() error { return nil })
		} else {
			err = n.movedLocked(e)
		}
		// Other errors, such as that descriptors ran out, say nothing of it.
		gone := errors.Is(err, nsenter.ErrGone) || errors.Is(err, errNoDevice)
		if !gone || !e.moved && time.Since(e.since) < startGrace {
			continue
		}
		n.log.Info("a container is gone without a word from the engine", "endpoint", short(id))
		n.forgetLocked(id)
		lost = true
	}
	for _, id := range n.idleLocked() {
		n.log.Info("the engine has not come back to an endpoint", "endpoint", short(id))
		n.forgetLocked(id)
		lost = true
	}
	if lost {
		n.complain(n.saveLocked())
	}
}

// idleLocked returns the endpoints that were not joined for long: the engine, or
// the driver, was killed before it could be, or before its deletion.
func (n *network) idleLocked() (ids []string) {
	idle := make(map[string]time.Time)
	for _, e := range n.record.Endpoints {
		if n.joined[e.ID] != nil {
			continue
		}
		since, known := n.idle[e.ID]
		if !known {
			since = time.Now()
		}
		if time.Since(since) < startGrace {
			idle[e.ID] = since
		} else {
			ids = append(ids, e.ID)
		}
	}
	n.idle = idle
	return ids
}

// lost is told by the hub that a device has failed: its namespace is gone.
func (n *network) lost(id string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || n.joined[id] == nil {
		return
	}
	n.log.Info("a container's device is gone", "endpoint", short(id), "reason", err)
	n.forgetLocked(id)
	n.complain(n.saveLocked())
}
