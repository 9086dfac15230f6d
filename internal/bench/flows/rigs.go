package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/relay"
	"github.com/quicvpn/quicvpn/netstack"
	"github.com/quicvpn/quicvpn/tun"
)

const (
	ours   = "netstack"
	kernel = "kernel TCP proxy"

	mtu       = 1500
	queues    = 2
	iperfPort = 5201
)

// A builder makes a rig, which is a row of the table.
type builder struct {
	name  string
	build func(context.Context, netlab.TB, string) *rig
}

var builders = []builder{{kernel, kernelRig}, {ours, netstackRig}}

// A rig is a client whose connections this process ends and carries on to a
// server.
type rig struct {
	name   string
	lab    *netlab.Lab
	client *netlab.NS
	proxy  *netlab.NS
	server netip.Addr // as the client knows it
}

var (
	clientAddr  = netip.MustParsePrefix("10.99.1.1/24")
	proxyAddr   = netip.MustParsePrefix("10.99.1.2/24")
	outwardAddr = netip.MustParsePrefix("10.99.2.1/24")
	serverAddr  = netip.MustParsePrefix("10.99.2.2/24")
)

// newRig is a rig without its first half.
func newRig(ctx context.Context, tb netlab.TB, name string) *rig {
	lab := netlab.New(tb)
	r := &rig{name: name, lab: lab, client: lab.NS("client"), proxy: lab.NS("proxy"), server: serverAddr.Addr()}
	server := lab.NS("server")
	lab.Link(r.proxy, server, netlab.LinkConfig{
		A: netlab.End{Name: "out", Addresses: []netip.Prefix{outwardAddr}},
		B: netlab.End{Addresses: []netip.Prefix{serverAddr}}, MTU: mtu,
	})
	server.ServeIperf(ctx, iperfPort)
	return r
}

func (r *rig) dial(ctx context.Context) (net.Conn, error) {
	return r.proxy.DialContext(ctx, "tcp", netip.AddrPortFrom(serverAddr.Addr(), iperfPort).String())
}

// check ends the program where setting up failed.
func check(tb netlab.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatalf("%v", err)
	}
}

func kernelRig(ctx context.Context, tb netlab.TB, name string) *rig {
	r := newRig(ctx, tb, name)
	r.server = proxyAddr.Addr()
	r.lab.Link(r.client, r.proxy, netlab.LinkConfig{
		A: netlab.End{Addresses: []netip.Prefix{clientAddr}},
		B: netlab.End{Name: "in", Addresses: []netip.Prefix{proxyAddr}}, MTU: mtu,
	})
	ln, err := r.proxy.Listen("tcp", netip.AddrPortFrom(proxyAddr.Addr(), iperfPort).String())
	check(tb, err)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				if up, err := r.dial(ctx); err == nil {
					relay.Relay(ctx, c, up, nil)
				}
			}()
		}
	}()
	tb.Cleanup(func() { check(tb, ln.Close()) })
	return r
}

func netstackRig(ctx context.Context, tb netlab.TB, name string) *rig {
	r := newRig(ctx, tb, name)
	stacked(tb, r.client, func(ctx context.Context, _, _ netip.AddrPort) (net.Conn, error) { return r.dial(ctx) })
	return r
}

// stacked gives a namespace a TUN device and a stack behind it.
func stacked(tb netlab.TB, client *netlab.NS, dial func(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error)) *netstack.Stack {
	var dev *tun.Device
	check(tb, client.Do(func() (err error) {
		dev, err = tun.Open(tun.Config{Name: "tun0", Queues: queues})
		return err
	}))
	i := client.Iface("tun0")
	i.SetMTU(mtu)
	i.Up()
	i.Address(clientAddr)
	client.Route(serverAddr.Masked(), proxyAddr.Addr())
	qs := dev.Queues()
	s, err := netstack.New(netstack.Config{MTU: mtu, Dial: dial, Output: func(pkts []packet.Packet) {
		h, err := packet.Parse(pkts[0].Data)
		if err == nil {
			// The device counts what it does not take.
			_ = qs[packet.FlowHash(h, pkts[0].Data)%queues].Write(pkts)
		}
	}})
	check(tb, err)
	var reading sync.WaitGroup
	for _, q := range qs {
		reading.Go(func() {
			pkts := make([]packet.Packet, 128)
			for {
				n, err := q.Read(pkts)
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						fmt.Fprintln(os.Stderr, "bench-flows: read:", err)
					}
					return
				}
				s.Input(pkts[:n])
			}
		})
	}
	tb.Cleanup(func() {
		check(tb, s.Close())
		check(tb, dev.Close())
		reading.Wait()
	})
	return s
}
