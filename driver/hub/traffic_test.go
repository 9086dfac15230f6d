package hub

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// transfer sends data from one container to a server in another, which sends it
// back, and returns the client's address as the server saw it.
func transfer(t *testing.T, from, to container, listen, dial netip.Addr, size int) (seen netip.Addr) {
	t.Helper()
	ln, err := to.Listen("tcp", netip.AddrPortFrom(listen, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	served := make(chan netip.Addr, 1)
	go func() {
		defer close(served)
		c, err := ln.Accept()
		if err != nil {
			return // the client's failure is reported
		}
		defer c.Close()
		served <- c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
		io.Copy(c, c)
	}()
	port := ln.Addr().(*net.TCPAddr).AddrPort().Port()
	ctx, cancel := context.WithTimeout(deadline(t), 5*time.Second)
	defer cancel()
	c, err := from.DialContext(ctx, "tcp", netip.AddrPortFrom(dial, port).String())
	if err != nil {
		t.Errorf("dial %v: %v", dial, err)
		return netip.Addr{}
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Error(err)
	}
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		sent <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	h := sha256.New()
	got, err := io.Copy(h, c)
	if err := errors.Join(err, <-sent); err != nil {
		t.Errorf("%v: %v", dial, err)
	}
	if want := sha256.Sum256(data); !bytes.Equal(h.Sum(nil), want[:]) {
		t.Errorf("%v: %d bytes came back of %d, or others", dial, got, size)
	}
	return <-served
}

// received returns what arrived at a container's link: packets, as its device
// takes them, and bytes.
func received(t *testing.T, c container, link string) (packets, bytes uint64) {
	t.Helper()
	l, err := c.Netlink().LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}
	s := l.Attrs().Statistics
	return s.RxPackets, s.RxBytes
}

func TestContainerToContainer(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	a := n.attach("a", mapped(inside(2), nil))
	b := n.attach("b", mapped(inside(3), nil))
	for i, to := range inside(3) {
		const size = 32 << 20
		before, beforeBytes := received(t, b, "eth0")
		if seen := transfer(t, a, b, to, to, size); seen != inside(2)[i] {
			t.Errorf("%v sees the client as %v", to, seen)
		}
		after, afterBytes := received(t, b, "eth0")
		packets, bytes := after-before, afterBytes-beforeBytes
		// The acknowledgements of what comes back are among them.
		if mean := bytes / packets; bytes < size || mean < 4*labMTU {
			t.Errorf("%v: %d packets of %d bytes: super-packets do not come whole", to, packets, mean)
		}
		for _, size := range []int{8, 1300, 5000} {
			rtts, err := a.Ping(deadline(t), netlab.Ping{To: to, Count: 3, Interval: 5 * time.Millisecond, Size: size})
			if err != nil || len(rtts) != 3 {
				t.Errorf("%v with %d bytes: %d answers of 3, %v", to, size, len(rtts), err)
			}
		}
	}
	noWrongChecksums(t, a, b)
	for _, why := range []packet.Drop{packet.DropMalformed, packet.DropSource, packet.DropDevice, packet.DropNoSession} {
		if n := n.dropped(why); n != 0 {
			t.Errorf("%d packets dropped: %v", n, why)
		}
	}
}

// noWrongChecksums asks the kernel of each container.
func noWrongChecksums(t *testing.T, cs ...container) {
	t.Helper()
	for _, c := range cs {
		out, err := c.Command(context.Background(), "nstat", "-asz", "TcpInCsumErrors", "UdpInCsumErrors", "Udp6InCsumErrors", "Icmp6InCsumErrors", "IcmpInCsumErrors").CombinedOutput()
		if err != nil {
			t.Fatalf("nstat: %v: %s", err, out)
		}
		for line := range bytes.Lines(out) {
			var name string
			var count int
			if n, _ := fmt.Sscan(string(line), &name, &count); n == 2 && count != 0 {
				t.Errorf("%s in %s: %d", name, c.Name, count)
			}
		}
	}
}

func TestOwnAddressAnswersPing(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	a := n.attach("a", mapped(inside(2), nil))
	for _, ip := range own {
		for _, size := range []int{8, 1300} {
			rtts, err := a.Ping(deadline(t), netlab.Ping{To: ip, Count: 3, Interval: 5 * time.Millisecond, Size: size})
			if err != nil || len(rtts) != 3 {
				t.Errorf("%v with %d bytes: %d answers of 3, %v", ip, size, len(rtts), err)
			}
		}
		refused(t, a, netip.AddrPortFrom(ip, 80))
	}
	for _, ip := range inside(99) { // nobody
		refused(t, a, netip.AddrPortFrom(ip, 80))
	}
	noWrongChecksums(t, a)
}

// refused expects that a connection fails by an ICMP error.
func refused(t *testing.T, from container, to netip.AddrPort) {
	t.Helper()
	start := time.Now()
	c, err := from.DialContext(deadline(t), "tcp", to.String())
	if err == nil {
		c.Close()
	}
	var timeout net.Error
	if err == nil || errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("dial %v from %s: %v after %v, want a refusal", to, from.Name, err, time.Since(start))
	}
}

