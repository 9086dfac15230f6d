package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	wgtun "golang.zx2c4.com/wireguard/tun"

	"github.com/quicvpn/quicvpn/driver/hub"
	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
)

const (
	whole     = "ours, super-packets whole"
	hubbed    = "ours, through the hub of a Docker network"
	cut       = "ours, split to MTU and coalesced"
	plain     = "plain multiqueue, no offload"
	wireguard = "wireguard-go's tun"
	bridge    = "veth and bridge in the kernel"

	queues = 2 // of every device that has them
)

// A builder makes a rig, which is a row of the table.
type builder struct {
	name  string
	build func(context.Context, netlab.TB, string) *rig
}

var builders = []builder{
	{bridge, bridgeRig},
	{whole, wholeRig},
	{hubbed, hubRig},
	{cut, cutRig},
	{plain, plainRig},
	{wireguard, wireguardRig},
}

// A rig is a way from one namespace to another.
type rig struct {
	name   string
	lab    *netlab.Lab
	client *netlab.NS
	server *netlab.NS
}

var (
	clientAddr = netip.MustParseAddr("10.99.0.1")
	serverAddr = netip.MustParseAddr("10.99.0.2")
)

func newRig(tb netlab.TB, name string) *rig {
	lab := netlab.New(tb)
	return &rig{name: name, lab: lab, client: lab.NS("client"), server: lab.NS("server")}
}

// ends are the rig's namespaces with the address that each has.
func (r *rig) ends() []end {
	return []end{{r.client, clientAddr}, {r.server, serverAddr}}
}

type end struct {
	ns   *netlab.NS
	addr netip.Addr
}

// up gives a TUN link its address and raises it.
func (e end) up(name string) {
	i := e.ns.Iface(name)
	i.SetMTU(mtu)
	i.Up()
	i.Address(netip.PrefixFrom(e.addr, 24))
}

// check ends the program where setting up failed.
func check(tb netlab.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatalf("%v", err)
	}
}

func bridgeRig(ctx context.Context, tb netlab.TB, name string) *rig {
	r := newRig(tb, name)
	middle := r.lab.NS("bridge")
	nl := middle.Netlink()
	br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", MTU: mtu}}
	check(tb, nl.LinkAdd(br))
	check(tb, nl.LinkSetUp(br))
	for i, e := range r.ends() {
		port := fmt.Sprintf("port%d", i)
		r.lab.Link(e.ns, middle, netlab.LinkConfig{
			A:   netlab.End{Name: "eth0", Addresses: []netip.Prefix{netip.PrefixFrom(e.addr, 24)}},
			B:   netlab.End{Name: port},
			MTU: mtu,
		})
		link, err := nl.LinkByName(port)
		check(tb, err)
		check(tb, nl.LinkSetMaster(link, br))
	}
	r.server.ServeIperf(ctx, iperfPort)
	return r
}

// copiers starts a goroutine for each pair of queues and direction.
func copiers(tb netlab.TB, copies []func() error, closers []func() error) {
	var wg sync.WaitGroup
	for _, c := range copies {
		wg.Go(func() {
			if err := c(); !errors.Is(err, os.ErrClosed) && !errors.Is(err, net.ErrClosed) {
				fmt.Fprintln(os.Stderr, "bench-tun: copier:", err)
			}
		})
	}
	tb.Cleanup(func() {
		for _, c := range closers {
			check(tb, c())
		}
		wg.Wait()
	})
}

// ours is a rig of two of our devices and a copier for each queue.
func ours(ctx context.Context, tb netlab.TB, name string, copier func(from, to *tun.Queue) error) *rig {
	r := newRig(tb, name)
	var devs []*tun.Device
	var closers []func() error
	for _, e := range r.ends() {
		check(tb, e.ns.Do(func() error {
			d, err := tun.Open(tun.Config{Name: "tun0", Queues: queues})
			devs = append(devs, d)
			return err
		}))
		e.up("tun0")
	}
	var copies []func() error
	for i, d := range devs {
		closers = append(closers, d.Close)
		for j, q := range d.Queues() {
			copies = append(copies, func() error { return copier(q, devs[1-i].Queues()[j]) })
		}
	}
	copiers(tb, copies, closers)
	r.server.ServeIperf(ctx, iperfPort)
	return r
}

func wholeRig(ctx context.Context, tb netlab.TB, name string) *rig {
	return ours(ctx, tb, name, func(from, to *tun.Queue) error {
		pkts := make([]packet.Packet, 128)
		for {
			n, err := from.Read(pkts)
			if err == nil {
				err = to.Write(pkts[:n])
			}
			if err != nil {
				return err
			}
		}
	})
}

