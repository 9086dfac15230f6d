package sidecar

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// TestNeighboursAndPublishedPorts: what is on the link can be reached, and what
// comes in beside the tunnel is answered there, from off the link too.
func TestNeighboursAndPublishedPorts(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, name := range []string{"all", "default", "eth0"} {
		l.Client.Sysctl("net.ipv4.conf."+name+".rp_filter", "1")
	}
	l.Uplink.ServeEcho(7)
	l.Uplink.ServeHTTP(8080)
	l.Client.ServeHTTP(8081)
	cmd := l.start(childSettings{})
	get := func(ns *netlab.NS, url string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(l.ctx, 3*time.Second)
		defer cancel()
		if _, err := ns.Get(ctx, url); err != nil {
			t.Errorf("get %s from %s: %v\n%s", url, ns.Name, err, l.dump())
		}
	}
	sniffer := sniff(t, l.UplinkClientIf)
	all := func() {
		t.Helper()
		// Neighbours are found, and an address is kept.
		l.sh("ip", "neigh", "flush", "dev", "eth0")
		if err := l.Client.Do(func() error {
			return sendUDP("255.255.255.255:67", bindTo("eth0"), broadcasting, func(fd int) error {
				return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
					unix.Bind(fd, &unix.SockaddrInet4{Port: 68}))
			})("DHCP")
		}); err != nil {
			t.Errorf("DHCP: %v", err)
		}
		if !slices.Contains(sniffer.take(), "DHCP") {
			t.Error("a DHCP request does not leave")
		}
		get(l.Client, "http://192.0.2.1:8080/")
		get(l.Client, "http://[2001:db8:1::1]:8080/")
		get(l.Uplink, "http://192.0.2.2:8081/")
		get(l.Uplink, "http://[2001:db8:1::2]:8081/")
		get(l.Internet, "http://192.0.2.2:8081/bytes/100000")
		get(l.Internet, "http://[2001:db8:1::2]:8081/bytes/100000")
		for _, to := range []string{"192.0.2.1:7", "[2001:db8:1::1]:7"} {
			c, err := l.Client.DialContext(l.ctx, "udp", to)
			if err != nil {
				t.Error(err)
				continue
			}
			c.SetDeadline(time.Now().Add(2 * time.Second))
			buf := make([]byte, 10)
			if _, err := c.Write([]byte("x")); err != nil {
				t.Error(err)
			} else if _, err := c.Read(buf); err != nil {
				t.Errorf("echo of %s: %v", to, err)
			}
			c.Close()
		}
		rtts, err := l.Internet.Ping(l.ctx, netlab.Ping{To: netip.MustParseAddr("192.0.2.2")})
		if len(rtts) != 1 {
			t.Errorf("a ping from off the link is not answered: %v", err)
		}
	}
	all()
	// A connection that was open before the sidecar goes on.
	cmd2 := func() {
		l.stop(cmd)
		ln, err := l.Client.Listen("tcp", "192.0.2.2:8082")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		out, err := l.Internet.DialContext(l.ctx, "tcp", "192.0.2.2:8082")
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		in, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		cmd = l.start(childSettings{})
		out.SetDeadline(time.Now().Add(5 * time.Second))
		in.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := out.Write([]byte("to ")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 3)
		if _, err := io.ReadFull(in, buf); err != nil {
			t.Fatalf("a connection from before: %v", err)
		}
		if _, err := in.Write([]byte("fro")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, buf); err != nil {
			t.Fatalf("a connection from before: %v", err)
		}
	}
	cmd2()
	// The gateway is gone: neighbours and published ports stay.
	l.gw.set(func() { l.gw.dead = true })
	if err := cmd.WaitLog(l.ctx, "does not answer"); err != nil {
		t.Fatal(err)
	}
	all()
	cmd.Kill()
	all()
}

