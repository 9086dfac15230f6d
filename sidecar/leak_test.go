package sidecar

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// marker is in every packet that must not leave.
const marker = "quicvpn-must-not-leave"

// A sniffer looks for the marker in what arrives at an interface, and for TCP.
type sniffer struct {
	fd   int
	mu   sync.Mutex // guards seen
	seen map[string]int
}

// sniff looks at an interface until the test ends.
func sniff(t *testing.T, i *netlab.Iface) *sniffer {
	t.Helper()
	s := &sniffer{seen: make(map[string]int)}
	if err := i.NS.Do(func() (err error) {
		const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network order
		s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 20000}),
			unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}))
	}); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			select {
			case <-done:
				return
			default:
			}
			n, _, err := unix.Recvfrom(s.fd, buf, 0)
			if err == nil {
				s.look(buf[:n])
			}
		}
	})
	t.Cleanup(func() {
		close(done)
		wg.Wait()
		unix.Close(s.fd)
	})
	return s
}

// look counts what carries the marker, by what follows it, and the SYNs of TCP
// by port.
func (s *sniffer) look(p []byte) {
	key := ""
	if _, after, ok := bytes.Cut(p, []byte(marker)); ok {
		key, _, _ = strings.Cut(string(after), ";")
		key = strings.TrimPrefix(key, " ")
	} else if len(p) >= 40 && p[0]>>4 == 4 && p[9] == unix.IPPROTO_TCP && p[33]&0x12 == 2 {
		key = fmt.Sprintf("tcp %d", int(p[22])<<8|int(p[23]))
	} else if len(p) >= 60 && p[0]>>4 == 6 && p[6] == unix.IPPROTO_TCP && p[53]&0x12 == 2 {
		key = fmt.Sprintf("tcp %d", int(p[42])<<8|int(p[43]))
	}
	if key != "" {
		s.mu.Lock()
		s.seen[key]++
		s.mu.Unlock()
	}
}

// take returns what was seen since the last call, sorted.
func (s *sniffer) take() []string {
	time.Sleep(30 * time.Millisecond) // for the last to arrive
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []string
	for k := range s.seen {
		keys = append(keys, k)
	}
	clear(s.seen)
	slices.Sort(keys)
	return keys
}

// An attempt sends one thing past the tunnel. Its name is what the sniffer sees.
type attempt struct {
	name string
	send func(name string) error
}

// options are applied to a socket before it is connected.
type option func(fd int) error

func bindTo(device string) option {
	return func(fd int) error { return unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, device) }
}

func marked(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, Mark) }

func broadcasting(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1) }

func dialer(timeout time.Duration, options ...option) net.Dialer {
	return net.Dialer{Timeout: timeout, Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		e := c.Control(func(fd uintptr) {
			for _, o := range options {
				err = errors.Join(err, o(int(fd)))
			}
		})
		return errors.Join(e, err)
	}}
}

func sendUDP(to string, options ...option) func(string) error {
	return func(name string) error {
		d := dialer(time.Second, options...)
		c, err := d.Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = fmt.Fprintf(c, "%s %s;", marker, name)
		return err
	}
}

func sendTCP(to string, options ...option) func(string) error {
	return func(string) error {
		d := dialer(100*time.Millisecond, options...)
		c, err := d.Dial("tcp", to)
		if err != nil {
			return err
		}
		return c.Close()
	}
}

// sendRaw sends any IP protocol.
func sendRaw(network, to string, options ...option) func(string) error {
	return func(name string) error {
		d := dialer(time.Second, options...)
		c, err := d.Dial(network, to)
		if err != nil {
			return err
		}
		defer c.Close()
		// Eight bytes that are an echo request, if the protocol is ICMP.
		head := []byte{8, 0, 0, 0, 0, 1, 0, 1}
		if strings.HasPrefix(network, "ip6") {
			head[0] = 128
		}
		_, err = c.Write(fmt.Appendf(head, "%s %s;", marker, name))
		return err
	}
}

