package hub

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// resolver makes a namespace that has the gateway's own addresses.
func (w *world) resolver() container {
	w.t.Helper()
	n := newNetwork(w.t, w.lab, Config{})
	for _, ip := range gateway {
		w.route(netip.PrefixFrom(ip, ip.BitLen()), n)
	}
	n.SetUplink(&Uplink{Send: func(queue int, pkts []packet.Packet, errs tunnel.Sink) { w.pass(n, queue, pkts, errs) }})
	return n.attach("gateway", mapped(gateway, gateway))
}

// Port 53 of the network's own address is the gateway's resolver, whose answers
// come from where they are expected.
func TestResolver(t *testing.T) {
	for _, announced := range []bool{false, true} {
		t.Run(fmt.Sprintf("announced=%v", announced), func(t *testing.T) {
			w := newWorld(t)
			gw := w.resolver()
			n := w.join(dual(), 1, Uplink{Announced: announced, Peers: []netip.Prefix{netip.MustParsePrefix("10.91.0.0/16"), netip.MustParsePrefix("fd91::/64")}})
			a := n.attach("a", mapped(inside(2), outside(1, 2)))
			for _, ip := range own {
				// Nobody is there yet.
				expectError(t, dialUDP(t, a, netip.AddrPortFrom(ip, dnsPort)), syscall.ECONNREFUSED)
				refused(t, a, netip.AddrPortFrom(ip, dnsPort))
			}
			gw.ServeEcho(dnsPort)
			gw.ServeHTTP(dnsPort)
			for i, ip := range own {
				c := dialUDP(t, a, netip.AddrPortFrom(ip, dnsPort))
				for _, size := range []int{12, 512, 1232} {
					if err := exchange(c, size); err != nil {
						t.Errorf("%v: %d bytes: %v", ip, size, err)
					}
				}
				want := outside(1, 2)[i] // the member's, whatever else it announced
				if page, err := a.Get(deadline(t), "http://"+netip.AddrPortFrom(ip, dnsPort).String()); err != nil || page != netlab.Page+want.String()+"\n" {
					t.Errorf("%v by TCP: %q, %v", ip, page, err)
				}
				// Its answers could not be told from those to the network's own.
				refused(t, a, netip.AddrPortFrom(gateway[i], dnsPort))
			}
			// Other ports of the gateway are its own business.
			gw.ServeEcho(7)
			for _, ip := range gateway {
				if err := exchange(dialUDP(t, a, netip.AddrPortFrom(ip, 7)), 100); err != nil {
					t.Errorf("%v: %v", ip, err)
				}
			}
			noWrongChecksums(t, a, gw)
		})
	}
}

// A large answer of the resolver comes in fragments, of which only the first has
// a port.
func TestResolverFragments(t *testing.T) {
	w := newWorld(t)
	gw := w.resolver()
	n := w.join(dual(), 1, Uplink{})
	a := n.attach("a", mapped(inside(2), outside(1, 2)))
	for i, ip := range own {
		server, err := gw.ListenPacket("udp", netip.AddrPortFrom(gateway[i], dnsPort).String())
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		go func() {
			buf := make([]byte, 100)
			_, from, err := server.ReadFrom(buf)
			if err != nil {
				return // the client misses the answer
			}
			_, _ = server.WriteTo(make([]byte, 4000), from)
		}()
		c := dialUDP(t, a, netip.AddrPortFrom(ip, dnsPort))
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if size, err := c.Read(make([]byte, 5000)); err != nil || size != 4000 {
			t.Errorf("%v: an answer of %d bytes, %v", ip, size, err)
		}
	}
}
