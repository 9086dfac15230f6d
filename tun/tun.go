// Package tun owns Linux multiqueue TUN devices with offloads: opening and
// re-opening them, reading super-packets whole, and coalescing on write.
//
// It does not configure addresses, routes or namespaces, and does not know
// what becomes of the packets.
package tun

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

const (
	// MinMTU is what every host must take whole (RFC 791 section 3.1). Under
	// 1280 the kernel turns IPv6 off on the link.
	MinMTU = 576
	MaxMTU = 65535

	// MaxQueues is the kernel's MAX_TAP_QUEUES.
	MaxQueues = 256
	// MostDefaultQueues bounds what DefaultQueues returns.
	MostDefaultQueues = 8
)

// DefaultQueues is the number of queues where nobody says: one for each CPU that
// Go uses, and no more than help.
func DefaultQueues() int { return min(runtime.GOMAXPROCS(0), MostDefaultQueues) }

// PlainName says whether a name is one that Linux takes for a new link as it is,
// and that nftables and sysctls take without quoting.
func PlainName(name string) bool {
	return name != "" && len(name) < unix.IFNAMSIZ && name != "." && name != ".." && name != "lo" &&
		!strings.ContainsAny(name, "/:%\"\\ \t\r\n\v\f\x00")
}

// A Config says what device to open.
type Config struct {
	// Name is the link's name, at most 15 bytes. With a %d in it, and where it is
	// empty ("quic%d"), the kernel finds a number that is free. A persistent
	// device of that name is taken up again.
	Name string
	// Queues is their number, at most 256. Zero means one for each CPU that Go
	// uses, at most 8.
	Queues int
	// MTU is set on the link, 576 to 65535. Zero leaves it as it is, which is
	// 1500 on a new one.
	MTU int
	// TxQueueLen is the number of packets that a queue holds for its reader. Zero
	// leaves it as it is, which is 500 on a new device.
	TxQueueLen int
	// Persist lets the link outlive Close and the process. A device that was
	// persistent and is opened without it is gone after Close.
	Persist bool
	// Alias is a text that the link carries. Empty leaves it as it is.
	Alias string
	// DisableTSO and DisableUSO do without super-packets of TCP, and of UDP, both
	// ways.
	DisableTSO, DisableUSO bool
	// Drops counts the packets that could not be read or written. Nil means a
	// counter of the device's own that nobody sees.
	Drops *packet.Drops
}

func (c *Config) validate() error {
	switch {
	case len(c.Name) >= unix.IFNAMSIZ || strings.ContainsAny(c.Name, "/: \t\n") || c.Name == "." || c.Name == "..":
		return fmt.Errorf("tun: Name %q: a link's name has at most %d bytes, and no slash, colon or space in it", c.Name, unix.IFNAMSIZ-1)
	case c.Queues < 0 || c.Queues > MaxQueues:
		return fmt.Errorf("tun: Queues %d: too many queues, a TUN device has 1 to %d", c.Queues, MaxQueues)
	case c.MTU != 0 && (c.MTU < MinMTU || c.MTU > MaxMTU):
		return fmt.Errorf("tun: MTU %d: choose one from %d to %d, or 0 for the link's own", c.MTU, MinMTU, MaxMTU)
	case c.TxQueueLen < 0:
		return fmt.Errorf("tun: TxQueueLen %d: must not be negative", c.TxQueueLen)
	case len(c.Alias) > 255:
		return fmt.Errorf("tun: Alias of %d bytes: the kernel keeps at most 255", len(c.Alias))
	}
	if c.Name == "" {
		c.Name = "quic%d"
	}
	if c.Queues == 0 {
		c.Queues = DefaultQueues()
	}
	if c.Drops == nil {
		c.Drops = new(packet.Drops)
	}
	return nil
}

// A Device is an open TUN device.
type Device struct {
	name     string
	index    int
	offloads Offloads
	queues   []*Queue
	drops    *packet.Drops
	links    *netlink.Handle // in the namespace where the device was opened

	closed    atomic.Bool
	closeOnce sync.Once
	closeErr  error
}