// hubRig is what two containers of a Docker network have between them.
func hubRig(ctx context.Context, tb netlab.TB, name string) *rig {
	r := newRig(tb, name)
	h := hub.New(hub.Config{Subnets: []netip.Prefix{netip.PrefixFrom(clientAddr, 24).Masked()}})
	tb.Cleanup(func() { check(tb, h.Close()) })
	for _, e := range r.ends() {
		var d *tun.Device
		check(tb, e.ns.Do(func() (err error) {
			d, err = tun.Open(tun.Config{Name: "tun0", Queues: queues})
			return err
		}))
		e.up("tun0")
		check(tb, h.Attach(hub.Port{ID: e.ns.Name, Device: d, Addrs: []hub.Addr{{Inside: e.addr}}}))
	}
	r.server.ServeIperf(ctx, iperfPort)
	return r
}

// cutRig does what a tunnel of single packets does, less the tunnel: each packet
// is copied once, as encryption would.
func cutRig(ctx context.Context, tb netlab.TB, name string) *rig {
	return ours(ctx, tb, name, func(from, to *tun.Queue) error {
		const most = 128
		pkts := make([]packet.Packet, 128)
		arena := make([]byte, most*2048)
		out := make([]packet.Packet, 0, most)
		var split packet.Splitter
		for {
			n, err := from.Read(pkts)
			if err != nil {
				return err
			}
			for i := range pkts[:n] {
				h, err := packet.Parse(pkts[i].Data)
				if err != nil {
					return err
				}
				split.Reset(&pkts[i], h, 0)
				for b := split.Next(); b != nil; b = split.Next() {
					at := arena[len(out)*2048:]
					out = append(out, packet.Packet{Data: at[:copy(at, b)]})
					if len(out) == most {
						if err := to.Write(out); err != nil {
							return err
						}
						out = out[:0]
					}
				}
			}
			if err := to.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
	})
}

// plainRig is what a simple TUN program does: a packet a system call.
func plainRig(ctx context.Context, tb netlab.TB, name string) *rig {
	r := newRig(tb, name)
	var ends [2][]*os.File
	var closers []func() error
	for i, e := range r.ends() {
		for range queues {
			check(tb, e.ns.Do(func() error {
				f, err := openPlain("tun0")
				if err == nil {
					ends[i] = append(ends[i], f)
					closers = append(closers, f.Close)
				}
				return err
			}))
		}
		e.up("tun0")
	}
	var copies []func() error
	for i := range ends {
		for j, from := range ends[i] {
			to := ends[1-i][j]
			copies = append(copies, func() error {
				buf := make([]byte, 65536)
				for {
					n, err := from.Read(buf)
					if err == nil {
						_, err = to.Write(buf[:n])
					}
					if err != nil {
						return err
					}
				}
			})
		}
	}
	copiers(tb, copies, closers)
	r.server.ServeIperf(ctx, iperfPort)
	return r
}

func openPlain(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_MULTI_QUEUE)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return nil, errors.Join(fmt.Errorf("make %s: %w", name, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "/dev/net/tun"), nil
}

func wireguardRig(ctx context.Context, tb netlab.TB, name string) *rig {
	r := newRig(tb, name)
	var devs []wgtun.Device
	var closers []func() error
	for _, e := range r.ends() {
		check(tb, e.ns.Do(func() error {
			d, err := wgtun.CreateTUN("tun0", mtu)
			devs = append(devs, d)
			return err
		}))
		e.up("tun0")
	}
	var copies []func() error
	for i, from := range devs {
		to := devs[1-i]
		closers = append(closers, from.Close)
		go func() {
			for range from.Events() { // it waits for a reader
			}
		}()
		copies = append(copies, func() error {
			const offset = 16 // room for the header that it writes
			bufs := make([][]byte, from.BatchSize())
			sizes := make([]int, len(bufs))
			out := make([][]byte, len(bufs))
			for i := range bufs {
				bufs[i] = make([]byte, offset+65535)
			}
			for {
				n, err := from.Read(bufs, sizes, offset)
				if err != nil {
					return err
				}
				for i := range n {
					out[i] = bufs[i][:offset+sizes[i]]
				}
				if _, err := to.Write(out[:n], offset); err != nil {
					return err
				}
			}
		})
	}
	copiers(tb, copies, closers)
	r.server.ServeIperf(ctx, iperfPort)
	return r
}
