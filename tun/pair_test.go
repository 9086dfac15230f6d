package tun

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// A pair is two namespaces, each with a device, and this program between them.
type pair struct {
	ns  [2]*netlab.NS
	dev [2]*Device
	// seen is called for every packet that came from a device.
	seen func(from, queue int, p packet.Packet, h packet.Header)

	mu  sync.Mutex // guards bad
	bad []string   // what is wrong with packets that were cut
}

var (
	pair4 = [2]netip.Addr{netip.MustParseAddr("10.7.0.1"), netip.MustParseAddr("10.7.0.2")}
	pair6 = [2]netip.Addr{netip.MustParseAddr("fd07::1"), netip.MustParseAddr("fd07::2")}
)

const pairMTU = 1400

// newPair connects two devices. With cut all super-packets are cut, and every
// packet is checked as it would be on a wire.
func newPair(t *testing.T, cfg [2]Config, cut bool, seen func(from, queue int, p packet.Packet, h packet.Header)) *pair {
	t.Helper()
	lab := netlab.New(t)
	p := &pair{seen: seen}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	for i := range p.ns {
		p.ns[i] = lab.NS([]string{"a", "b"}[i])
		cfg[i].Name, cfg[i].MTU = "tun0", pairMTU
		p.dev[i] = open(t, p.ns[i], cfg[i])
		if err := p.dev[i].SetUp(); err != nil {
			t.Fatal(err)
		}
		link := p.ns[i].Iface("tun0")
		link.Address(netip.PrefixFrom(pair4[i], 24))
		link.Address(netip.PrefixFrom(pair6[i], 64))
		waitLocal(t, p.ns[i], pair6[i])
	}
	for i, d := range p.dev {
		for j, q := range d.Queues() {
			to := p.dev[1-i].Queues()
			wg.Go(func() {
				if err := p.copy(i, j, q, to[j%len(to)], cut); !errors.Is(err, net.ErrClosed) {
					t.Errorf("copier: %v", err)
				}
			})
		}
	}
	t.Cleanup(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.bad != nil {
			t.Errorf("%d packets would be wrong on a wire, the first: %s", len(p.bad), p.bad[0])
		}
		for i, d := range p.dev {
			if drops := d.drops.Snapshot(); drops["malformed"] != 0 || drops["device"] != 0 {
				t.Errorf("device %d dropped %v", i, drops)
			}
		}
	})
	return p
}

// waitLocal waits until the kernel takes packets for a new IPv6 address.
func waitLocal(t *testing.T, ns *netlab.NS, addr netip.Addr) {
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

func (p *pair) copy(from, queue int, in, out *Queue, cut bool) error {
	pkts := make([]packet.Packet, 128)
	var split packet.Splitter
	for {
		n, err := in.Read(pkts)
		if err != nil {
			return err
		}
		if p.seen != nil {
			for _, pkt := range pkts[:n] {
				h, err := packet.Parse(pkt.Data)
				if err != nil {
					return err
				}
				p.seen(from, queue, pkt, h)
			}
		}
		if !cut {
			if err := out.Write(pkts[:n]); err != nil {
				return err
			}
			continue
		}
		var singles []packet.Packet
		for i := range pkts[:n] {
			h, err := packet.Parse(pkts[i].Data)
			if err != nil {
				return err
			}
			split.Reset(&pkts[i], h, 0)
			for b := split.Next(); b != nil; b = split.Next() {
				p.check(b)
				singles = append(singles, packet.Packet{Data: slices.Clone(b)})
			}
		}
		if err := out.Write(singles); err != nil {
			return err
		}
	}
}

// check looks at a packet as the next router and the receiver would.
func (p *pair) check(b []byte) {
	h, err := packet.Parse(b)
	wrong := ""
	switch {
	case err != nil:
		wrong = err.Error()
	case len(b) > pairMTU:
		wrong = "larger than the MTU"
	case h.Version == 4 && onesComplement(b[:h.IPLen]) != 0xffff:
		wrong = "IPv4 header checksum"
	case h.Version == 4 && h.Proto == packet.UDP && h.HeaderLen > h.IPLen && b[h.IPLen+6] == 0 && b[h.IPLen+7] == 0:
		// Sent without one.
	case !h.Fragment && h.HeaderLen > h.IPLen:
		acc := h.Src.AsSlice()
		acc = append(acc, h.Dst.AsSlice()...)
		n := len(b) - h.IPLen
		acc = append(acc, 0, h.Proto, byte(n>>8), byte(n))
		acc = append(acc, b[h.IPLen:]...)
		if onesComplement(acc) != 0xffff {
			wrong = "transport checksum"
		}
	}
	if wrong != "" {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.bad = append(p.bad, wrong)
	}
}

// onesComplement is RFC 1071 as simple as it gets.
func onesComplement(b []byte) uint16 {
	var acc uint32
	for i, x := range b {
		acc += uint32(x) << (8 * uint(1-i%2))
		acc = acc>>16 + acc&0xffff
	}
	return uint16(acc)
}

// none is a device without super-packets.
var none = Config{DisableTSO: true, DisableUSO: true}

// everyPair runs a test with every kind of pair.
func everyPair(t *testing.T, f func(t *testing.T, p *pair)) {
	for name, c := range map[string]struct {
		cfg [2]Config
		cut bool
	}{
		"whole":                      {},
		"cut and coalesced":          {cut: true},
		"whole, one end without":     {cfg: [2]Config{{}, none}},
		"cut, neither end with":      {cfg: [2]Config{none, none}, cut: true},
		"whole, four and two queues": {cfg: [2]Config{{Queues: 4}, {Queues: 2}}},
	} {
		t.Run(name, func(t *testing.T) { f(t, newPair(t, c.cfg, c.cut, nil)) })
	}
}