// Open makes a device, or takes up a persistent one, in the network namespace
// of the calling thread. It is down until SetUp. On failure nothing is left
// open, and no link that was not there before.
func Open(cfg Config) (*Device, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("tun: netlink socket: %w", err)
	}
	d := &Device{name: cfg.Name, drops: cfg.Drops, links: links}
	if err := d.open(cfg); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (d *Device) open(cfg Config) error {
	if err := d.checkName(); err != nil {
		return err
	}
	for range cfg.Queues {
		f, err := attach(d)
		if err != nil {
			return err
		}
		q, err := newQueue(d, f)
		if err != nil {
			return errors.Join(err, f.Close())
		}
		d.queues = append(d.queues, q)
	}
	link, err := d.links.LinkByName(d.name)
	if err != nil {
		return fmt.Errorf("tun: find link %s: %w", d.name, err)
	}
	d.index = link.Attrs().Index
	if err := d.configure(link, cfg); err != nil {
		return err
	}
	return d.queues[0].control(func(fd int) error {
		if err := d.negotiate(fd, cfg); err != nil {
			return err
		}
		persist := 0
		if cfg.Persist {
			persist = 1
		}
		// Last, so that a link made by a call that fails goes with its queues.
		if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, persist); err != nil {
			return fmt.Errorf("tun: make %s persistent: %w", d.name, err)
		}
		return nil
	})
}

// checkName finds out whether the name is another's. The kernel lets a second
// process take queues of a device that is in use, and it would take its flows.
func (d *Device) checkName() error {
	link, err := d.links.LinkByName(d.name)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("tun: find link %s: %w", d.name, err)
	}
	t, ok := link.(*netlink.Tuntap)
	switch {
	case !ok || t.Mode != netlink.TUNTAP_MODE_TUN:
		return fmt.Errorf("tun: the name %s is in use by a link of type %s: choose another name", d.name, link.Type())
	case t.Flags&netlink.TUNTAP_MULTI_QUEUE == 0:
		return fmt.Errorf("tun: %s is a TUN device without multiple queues, made by another program: remove it (ip link delete %s) or choose another name", d.name, d.name)
	case t.Queues > 0:
		return fmt.Errorf("tun: %s is busy: a process has it open: stop that process or choose another name", d.name)
	}
	return nil
}

func (d *Device) configure(link netlink.Link, cfg Config) error {
	if cfg.Alias != "" {
		if err := d.links.LinkSetAlias(link, cfg.Alias); err != nil {
			return fmt.Errorf("tun: set alias of %s: %w", d.name, err)
		}
	}
	if cfg.TxQueueLen > 0 {
		if err := d.links.LinkSetTxQLen(link, cfg.TxQueueLen); err != nil {
			return fmt.Errorf("tun: set queue length of %s to %d: %w", d.name, cfg.TxQueueLen, err)
		}
	}
	if cfg.MTU > 0 {
		return d.SetMTU(cfg.MTU)
	}
	return nil
}

// Name returns the link's name at the time when it was opened.
func (d *Device) Name() string { return d.name }

// Index returns the link's index.
func (d *Device) Index() int { return d.index }

// Queues returns the queues. Each needs a reader of its own: what the kernel
// gives to a queue that nobody reads is lost.
func (d *Device) Queues() []*Queue { return d.queues }

// Offloads says what the kernel and the configuration allow.
func (d *Device) Offloads() Offloads { return d.offloads }

// SetMTU changes the link's MTU, 576 to 65535.
func (d *Device) SetMTU(mtu int) error {
	if mtu < MinMTU || mtu > MaxMTU {
		return fmt.Errorf("tun: MTU %d: choose one from %d to %d", mtu, MinMTU, MaxMTU)
	}
	if err := d.links.LinkSetMTU(d.link(), mtu); err != nil {
		return fmt.Errorf("tun: set MTU of %s to %d: %w", d.name, mtu, err)
	}
	return nil
}

// SetUp raises the link.
func (d *Device) SetUp() error {
	if err := d.links.LinkSetUp(d.link()); err != nil {
		return fmt.Errorf("tun: raise %s: %w", d.name, err)
	}
	return nil
}

func (d *Device) link() netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: d.name, Index: d.index}}
}

// Close closes the queues and wakes their readers, which get net.ErrClosed. A
// device that is not persistent is gone when it returns.
func (d *Device) Close() error {
	d.closeOnce.Do(func() {
		d.closed.Store(true)
		var errs []error
		for _, q := range d.queues {
			errs = append(errs, q.file.Close())
		}
		d.links.Close()
		d.closeErr = errors.Join(errs...)
	})
	return d.closeErr
}