// sendSpoofed sends a whole IPv4 packet of another source.
func sendSpoofed(src, dst string) func(string) error {
	return func(name string) error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := bindTo("eth0")(fd); err != nil {
			return err
		}
		to := netip.MustParseAddr(dst)
		b := ipPacket(netip.MustParseAddr(src), to, 253, fmt.Appendf(nil, "%s %s;", marker, name))
		return unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: to.As4()})
	}
}

// attempts are all the ways out that must be closed, whatever the state of the
// tunnel. Those that use the device's name or our mark would be open without the
// kill switch even where the routes are right.
func attempts() []attempt {
	eth0 := bindTo("eth0")
	udp := func(name, to string, o ...option) attempt { return attempt{name, sendUDP(to, o...)} }
	tcp := func(port, host string, o ...option) attempt {
		return attempt{"tcp " + port, sendTCP(net.JoinHostPort(host, port), o...)}
	}
	raw := func(name, network, to string, o ...option) attempt { return attempt{name, sendRaw(network, to, o...)} }
	const r4, r6 = "203.0.113.10", "2001:db8:3::10"
	return []attempt{
		udp("udp4 device", r4+":9", eth0),
		udp("udp6 device", "["+r6+"]:9", eth0),
		udp("udp4 mark", r4+":9", marked),
		udp("udp6 mark", "["+r6+"]:9", marked),
		udp("gateway, not marked", fmt.Sprintf("198.51.100.2:%d", toyPort), eth0),
		udp("gateway, another port", "198.51.100.2:9", marked),
		udp("gateway, by IPv6", fmt.Sprintf("[2001:db8:2::2]:%d", toyPort), marked),
		tcp("4433", "198.51.100.2", marked),
		tcp("1001", r4, eth0),
		tcp("1002", r6, eth0),
		tcp("1003", r4, marked),
		tcp("1004", r6, marked),
		raw("icmp4 device", "ip4:icmp", r4, eth0),
		raw("icmp6 device", "ip6:ipv6-icmp", r6, eth0),
		raw("icmp4 mark", "ip4:icmp", r4, marked),
		raw("icmp6 mark", "ip6:ipv6-icmp", r6, marked),
		raw("sctp", "ip4:132", r4, eth0),
		raw("gre", "ip4:47", r4, eth0),
		raw("sctp6", "ip6:132", r6, eth0),
		{"spoofed", sendSpoofed("8.8.8.8", r4)},
		udp("dns4 device", r4+":53", eth0),
		udp("dns6 device", "["+r6+"]:53", eth0),
		udp("dns4 mark", r4+":53", marked),
		udp("dns4 on-link", "192.0.2.1:53"),
		udp("dns6 on-link", "[2001:db8:1::1]:53"),
		udp("dns4 on-link mark", "192.0.2.1:53", marked),
		tcp("53", "192.0.2.1"),
		udp("multicast", "239.1.1.1:9", eth0),
		udp("mdns", "224.0.0.251:5353", eth0),
		udp("mdns6", "[ff02::fb%eth0]:5353", eth0),
		udp("multicast6", "[ff0e::1]:9", eth0),
		udp("broadcast", "255.255.255.255:9", eth0, broadcasting),
		udp("broadcast of the subnet", "192.0.2.15:9", eth0, broadcasting),
		udp("DHCP to the internet", r4+":67", eth0, func(fd int) error {
			return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
				unix.Bind(fd, &unix.SockaddrInet4{Port: 68}))
		}),
		raw("solicitation of the internet", "ip6:ipv6-icmp", r6, eth0),
	}
}

// tryAll makes all attempts, whose errors do not matter.
func (l *lab) tryAll() {
	l.t.Helper()
	for _, a := range attempts() {
		if err := l.Client.Do(func() error {
			_ = a.send(a.name)
			return nil
		}); err != nil {
			l.t.Fatal(err)
		}
	}
}

