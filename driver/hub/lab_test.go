package hub

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
)

const labMTU = 1400

var (
	subnets = []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16"), netip.MustParsePrefix("fd18::/64")}
	own     = addrs("172.18.0.1", "fd18::1")
	// gateway are the gateway's own addresses.
	gateway = addrs("10.91.0.1", "fd91::1")
)

func addrs(s ...string) (ips []netip.Addr) {
	for _, a := range s {
		ips = append(ips, netip.MustParseAddr(a))
	}
	return ips
}

// inside are the addresses of the network's n-th container.
func inside(n int) []netip.Addr {
	return addrs(fmt.Sprintf("172.18.0.%d", n), fmt.Sprintf("fd18::%x", n))
}

// outside stand for them where the host has the block of that number.
func outside(block, n int) []netip.Addr {
	return addrs(fmt.Sprintf("10.91.%d.%d", block, n), fmt.Sprintf("fd91::%x:%x", block, n))
}

// mapped joins addresses with those that stand for them; none where there are none.
func mapped(in, out []netip.Addr) (m []Addr) {
	for i := range in {
		a := Addr{Inside: in[i]}
		if out != nil {
			a.Outside = out[i]
		}
		m = append(m, a)
	}
	return m
}

// A network is a hub and its containers.
type network struct {
	*Hub
	t     testing.TB
	lab   *netlab.Lab
	drops packet.Drops
	// lost is what Lost was told.
	lost chan lostPort
}

type lostPort struct {
	id  string
	err error
}

// newNetwork makes a network without containers. Of cfg only Internal counts.
func newNetwork(t testing.TB, lab *netlab.Lab, cfg Config) *network {
	t.Helper()
	n := &network{t: t, lab: lab, lost: make(chan lostPort, 100)}
	cfg.Drops = &n.drops
	cfg.Lost = func(id string, err error) { n.lost <- lostPort{id, err} }
	n.Hub = New(cfg)
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Errorf("close the hub: %v", err)
		}
	})
	return n
}

// dual is the configuration of a network with both IP versions.
func dual() Config { return Config{Subnets: subnets, Own: own} }

// A container is a namespace with a device that is attached.
type container struct {
	*netlab.NS
	dev *tun.Device
}

// attach makes a container and attaches it.
func (n *network) attach(id string, ips []Addr) container {
	n.t.Helper()
	c := n.container(id, ips, 2)
	if err := n.Attach(Port{ID: id, Device: c.dev, Addrs: ips}); err != nil {
		n.t.Fatal(err)
	}
	return c
}

// container makes a namespace with a device, addresses and routes as Docker does.
func (n *network) container(id string, ips []Addr, queues int) container {
	n.t.Helper()
	ns := n.lab.NS(id)
	c := container{NS: ns, dev: n.device(ns, queues)}
	eth := ns.Iface("eth0")
	eth.Up()
	for _, a := range ips {
		bits := a.Inside.BitLen()
		for _, s := range n.cfg.Subnets {
			if s.Contains(a.Inside) {
				bits = s.Bits()
			}
		}
		eth.Address(netip.PrefixFrom(a.Inside, bits))
		waitLocal(n.t, ns, a.Inside)
	}
	for _, args := range []string{"-4", "-6"} {
		cmd := ns.Command(context.Background(), "ip", args, "route", "add", "default", "dev", "eth0")
		if out, err := cmd.CombinedOutput(); err != nil {
			n.t.Fatalf("default route: %v: %s", err, out)
		}
	}
	return c
}

// device opens a container's device in a namespace.
func (n *network) device(ns *netlab.NS, queues int) *tun.Device {
	n.t.Helper()
	return n.deviceNamed(ns, "eth0", queues)
}

func (n *network) deviceNamed(ns *netlab.NS, name string, queues int) (d *tun.Device) {
	n.t.Helper()
	if err := ns.Do(func() (err error) {
		d, err = tun.Open(tun.Config{Name: name, Queues: queues, MTU: labMTU, Drops: &n.drops})
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { d.Close() })
	return d
}

// waitLocal waits until the kernel takes packets for a new address.
func waitLocal(t testing.TB, ns *netlab.NS, addr netip.Addr) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		routes, err := ns.Netlink().RouteGet(addr.AsSlice())
		if err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v does not become usable: %v, %v", addr, routes, err)
		}
	}
}

// dropped returns how many packets were dropped for a reason.
func (n *network) dropped(why packet.Drop) uint64 { return n.drops.Snapshot()[why.String()] }

// eventually waits until f returns nil.
func eventually(t testing.TB, f func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for err := f(); err != nil; err = f() {
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}