// TestPublishedPorts: what comes in on the uplink from anywhere, as to a port
// that Docker publishes, is answered there and not through the tunnel.
func TestPublishedPorts(t *testing.T) {
	for _, kill := range []KillSwitch{KillSwitchOn, KillSwitchOff} {
		t.Run(kill.String(), func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.Client.Sysctl("net.ipv4.conf.all.rp_filter", "1")
			l.Client.ServeHTTP(8081)
			l.Client.ServeEcho(7)
			// Docker rewrites the destination and leaves the source.
			l.Uplink.Nft("table ip published { chain c { type nat hook prerouting priority dstnat; " +
				"ip daddr 203.0.113.129 tcp dport 8000 dnat to 192.0.2.2:8081; ip daddr 203.0.113.129 udp dport 7000 dnat to 192.0.2.2:7; }; }")
			wildcard, err := l.Client.ListenPacket("udp4", ":9")
			if err != nil {
				t.Fatal(err)
			}
			defer wildcard.Close()
			cmd := l.start(childSettings{KillSwitch: kill})
			l.ping(toyRemote4, toyRemote6)
			l.gw.take()
			for _, url := range []string{"http://203.0.113.129:8000/bytes/1000000", "http://192.0.2.2:8081/", "http://[2001:db8:1::2]:8081/bytes/1000000"} {
				ctx, cancel := context.WithTimeout(l.ctx, 5*time.Second)
				if _, err := l.Internet.Get(ctx, url); err != nil {
					t.Errorf("get %s: %v\n%s", url, err, l.dump())
				}
				cancel()
			}
			ask := func(to string) net.Conn {
				c, err := l.Internet.DialContext(l.ctx, "udp", to)
				if err != nil {
					t.Fatal(err)
				}
				c.SetDeadline(time.Now().Add(testPatience))
				if _, err := c.Write([]byte("x")); err != nil {
					t.Error(err)
				}
				return c
			}
			for _, to := range []string{"203.0.113.129:7000", "192.0.2.2:7", "[2001:db8:1::2]:7"} {
				c := ask(to)
				if _, err := c.Read(make([]byte, 10)); err != nil {
					t.Errorf("echo of %s: %v", to, err)
				}
				c.Close()
			}
			if through := l.gw.take(); len(through) > 0 {
				t.Errorf("through the tunnel went %q", through)
			}
			// Who answers from any address gets the tunnel's, and stays inside with it.
			defer ask("192.0.2.2:9").Close()
			wildcard.SetDeadline(time.Now().Add(testPatience))
			_, from, err := wildcard.ReadFrom(make([]byte, 10))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := wildcard.WriteTo([]byte("x"), from); err != nil {
				t.Error(err)
			}
			want := fmt.Sprintf("17 %v 9 > %v", toyOwn4, netlab.ServerAddr4)
			l.eventually(func() error {
				if through := l.gw.take(); !slices.ContainsFunc(through, func(s string) bool { return strings.HasPrefix(s, want) }) {
					return fmt.Errorf("through the tunnel went %q, want %q", through, want)
				}
				return nil
			})
			l.stop(cmd)
		})
	}
}

