package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
	"github.com/quicvpn/quicvpn/tunnel"
)

// addrGenNone is IN6_ADDR_GEN_MODE_NONE: no link-local address, which nobody at
// the other end could reach.
const addrGenNone = 1

// A device is the TUN device and what the kernel knows of it.
type device struct {
	dev    *tun.Device
	queues []*tun.Queue
	drops  *packet.Drops
	link   netlink.Link
}

func openDevice(cfg tun.Config) (*device, error) {
	dev, err := tun.Open(cfg)
	if err != nil {
		return nil, err
	}
	return &device{
		dev:    dev,
		queues: dev.Queues(),
		drops:  cfg.Drops,
		link:   &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: dev.Name(), Index: dev.Index()}},
	}, nil
}

func (d *device) Close() error { return d.dev.Close() }

// want gives the device an MTU, these addresses and no others, and sets it up.
func (d *device) want(h *netlink.Handle, mtu int, addrs []netip.Addr) error {
	link, err := h.LinkByIndex(d.dev.Index())
	if err != nil {
		return fmt.Errorf("find the TUN device: %w", err)
	}
	grown := link.Attrs().MTU < minIPv6MTU
	if link.Attrs().MTU != mtu {
		if err := h.LinkSetMTU(d.link, mtu); err != nil {
			return fmt.Errorf("set the MTU of %s to %d: %w", d.dev.Name(), mtu, explainRouting(err))
		}
	}
	up := link.Attrs().RawFlags&unix.IFF_UP != 0
	if !up || grown {
		// IPv6 forgets this when the MTU was too small for it.
		if err := h.LinkSetIP6AddrGenMode(d.link, addrGenNone); err != nil && mtu >= minIPv6MTU &&
			!errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("turn off link-local addresses of %s: %w", d.dev.Name(), explainRouting(err))
		}
	}
	if !up {
		if err := h.LinkSetUp(d.link); err != nil {
			return fmt.Errorf("set %s up: %w", d.dev.Name(), explainRouting(err))
		}
	}
	return d.wantAddresses(h, addrs)
}

func (d *device) wantAddresses(h *netlink.Handle, want []netip.Addr) error {
	have, err := again(func() ([]netlink.Addr, error) { return h.AddrList(d.link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", d.dev.Name(), err)
	}
	missing := slices.Clone(want)
	for _, a := range have {
		own, _ := netip.AddrFromSlice(a.IP)
		own = own.Unmap()
		if i := slices.Index(missing, own); i >= 0 && len(a.Mask)*8 == ones(a.IPNet) {
			missing = slices.Delete(missing, i, i+1)
			continue
		}
		if err := h.AddrDel(d.link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("remove address %v of %s: %w", own, d.dev.Name(), explainRouting(err))
		}
	}
	for _, a := range missing {
		addr := &netlink.Addr{IPNet: hostNet(a)}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(d.link, addr); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("give %s the address %v: %w", d.dev.Name(), a, explainRouting(err))
		}
	}
	return nil
}

// WritePackets writes packets to the device, as they are.
func (d *device) WritePackets(queue int, pkts []packet.Packet) {
	if err := d.queues[queue%len(d.queues)].Write(pkts); err != nil {
		d.drops.Add(packet.DropDevice, len(pkts))
	}
}

// pump reads all queues and hands on what it reads, until the device fails or is
// closed. It closes the device.
func (d *device) pump(to *Ender) error {
	g, ctx := errgroup.WithContext(context.Background())
	defer context.AfterFunc(ctx, func() { d.Close() })()
	for i, q := range d.queues {
		g.Go(func() error {
			pkts := make([]packet.Packet, 128)
			for {
				n, err := q.Read(pkts)
				if err != nil {
					return err
				}
				to.send(i, pkts[:n], d)
			}
		})
	}
	return g.Wait()
}

// pump carries packets until ctx ends. A device that something else has taken
// away is opened again.
func (n *network) pump(ctx context.Context, to *Ender) error {
	for ctx.Err() == nil {
		dev := n.dev.Load()
		stop := context.AfterFunc(ctx, n.closeDevice)
		err := dev.pump(to)
		stop()
		if ctx.Err() != nil {
			break
		}
		n.log.Error("the TUN device failed; opening it again", "error", err)
		n.dev.Store(nil)
		for n.dev.Load() == nil && ctx.Err() == nil {
			if err := n.reopen(); err != nil {
				n.complain(err)
				sleep(ctx, time.Second)
			}
		}
	}
	return nil
}

// closeDevice closes the device, which nothing then misses.
func (n *network) closeDevice() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if dev := n.dev.Swap(nil); dev != nil {
		dev.Close()
	}
}

// WritePackets writes packets to the device, if it is there.
func (n *network) WritePackets(queue int, pkts []packet.Packet) {
	if dev := n.dev.Load(); dev != nil {
		dev.WritePackets(queue, pkts)
	} else {
		n.drops.Add(packet.DropDevice, len(pkts))
	}
}

// reopen opens the device again. Should the rest fail, keep repeats it.
func (n *network) reopen() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.openDevice(); err != nil {
		return err
	}
	return n.syncLocked()
}

// openDevice opens the TUN device, which must not be there yet.
func (n *network) openDevice() error {
	if l, err := n.nl.LinkByName(n.cfg.Interface); err == nil {
		return fmt.Errorf("open TUN device: there is an interface %s (%s) already: choose another name with --interface, or remove it: ip link delete %[1]s", n.cfg.Interface, l.Type())
	}
	dev, err := openDevice(tun.Config{Name: n.cfg.Interface, Queues: n.cfg.Queues, MTU: n.want.mtu, Drops: n.drops})
	if err != nil {
		return fmt.Errorf("open TUN device: %w", err)
	}
	n.dev.Store(dev)
	return nil
}

// An inbox is what a session's packets go to: they are a peer's, who may be
// hostile.
type inbox struct {
	device func() *device
	own    []netip.Addr
	drops  *packet.Drops
}

// WritePackets passes on what is whole and for one of our addresses, in runs, so
// that what belongs together is written together.
func (in *inbox) WritePackets(queue int, pkts []packet.Packet) {
	dev := in.device()
	if dev == nil {
		in.drops.Add(packet.DropDevice, len(pkts))
		return
	}
	good := 0
	for i := range pkts {
		if in.accepts(&pkts[i]) {
			continue
		}
		if i > good {
			dev.WritePackets(queue, pkts[good:i])
		}
		good = i + 1
	}
	if good < len(pkts) {
		dev.WritePackets(queue, pkts[good:])
	}
}

func (in *inbox) accepts(p *packet.Packet) bool {
	h, err := packet.Parse(p.Data)
	if err == nil {
		err = p.Check(h)
	}
	switch {
	case err != nil:
		in.drops.Add(packet.DropMalformed, 1)
	case !slices.Contains(in.own, h.Dst):
		in.drops.Add(packet.DropDestination, 1)
	case !mayAnswer(h.Src) || slices.Contains(in.own, h.Src):
		in.drops.Add(packet.DropSource, 1)
	default:
		return true
	}
	return false
}

// mayAnswer reports whether an address may be a source of what comes out of the
// tunnel. From IPv6 link-local ones the kernel would take orders, such as router
// advertisements; an IPv4 one is what some clouds give their name servers, in
// whose place the gateway answers.
func mayAnswer(src netip.Addr) bool {
	return src.IsGlobalUnicast() && !src.Is4In6() || src.Is4() && src.IsLinkLocalUnicast()
}

var (
	_ tunnel.Sink = (*device)(nil)
	_ tunnel.Sink = (*inbox)(nil)
)
