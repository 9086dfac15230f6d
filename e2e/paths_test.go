package e2e

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// fragments says what a socket does with what is too large: with df nothing is
// fragmented, by the kernel or on the way; without, everything may be.
func fragments(conn syscall.Conn, version int, df bool) error {
	level, option, never, always := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO, unix.IP_PMTUDISC_DONT
	if version == 6 {
		level, option, never, always = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO, unix.IPV6_PMTUDISC_DONT
	}
	value := always
	if df {
		value = never
	}
	return setOption(conn, level, option, value)
}

// setOption sets an option of a socket.
func setOption(conn syscall.Conn, level, option, value int) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, value) }); err != nil {
		return err
	}
	return set
}

// listen opens a socket for packets of a kind in a namespace.
func (w *world) listen(ns *netlab.NS, network, address string, version int, df bool) net.PacketConn {
	w.t.Helper()
	pc, err := ns.ListenPacket(network, address)
	if err == nil {
		err = fragments(pc.(syscall.Conn), version, df)
	}
	if err != nil {
		w.t.Fatalf("listen for %s in %s: %v", network, ns.Name, err)
	}
	return pc
}

// receive passes on the numbers of the packets that arrive whole: each ends with
// its size and its number.
func receive(pc net.PacketConn, payload func([]byte) []byte) <-chan uint32 {
	numbers := make(chan uint32, 64)
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, _, err := pc.ReadFrom(buf)
			if err != nil {
				return // closed
			}
			if p := payload(buf[:n]); len(p) >= 8 && binary.BigEndian.Uint32(p[len(p)-8:]) == uint32(len(p)) {
				select {
				case numbers <- binary.BigEndian.Uint32(p[len(p)-4:]):
				default: // nobody asks any more
				}
			}
		}
	}()
	return numbers
}

func numbered(size int, number uint32) []byte {
	p := make([]byte, size)
	binary.BigEndian.PutUint32(p[size-8:], uint32(size))
	binary.BigEndian.PutUint32(p[size-4:], number)
	return p
}

// udpPaths returns the ways of UDP from the client to the server and back.
func udpPaths(c *client, version int, df bool) (up, down *path) {
	w := c.w
	w.t.Helper()
	network, server := "udp4", netlab.ServerAddr4
	if version == 6 {
		network, server = "udp6", netlab.ServerAddr6
	}
	there := w.listen(w.Internet, network, netip.AddrPortFrom(server, 0).String(), version, df)
	here := w.listen(c.ns, network, ":0", version, df)

	// The server learns by a first packet how the gateway translates the client.
	hello := make([]byte, 64)
	if _, err := here.WriteTo(hello, there.LocalAddr()); err != nil {
		w.t.Fatalf("say hello by %s: %v", network, err)
	}
	_, client, err := there.ReadFrom(hello)
	if err != nil {
		w.t.Fatalf("hear hello by %s: %v", network, err)
	}
	head := 28
	if version == 6 {
		head = 48
	}
	whole := func(p []byte) []byte { return p }
	sender := func(from net.PacketConn, to net.Addr) func(int, uint32) error {
		return func(size int, number uint32) error {
			_, err := from.WriteTo(numbered(size-head, number), to)
			return err
		}
	}
	name := fmt.Sprintf("UDP, IPv%d, DF %v", version, df)
	up = &path{name: name + ", up", df: df, send: sender(here, there.LocalAddr()), arrivals: receive(there, whole), close: func() {}}
	down = &path{name: name + ", down", df: df, send: sender(there, client), arrivals: receive(here, whole), close: func() {
		here.Close()
		there.Close()
	}}
	return up, down
}

// icmpPath returns the way of echo requests to the server and of its replies
// back, which are as large and which the server's kernel lets be fragmented.
func icmpPath(c *client, version int, df bool) *path {
	c.w.t.Helper()
	network, address, server, protocol, head := "ip4:icmp", "0.0.0.0", netlab.ServerAddr4, 1, 28
	var request, reply icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	if version == 6 {
		network, address, server, protocol, head = "ip6:ipv6-icmp", "::", netlab.ServerAddr6, 58, 48
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	pc := c.w.listen(c.ns, network, address, version, df)
	return &path{
		name: fmt.Sprintf("ICMP, IPv%d, DF %v", version, df),
		df:   df,
		send: func(size int, number uint32) error {
			m := icmp.Message{Type: request, Body: &icmp.Echo{ID: 7, Seq: int(number), Data: numbered(size-head, number)}}
			raw, err := m.Marshal(nil)
			if err == nil {
				_, err = pc.WriteTo(raw, &net.IPAddr{IP: server.AsSlice()})
			}
			return err
		},
		arrivals: receive(pc, func(p []byte) []byte {
			m, err := icmp.ParseMessage(protocol, p)
			if err != nil || m.Type != reply {
				return nil
			}
			if e, ok := m.Body.(*icmp.Echo); ok {
				return e.Data
			}
			return nil
		}),
		close: func() { pc.Close() },
	}
}