func TestSpoofedSource(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	a := n.attach("a", mapped(inside(2), nil))
	b := n.attach("b", mapped(inside(3), nil))
	for i, to := range inside(3) {
		server, err := b.ListenPacket("udp", netip.AddrPortFrom(to, 0).String())
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		foreign := []netip.Addr{inside(77)[i], inside(4)[i], own[i], addrs("203.0.113.9", "2001:db8::9")[i]}
		before := n.dropped(packet.DropSource)
		for _, ip := range append(foreign, inside(2)[i]) {
			if ip != inside(2)[i] {
				a.Iface("lo").Address(netip.PrefixFrom(ip, ip.BitLen()))
				waitLocal(t, a.NS, ip)
			}
			client, err := a.ListenPacket("udp", netip.AddrPortFrom(ip, 0).String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			if _, err := client.WriteTo([]byte(ip.String()), server.LocalAddr()); err != nil {
				t.Fatal(err)
			}
		}
		buf := make([]byte, 100)
		if err := server.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if size, _, err := server.ReadFrom(buf); err != nil || string(buf[:size]) != inside(2)[i].String() {
			t.Errorf("got %q, %v; want what came from the container's own address alone", buf[:size], err)
		}
		eventually(t, func() error {
			if got := n.dropped(packet.DropSource) - before; got != uint64(len(foreign)) {
				return fmt.Errorf("%d packets dropped for their source, want %d", got, len(foreign))
			}
			return nil
		})
	}
}

func TestInternal(t *testing.T) {
	cfg := dual()
	cfg.Internal = true
	n := newNetwork(t, netlab.New(t), cfg)
	sent := &recorder{}
	n.SetUplink(&Uplink{Send: sent.Send, Gateway: gateway, Announced: true, Peers: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}})
	a := n.attach("a", mapped(inside(2), outside(1, 2)))
	b := n.attach("b", mapped(inside(3), outside(1, 3)))
	for i, web := range addrs("203.0.113.10", "2001:db8:3::10") {
		refused(t, a, netip.AddrPortFrom(web, 80))
		refused(t, a, netip.AddrPortFrom(own[i], 53))
		transfer(t, a, b, inside(3)[i], inside(3)[i], 1<<20)
		before := n.dropped(packet.DropDestination)
		n.WritePackets(0, single(udp(web, inside(2)[i], 53, "x"), udp(web, outside(1, 2)[i], 53, "x")))
		if got := n.dropped(packet.DropDestination) - before; got != 2 {
			t.Errorf("%d of 2 packets from the tunnel were dropped", got)
		}
	}
	if got := sent.take(); len(got) != 0 {
		t.Errorf("%d packets have left the host", len(got))
	}
}
