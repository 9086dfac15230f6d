package e2e

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// TestHeaderFields looks at what of a packet's header arrives: one hop less for
// the gateway, and the traffic class as it was sent.
func TestHeaderFields(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	a, b := w.client0(), w.addClient("b")
	a.join(w.token)
	b.join(w.token)
	for _, tt := range []struct {
		name string
		to   *netlab.NS
		addr netip.Addr
	}{
		{"internet", w.Internet, netlab.ServerAddr4},
		{"internet", w.Internet, netlab.ServerAddr6},
		{"other client", b.ns, b.addresses()[0]},
		{"other client", b.ns, b.addresses()[1]},
	} {
		for _, class := range []int{0, 0x02, 0xb8, 0x29} { // ECT(0), EF, AF11 with ECT(1)
			network := "udp4"
			if tt.addr.Is6() {
				network = "udp6"
			}
			there, err := tt.to.ListenPacket(network, netip.AddrPortFrom(tt.addr, 0).String())
			if err != nil {
				t.Fatal(err)
			}
			here, err := a.ns.ListenPacket(network, ":0")
			if err != nil {
				t.Fatal(err)
			}
			hops, got, err := header(here.(*net.UDPConn), there.(*net.UDPConn), class)
			if err != nil || hops != 63 || got != class {
				t.Errorf("%s at %s: %d hops left and class %#x (%v), want 63 and %#x", tt.name, tt.addr, hops, got, err, class)
			}
			here.Close()
			there.Close()
		}
	}
}

// header sends a packet with 64 hops and the traffic class, and returns what
// arrives of both.
func header(here, there *net.UDPConn, class int) (hops, gotClass int, err error) {
	level, setHops, setClass, getHops, getClass := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_TOS, unix.IP_RECVTTL, unix.IP_RECVTOS
	if there.LocalAddr().(*net.UDPAddr).IP.To4() == nil {
		level, setHops, setClass, getHops, getClass = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_TCLASS, unix.IPV6_RECVHOPLIMIT, unix.IPV6_RECVTCLASS
	}
	for _, o := range []struct {
		conn          *net.UDPConn
		option, value int
	}{{here, setHops, 64}, {here, setClass, class}, {there, getHops, 1}, {there, getClass, 1}} {
		if err := setOption(o.conn, level, o.option, o.value); err != nil {
			return 0, 0, err
		}
	}
	if _, err := here.WriteTo([]byte("hello"), there.LocalAddr()); err != nil {
		return 0, 0, err
	}
	if err := there.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return 0, 0, err
	}
	buf, oob := make([]byte, 100), make([]byte, 200)
	_, n, _, _, err := there.ReadMsgUDP(buf, oob)
	if err != nil {
		return 0, 0, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return 0, 0, err
	}
	if len(messages) != 2 {
		return 0, 0, fmt.Errorf("%d control messages, want the hops and the class", len(messages))
	}
	for _, m := range messages {
		// IPv4's class is a byte, all others are integers.
		value := int(m.Data[0])
		if len(m.Data) >= 4 {
			value = int(binary.NativeEndian.Uint32(m.Data))
		}
		switch int(m.Header.Type) {
		case setHops, unix.IPV6_HOPLIMIT:
			hops = value
		case setClass:
			gotClass = value
		}
	}
	return hops, gotClass, nil
}
