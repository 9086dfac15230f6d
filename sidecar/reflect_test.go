package sidecar

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// TestNothingIsReflected has the gateway send echo requests that claim to come
// from a neighbour, whose answers would carry to the link what it wrote.
func TestNothingIsReflected(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{})
	l.ping(toyRemote4, toyRemote6)
	neighbours := map[netip.Addr]net.PacketConn{}
	for network, neighbour := range map[string]netip.Addr{
		"ip4:icmp": netip.MustParseAddr("192.0.2.1"), "ip6:ipv6-icmp": netip.MustParseAddr("2001:db8:1::1"),
	} {
		pc, err := l.Uplink.ListenPacket(network, neighbour.String())
		if err != nil {
			t.Fatal(err)
		}
		defer pc.Close()
		neighbours[neighbour] = pc
	}
	for _, own := range []netip.Addr{toyOwn4, toyOwn6} {
		for neighbour := range neighbours {
			if neighbour.Is4() == own.Is4() {
				l.gw.inject(toyPacket, echoRequest(t, neighbour, own))
			}
		}
	}
	// The same from the internet is answered, into the tunnel.
	l.gw.take()
	l.gw.inject(toyPacket, echoRequest(t, toyRemote4, toyOwn4))
	l.eventually(func() error {
		if heard := strings.Join(l.gw.take(), "\n"); !strings.Contains(heard, "> "+toyRemote4.String()) {
			return fmt.Errorf("no answer came out of the tunnel: %q", heard)
		}
		return nil
	})
	buf := make([]byte, 1500)
	for neighbour, pc := range neighbours {
		if err := pc.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				break
			}
			if bytes.Contains(buf[:n], []byte(marker)) {
				t.Errorf("the neighbour %v got from %v: %q", neighbour, from, buf[:n])
			}
		}
	}
	l.stop(cmd)
}

// echoRequest is a ping that carries the marker.
func echoRequest(t *testing.T, from, to netip.Addr) []byte {
	t.Helper()
	m := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte(marker)}}
	var proto byte = packet.ICMP
	var pseudo []byte
	if from.Is6() {
		m.Type, proto, pseudo = ipv6.ICMPTypeEchoRequest, packet.ICMPv6, icmp.IPv6PseudoHeader(from.AsSlice(), to.AsSlice())
	}
	body, err := m.Marshal(pseudo)
	if err != nil {
		t.Fatal(err)
	}
	return ipPacket(from, to, proto, body)
}

// TestPublicSubnetIsNoLink gives the uplink subnets of the internet, as a hostile
// router advertisement or DHCP server does. What is sent there must not leave in
// clear, and a neighbour with such an address is still answered.
func TestPublicSubnetIsNoLink(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.Client.ServeHTTP(8081)
	cmd := l.start(childSettings{})
	l.ping(toyRemote4, toyRemote6)
	l.UplinkClientIf.Address(netip.MustParsePrefix("8.8.8.8/24"))
	l.UplinkClientIf.Address(netip.MustParsePrefix("2606:4700:4700::1111/64"))
	l.ClientIf.Address(netip.MustParsePrefix("8.8.8.7/24"))
	l.ClientIf.Address(netip.MustParsePrefix("2606:4700:4700::7/64"))
	sniffer := sniff(t, l.UplinkClientIf)
	for _, target := range []string{"http://8.8.8.7:8081/", "http://[2606:4700:4700::7]:8081/"} {
		l.eventually(func() error {
			_, err := l.Uplink.Get(l.ctx, target)
			return err
		})

	}
	sniffer.take()
	for _, to := range []string{"8.8.8.8", "2606:4700:4700::1111"} {
		if err := l.Client.Do(func() error {
			_ = sendUDP(net.JoinHostPort(to, "853"))("public " + to)
			_ = sendUDP(net.JoinHostPort(to, "853"), bindTo("eth0"))("public device " + to)
			_ = sendTCP(net.JoinHostPort(to, "853"))("")
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if seen := sniffer.take(); len(seen) > 0 {
		t.Errorf("these left in clear: %v\n%s", seen, l.dump())
	}
	l.ping(toyRemote4, toyRemote6)
	l.stop(cmd)
}

// TestLinkThatOverlapsLater: what is meant for the network's clients does not go
// to a link that takes their addresses while the tunnel is up.
func TestLinkThatOverlapsLater(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.Client.ServeHTTP(8081)
	cmd := l.start(childSettings{})
	l.ping(toyPeer4)
	l.UplinkClientIf.Address(netip.PrefixFrom(toyPeer4, 24))
	l.ClientIf.Address(netip.MustParsePrefix("10.88.0.77/24"))
	if err := cmd.WaitLog(l.ctx, "addresses overlap"); err != nil {
		t.Fatal(err)
	}
	sniffer := sniff(t, l.UplinkClientIf)
	if err := l.Client.Do(func() error {
		_ = sendUDP(net.JoinHostPort(toyPeer4.String(), "9"))("to a client")
		_ = sendUDP(net.JoinHostPort(toyPeer4.String(), "9"), bindTo("eth0"))("to a client, device")
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if seen := sniffer.take(); len(seen) > 0 {
		t.Errorf("these left in clear: %v\n%s", seen, l.dump())
	}
	if _, err := l.Uplink.Get(l.ctx, "http://10.88.0.77:8081/"); err != nil {
		t.Errorf("a neighbour is not answered: %v", err)
	}
	l.stop(cmd)
}