// TestNothingLeaves makes every attempt in every state of the sidecar.
func TestNothingLeaves(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	// The multicast groups need no router to be sent to.
	sniffer := sniff(t, l.UplinkClientIf)
	l.tryAll()
	var all []string
	for _, a := range attempts() {
		all = append(all, a.name)
	}
	slices.Sort(all)
	if diff := cmp.Diff(all, sniffer.take()); diff != "" {
		t.Fatalf("without a sidecar not every attempt is seen, so that the rest of this test would prove nothing:\n%s", diff)
	}

	ends := netip.AddrPortFrom(netlab.GatewayAddr4, toyPort)
	capture := l.UplinkClientIf.Capture(ends)
	nothing := func(state string) {
		t.Helper()
		l.tryAll()
		if seen := sniffer.take(); len(seen) > 0 {
			t.Errorf("%s: these left: %v\n%s", state, seen, l.dump())
		}
		if leak := capture.Traffic().Leak(); leak != "" {
			t.Errorf("%s: %s", state, leak)
		}
	}
	l.gw.set(func() { l.gw.dead = true })
	cmd := l.command(childSettings{})
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.WaitLog(l.ctx, "the namespace is set up"); err != nil {
		t.Fatal(err)
	}
	nothing("no session yet")
	l.gw.set(func() { l.gw.dead = false })
	if err := cmd.WaitLog(l.ctx, "msg=connected"); err != nil {
		t.Fatal(err)
	}
	nothing("with a session")
	l.gw.set(func() { l.gw.dead = true })
	if err := cmd.WaitLog(l.ctx, "does not answer"); err != nil {
		t.Fatal(err)
	}
	nothing("the gateway is silent")
	cmd.Kill()
	nothing("killed")
	if traffic := capture.Traffic(); traffic.Tunnel == 0 {
		t.Error("the capture saw no packet of the tunnel")
	}
	l.gw.set(func() { l.gw.dead = false })
	cmd = l.start(childSettings{})
	nothing("started again")
	l.ping(toyRemote4)
	l.stop(cmd)
	l.tryAll()
	if diff := cmp.Diff(all, sniffer.take()); diff != "" {
		t.Errorf("stopped: not everything leaves again:\n%s", diff)
	}
}

// TestRefusedAtOnce: programs do not hang on what the kill switch refuses.
func TestRefusedAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{})
	for to, from := range map[string]string{
		"203.0.113.10:80":     "192.0.2.2",
		"[2001:db8:3::10]:80": "2001:db8:1::2",
		"192.0.2.1:53":        "",
		"[2001:db8:1::1]:53":  "",
	} {
		start := time.Now()
		err := l.Client.Do(func() error {
			d := net.Dialer{Timeout: 10 * time.Second}
			if from != "" {
				d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
			}
			c, err := d.Dial("tcp", to)
			if err == nil {
				c.Close()
			}
			return err
		})
		if err == nil {
			t.Errorf("%s: connected", to)
		}
		if took := time.Since(start); took > 3*time.Second {
			t.Errorf("%s: it took %v to fail with %v", to, took, err)
		}
	}
	l.stop(cmd)
}

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
		{"mapped", "1013", tcpSYN(mapped, toyOwn6, 1013, 8080), false},
		{"cut short", "1014", tcpSYN(toyPeer4, toyOwn4, 1014, 8080)[:30], false},
		{"not IP", "", []byte("hello"), false},
		{"empty", "", nil, false},
	}
	for _, tt := range tests {
		l.gw.take()
		l.gw.inject(toyPacket, tt.packet)
		deadline := time.Now().Add(3 * time.Second)
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
	// From beside the tunnel nobody reaches the tunnel's address, even who knows
	// where it is.
	l.Uplink.Route(netip.MustParsePrefix("10.88.0.5/32"), netip.MustParseAddr("192.0.2.2"))
	if rtts, _ := l.Uplink.Ping(l.ctx, netlab.Ping{To: toyOwn4, Wait: 200 * time.Millisecond}); len(rtts) > 0 {
		t.Error("a neighbour reaches the tunnel's address")
	}
	l.ping(toyRemote4, toyRemote6)
	l.stop(cmd)
	for _, want := range []string{"malformed:3", "destination:3"} {
		if !strings.Contains(cmd.Log(), want) {
			t.Errorf("the drops lack %s: %s", want, cmd.Log())
		}
	}
}
