package sidecar

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

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
