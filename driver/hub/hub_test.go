package hub

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
	"github.com/quicvpn/quicvpn/tunnel"
)

func TestAttachRefuses(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	ns := n.lab.NS("a")
	if err := n.Attach(Port{ID: "there", Device: n.device(ns, 1), Addrs: mapped(inside(2), outside(1, 2))}); err != nil {
		t.Fatal(err)
	}
	dev := n.device(n.lab.NS("b"), 1)
	for name, p := range map[string]Port{
		"without a device":       {ID: "x", Addrs: mapped(inside(3), nil)},
		"without an address":     {ID: "x", Device: dev},
		"an invalid address":     {ID: "x", Device: dev, Addrs: []Addr{{}}},
		"the network's own":      {ID: "x", Device: dev, Addrs: mapped(own, nil)},
		"multicast":              {ID: "x", Device: dev, Addrs: mapped(addrs("224.0.0.1"), nil)},
		"IPv4 in IPv6":           {ID: "x", Device: dev, Addrs: mapped(addrs("::ffff:10.0.0.1"), nil)},
		"another version":        {ID: "x", Device: dev, Addrs: mapped(inside(3)[:1], outside(1, 3)[1:])},
		"one attached already":   {ID: "there", Device: dev, Addrs: mapped(inside(3), nil)},
		"the same one once more": {ID: "there", Device: dev, Addrs: mapped(inside(2), outside(1, 2))},
	} {
		if err := n.Attach(p); err == nil || !strings.Contains(err.Error(), "attach "+p.ID) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := n.Attach(Port{ID: "x", Device: dev, Addrs: mapped(inside(3), nil)}); err != nil {
		t.Errorf("the device was not left alone: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	late := n.device(n.lab.NS("c"), 1)
	if err := n.Attach(Port{ID: "late", Device: late, Addrs: mapped(inside(4), nil)}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("attach after Close: %v", err)
	}
	if err := late.SetUp(); err != nil {
		t.Errorf("the device was not left alone: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Errorf("close again: %v", err)
	}
}

func TestSetOutsideRefuses(t *testing.T) {
	b := newBench(t, dual())
	for name, m := range map[string][]Addr{
		"an address that is not its": mapped(inside(9), outside(1, 9)),
		"another version":            mapped(inside(2)[:1], outside(1, 9)[1:]),
		"another's outside":          mapped(inside(2), outside(1, 3)),
		"another's inside":           mapped(inside(2), inside(3)),
	} {
		if err := b.SetOutside("a", m); err == nil || !strings.Contains(err.Error(), "map ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Nothing of all this has changed anything.
	if way, is := b.send("a", udp(in2[0], web[0], 80, "x")); way != "gateway" || is != flow(out2[0], web[0], "80") {
		t.Errorf("a packet goes to %q as %q", way, is)
	}
	if err := b.SetOutside("nobody", mapped(inside(9), outside(1, 9))); err != nil {
		t.Errorf("an unknown container: %v", err)
	}
	// One can be taken away, and given to another.
	if err := errors.Join(b.SetOutside("a", mapped(in2, nil)), b.SetOutside("b", mapped(in3, out2))); err != nil {
		t.Error(err)
	}
	if way, _ := b.send("a", udp(in2[0], web[0], 80, "x")); way != "" {
		t.Errorf("without a mapping a packet goes to %q", way)
	}
	if _, is := b.send("b", udp(in3[0], web[0], 80, "x")); is != flow(out2[0], web[0], "80") {
		t.Errorf("a packet goes as %q", is)
	}
}

// wantLost waits for the loss of a container.
func (n *network) wantLost(t *testing.T, id string, why func(error) bool) {
	t.Helper()
	select {
	case l := <-n.lost:
		if l.id != id || !why(l.err) {
			t.Errorf("lost %s: %v", l.id, l.err)
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("nobody hears of the loss of %s", id)
	}
}

// closed reports whether a device's queues are.
func closed(d *tun.Device) bool {
	return errors.Is(d.Queues()[0].Write(single(udp(in2[0], in3[0], 80, "x"))), net.ErrClosed)
}

// A new container with an old one's address takes its place.
func TestEviction(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	old := n.attach("old", mapped(inside(2), outside(1, 2)))
	b := n.attach("b", mapped(inside(3), outside(1, 3)))
	bystander := n.attach("bystander", mapped(inside(4), outside(1, 4)))
	transfer(t, b, old, inside(2)[0], inside(2)[0], 1<<20)
	next := n.attach("next", mapped(inside(2)[:1], nil)) // one of the addresses is enough
	n.wantLost(t, "old", func(err error) bool { return errors.Is(err, ErrEvicted) })
	if !closed(old.dev) {
		t.Error("the old container's device is open")
	}
	transfer(t, b, next, inside(2)[0], inside(2)[0], 1<<20)
	refused(t, b, netip.AddrPortFrom(inside(2)[1], 80)) // the other is nobody's
	// The address outside counts as well.
	n.attach("third", mapped(inside(5), outside(1, 3)))
	n.wantLost(t, "b", func(err error) bool { return errors.Is(err, ErrEvicted) })
	transfer(t, bystander, next, inside(2)[0], inside(2)[0], 1<<20)
	n.Detach("old")
	transfer(t, bystander, next, inside(2)[0], inside(2)[0], 1<<20)
	if len(n.lost) != 0 {
		t.Errorf("also lost: %v", <-n.lost)
	}
}

func TestDetach(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	a := n.attach("a", mapped(inside(2), outside(1, 2)))
	b := n.attach("b", mapped(inside(3), outside(1, 3)))
	n.Detach("nobody")
	n.Detach("b")
	if !closed(b.dev) {
		t.Error("the device is open")
	}
	for _, ip := range inside(3) {
		refused(t, a, netip.AddrPortFrom(ip, 80))
	}
	n.Detach("b")
	again := n.attach("b", mapped(inside(3), outside(1, 3)))
	for _, ip := range inside(3) {
		transfer(t, a, again, ip, ip, 1<<20)
	}
	if len(n.lost) != 0 {
		t.Errorf("lost: %v", <-n.lost)
	}
}

// A container dies, and its namespace with it: the device, which came from the
// host's namespace, is gone without a word.
func TestLost(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	b := n.attach("b", mapped(inside(3), nil))
	host := n.lab.NS("host")
	dev := n.device(host, 2)
	doomed := host.Start(deadline(t), "unshare", "--net", "sh", "-c", "echo ready; exec sleep 1000")
	if err := doomed.WaitLog(deadline(t), "ready"); err != nil {
		t.Fatal(err)
	}
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: dev.Index()}}
	if err := host.Netlink().LinkSetNsPid(link, doomed.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if err := n.Attach(Port{ID: "doomed", Device: dev, Addrs: mapped(inside(2), nil)}); err != nil {
		t.Fatal(err)
	}
	if err := dev.Queues()[0].Write(nil); err != nil {
		t.Fatalf("before the end: %v", err)
	}
	doomed.Kill()
	n.wantLost(t, "doomed", func(err error) bool { return err != nil && !errors.Is(err, ErrEvicted) })
	if !closed(dev) {
		t.Error("its device is open")
	}
	for _, ip := range inside(2) {
		refused(t, b, netip.AddrPortFrom(ip, 80))
	}
	n.Detach("doomed")
	if len(n.lost) != 0 {
		t.Errorf("lost again: %v", <-n.lost)
	}
}

// Everything at once, under traffic: nothing races, hangs or stays behind.
func TestRaces(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	sent := &quiet{}
	up := &Uplink{Send: sent.Send, Gateway: gateway, Peers: peers}
	spaces := []*netlab.NS{n.lab.NS("one"), n.lab.NS("two"), n.lab.NS("three")}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	forever := func(f func(round int)) {
		wg.Go(func() {
			for round := 0; ; round++ {
				select {
				case <-stop:
					return
				default:
					f(round)
				}
			}
		})
	}
	var done sync.WaitGroup
	for i, ns := range spaces {
		done.Go(func() {
			for round := range 20 {
				// Two share an address: they evict each other.
				id := fmt.Sprintf("%s-%d", ns.Name, round)
				who := min(i, 1) + 2
				var d *tun.Device
				if err := ns.Do(func() (err error) {
					d, err = tun.Open(tun.Config{Queues: 2, Drops: &n.drops})
					return err
				}); err != nil {
					t.Error(err)
					return
				}
				if err := errors.Join(d.SetUp(), n.Attach(Port{ID: id, Device: d, Addrs: mapped(inside(who), outside(1, who))})); err != nil {
					t.Error(err)
				}
				if round%3 == 0 {
					d.Close() // under the hub's hands
				}
				if err := n.SetOutside(id, mapped(inside(who), nil)); err != nil {
					t.Error(err)
				}
				if round%2 == 0 {
					n.Detach(id)
				}
				if !closed(d) && round%2 == 0 {
					t.Errorf("%s: the device is open after Detach", id)
				}
			}
		})
	}
	forever(func(round int) { n.SetUplink([]*Uplink{up, nil}[round%2]) })
	forever(func(round int) {
		n.WritePackets(round, single(udp(web[0], outside(1, 2)[0], 80, "x"), udp(web[1], outside(1, 3)[1], 80, "x")))
	})
	forever(func(int) {
		if from, ok := n.table.Load().inside[inside(2)[0]]; ok {
			r := &reader{hub: n.Hub, port: from.port}
			r.forward(single(udp(inside(2)[0], inside(3)[0], 80, "x"), udp(inside(2)[0], web[0], 80, "x"), ping(inside(2)[0], own[0])))
		}
	})
	forever(func(int) { n.Detach(fmt.Sprintf("one-%d", rand.IntN(20))) })
	done.Wait()
	close(stop)
	wg.Wait()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// A quiet uplink takes everything.
type quiet struct{}

func (*quiet) Send(int, []packet.Packet, tunnel.Sink) {}