// TestWhoMayComeIn: out of the tunnel come answers, pings, and connections of
// the network's other clients; nobody else sees that anything listens.
func TestWhoMayComeIn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.Client.ServeHTTP(8080)
	cmd := l.start(childSettings{})
	l.ping(toyRemote4, toyRemote6)
	l.gw.take()
	mapped := netip.MustParseAddr("::ffff:10.88.0.9")
	tests := []struct {
		name     string
		port     string
		packet   []byte
		answered bool
	}{
		{"a peer, to a listener", "1000", tcpSYN(toyPeer4, toyOwn4, 1000, 8080), true},
		{"a peer, to a listener, IPv6", "1001", tcpSYN(toyPeer6, toyOwn6, 1001, 8080), true},
		{"a peer, to a closed port", "1002", tcpSYN(toyPeer4, toyOwn4, 1002, 81), true},
		{"the gateway", "1003", tcpSYN(toySelf4, toyOwn4, 1003, 8080), false},
		{"the gateway, IPv6", "1004", tcpSYN(toySelf6, toyOwn6, 1004, 8080), false},
		{"the internet", "1005", tcpSYN(toyRemote4, toyOwn4, 1005, 8080), false},
		{"the internet, IPv6", "1006", tcpSYN(toyRemote6, toyOwn6, 1006, 8080), false},
		{"the internet, to a closed port", "1007", tcpSYN(toyRemote4, toyOwn4, 1007, 81), false},
		{"a neighbour of ours", "1008", tcpSYN(netip.MustParseAddr("192.0.2.1"), toyOwn4, 1008, 8080), false},
		{"a peer, to the uplink's address", "1009", tcpSYN(toyPeer4, netip.MustParseAddr("192.0.2.2"), 1009, 8080), false},
		{"a peer, to loopback", "1010", tcpSYN(toyPeer4, netip.MustParseAddr("127.0.0.1"), 1010, 8080), false},
		{"a peer, to another client", "1011", tcpSYN(toyPeer4, netip.MustParseAddr("10.88.0.7"), 1011, 8080), false},
		{"ourselves", "1012", tcpSYN(toyOwn4, toyOwn4, 1012, 8080), false},
		{"loopback", "1100", tcpSYN(netip.MustParseAddr("127.0.0.1"), toyOwn4, 1100, 8080), false},
		{"ourselves, IPv6", "1101", tcpSYN(toyOwn6, toyOwn6, 1101, 8080), false},
		{"a router's advertisement", "", advertisement(), false},
		{"mapped", "1013", tcpSYN(mapped, toyOwn6, 1013, 8080), false},
		{"cut short", "1014", tcpSYN(toyPeer4, toyOwn4, 1014, 8080)[:30], false},
		{"not IP", "", []byte("hello"), false},
		{"empty", "", nil, false},
	}
	for _, tt := range tests {
		l.gw.take()
		l.gw.inject(toyPacket, tt.packet)
		deadline := time.Now().Add(testPatience)
		if !tt.answered {
			deadline = time.Now().Add(100 * time.Millisecond)
		}
		// Each test has a port of its own: half-open connections repeat themselves.
		var answers []string
		for time.Now().Before(deadline) && len(answers) == 0 {
			answers = slices.DeleteFunc(l.gw.take(), func(s string) bool { return !strings.HasSuffix(s, tt.port) })
			time.Sleep(5 * time.Millisecond)
		}
		if answered := len(answers) > 0; answered != tt.answered {
			t.Errorf("%s: answers %q, want some: %t", tt.name, answers, tt.answered)
		}
	}
	if routes := l.sh("ip", "-6", "route"); strings.Contains(routes, "2001:db8:1::/64 dev quicvpn0") || strings.Contains(routes, "default via fe80") {
		t.Errorf("the gateway's router advertisement was taken:\n%s", routes)
	}
	// From beside the tunnel nobody reaches the tunnel's address, even who knows
	// where it is.
	l.Uplink.Route(netip.MustParsePrefix("10.88.0.5/32"), netip.MustParseAddr("192.0.2.2"))
	if rtts, _ := l.Uplink.Ping(l.ctx, netlab.Ping{To: toyOwn4, Wait: 200 * time.Millisecond}); len(rtts) > 0 {
		t.Error("a neighbour reaches the tunnel's address")
	}
	l.ping(toyRemote4, toyRemote6)
	l.stop(cmd)
	for _, want := range []string{"malformed:3", "destination:3", "source:5"} {
		if !strings.Contains(cmd.Log(), want) {
			t.Errorf("the drops lack %s: %s", want, cmd.Log())
		}
	}
}

// advertisement is a router advertisement (RFC 4861, section 4.2) that claims
// the uplink's own prefix for the tunnel.
func advertisement() []byte {
	prefix := netip.MustParseAddr("2001:db8:1::").As16()
	body := []byte{134, 0, 0, 0, 64, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0,
		3, 4, 64, 0xc0, 0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff, 0, 0, 0, 0}
	body = append(body, prefix[:]...)
	from := netip.MustParseAddr("fe80::1")
	b := ipPacket(from, toyOwn6, packet.ICMPv6, body)
	b[7] = 255
	var sum uint32
	for _, part := range [][]byte{b[8:40], {0, 0, 0, byte(len(body)), 0, 0, 0, packet.ICMPv6}, body} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(part[i])<<8 | uint32(part[i+1])
		}
	}
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	b[42], b[43] = byte(^sum>>8), byte(^sum)
	return b
}
