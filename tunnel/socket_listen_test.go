package tunnel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// The addresses that quic-go gets are right in both IP versions and stay as they
// are while others arrive.
func TestSocketAddresses(t *testing.T) {
	p := newSocketPair(t)
	localA, localB := netip.MustParseAddr("fe80::a"), netip.MustParseAddr("fe80::b")
	p.ia.Address(netip.PrefixFrom(localA, 64))
	p.ib.Address(netip.PrefixFrom(localB, 64))
	dual := openSocket(t, p.b, socketConfig{})
	if ip := dual.LocalAddr().(*net.UDPAddr).IP; !ip.IsUnspecified() || ip.To4() != nil {
		t.Errorf("bound to %v, want both IP versions", ip)
	}
	seen := make(map[netip.AddrPort]*net.UDPAddr)
	for _, tc := range []struct{ from, to netip.Addr }{
		{addrA4, addrB4}, {addrA6, addrB6}, {localA, localB},
	} {
		for range 50 {
			from := tc.from
			if from.IsLinkLocalUnicast() {
				from = from.WithZone(strconv.Itoa(p.ia.Index))
			}
			c, err := p.a.ListenPacket("udp", netip.AddrPortFrom(from, 0).String())
			if err != nil {
				t.Fatal(err)
			}
			to := tc.to
			if to.IsLinkLocalUnicast() {
				to = to.WithZone(strconv.Itoa(p.ib.Index))
			}
			var last *net.UDPAddr
			for range 2 {
				if _, err := c.WriteTo([]byte("x"), socketPort(dual, to)); err != nil {
					t.Fatal(err)
				}
				ms := batch(8)
				if n, err := dual.ReadBatch(ms, 0); n != 1 || err != nil {
					t.Fatal(n, err)
				}
				got := ms[0].Addr.(*net.UDPAddr)
				if port := c.LocalAddr().(*net.UDPAddr).Port; got.Port != port || len(got.IP) != len(tc.from.AsSlice()) {
					t.Fatalf("from %v (%d bytes), want port %d and %d bytes", got, len(got.IP), port, len(tc.from.AsSlice()))
				}
				if a, _ := netip.AddrFromSlice(got.IP); a != tc.from {
					t.Fatalf("from %v, want %v", got, tc.from)
				}
				if (got.Zone != "") != tc.from.IsLinkLocalUnicast() {
					t.Fatalf("from zone %q", got.Zone)
				}
				if last != nil && last != got {
					t.Errorf("%v was made twice in a row", got)
				}
				last, seen[got.AddrPort()] = got, got
				// What came from there can be answered there.
				if _, err := dual.WriteTo([]byte("y"), got); err != nil {
					t.Fatal(err)
				}
				if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
					t.Fatal(err)
				}
				if _, _, err := c.ReadFrom(make([]byte, 10)); err != nil {
					t.Fatalf("answer to %v: %v", got, err)
				}
			}
			c.Close()
		}
	}
	for ap, a := range seen {
		if a.AddrPort() != ap {
			t.Errorf("the address %v was changed to %v", ap, a)
		}
	}
}

func TestSocketListenAddress(t *testing.T) {
	p := newSocketPair(t)
	for _, tc := range []struct {
		listen netip.Addr
		v4, v6 bool
	}{
		{netip.Addr{}, true, true},
		{netip.IPv6Unspecified(), true, true},
		{netip.IPv4Unspecified(), true, false},
		{addrB4, true, false},
		{netip.AddrFrom16(addrB4.As16()), true, false},
		{addrB6, false, true},
	} {
		t.Run(tc.listen.String(), func(t *testing.T) {
			s := openSocket(t, p.b, listenAt(tc.listen))
			for _, way := range []struct {
				to   netip.Addr
				want bool
			}{{addrB4, tc.v4}, {addrB6, tc.v6}} {
				c, err := p.a.ListenPacket("udp", ":0")
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if _, err := c.WriteTo([]byte("x"), socketPort(s, way.to)); err != nil {
					t.Fatal(err)
				}
				wait := 5 * time.Second
				if !way.want {
					wait = 50 * time.Millisecond
				}
				if err := s.SetReadDeadline(time.Now().Add(wait)); err != nil {
					t.Fatal(err)
				}
				if _, _, err := s.ReadFrom(make([]byte, 10)); (err == nil) != way.want {
					t.Errorf("packet to %v: %v", way.to, err)
				}
			}
		})
	}
	s4 := openSocket(t, p.a, listenAt(netip.IPv4Unspecified()))
	if _, _, err := s4.WriteMsgUDP(make([]byte, 2400), segmentOOB(1200), socketPort(s4, addrB6)); !errors.Is(err, unix.EAFNOSUPPORT) {
		t.Errorf("IPv6 through an IPv4 socket: %v", err)
	}
	if _, _, err := s4.WriteMsgUDP([]byte("x"), nil, nil); err == nil {
		t.Error("a write to nowhere succeeded")
	}
}

// Errors name what to do, and leave no socket.
func TestSocketListenErrors(t *testing.T) {
	p := newSocketPair(t)
	used := openSocket(t, p.a, socketConfig{})
	port := used.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	withoutCapabilities := func(f func() error) error {
		return p.a.Do(func() error { // on a thread that ends with it
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var none [2]unix.CapUserData
			if err := unix.Capset(&hdr, &none[0]); err != nil {
				return err
			}
			return f()
		})
	}
	for _, tc := range []struct {
		name string
		cfg  socketConfig
		do   func(func() error) error
		want []string
	}{
		{"port in use", socketConfig{Listen: netip.AddrPortFrom(netip.Addr{}, port)}, p.a.Do,
			[]string{fmt.Sprintf("listen on UDP port %d: another process uses port %d", port, port), "--listen"}},
		{"no such address", listenAt(addrB4), p.a.Do, []string{"no address " + addrB4.String(), "--listen"}},
		{"low port", socketConfig{Listen: netip.AddrPortFrom(addrA4, 443)}, withoutCapabilities,
			[]string{addrA4.String() + ":443", "NET_BIND_SERVICE", "--listen"}},
		{"mark", socketConfig{Mark: 0x51}, withoutCapabilities, []string{"NET_ADMIN", "0x51"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.do(func() error {
				s, err := listenUDP(tc.cfg)
				if err == nil {
					s.Close()
				}
				return err
			})
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
	// Where buffers cannot be forced, the limit counts and the warning names it.
	var s *socket
	if err := withoutCapabilities(func() (err error) { s, err = listenUDP(socketConfig{}); return err }); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, b := range []struct {
		size   int
		sysctl string
	}{{s.Stats().ReceiveBuffer, "net.core.rmem_max"}, {s.Stats().SendBuffer, "net.core.wmem_max"}} {
		if warned := strings.Contains(s.BufferWarning(), b.sysctl); b.size <= 0 || warned != (b.size < wantedSocketBuffer) {
			t.Errorf("%s: buffer of %d bytes, warning %q", b.sysctl, b.size, s.BufferWarning())
		}
	}
}

func TestSocketBuffersAndMark(t *testing.T) {
	p := newSocketPair(t)
	s := openSocket(t, p.a, socketConfig{Mark: 0x7157})
	if st := s.Stats(); st.ReceiveBuffer != wantedSocketBuffer || st.SendBuffer != wantedSocketBuffer {
		t.Errorf("buffers of %d and %d bytes, want %d", st.ReceiveBuffer, st.SendBuffer, wantedSocketBuffer)
	}
	if w := s.BufferWarning(); w != "" {
		t.Errorf("warning %q", w)
	}
	var mark int
	var err error
	raw, rerr := s.SyscallConn()
	if rerr != nil {
		t.Fatal(rerr)
	}
	if cerr := raw.Control(func(fd uintptr) { mark, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	if mark != 0x7157 {
		t.Errorf("mark %#x", mark)
	}
}

// ECN and packet info come through with every packet of a merged message.
func TestSocketControlMessages(t *testing.T) {
	p := newSocketPair(t)
	for _, tc := range []struct {
		name     string
		listen   netip.Addr
		from, to netip.Addr
	}{
		{"IPv4", netip.IPv4Unspecified(), addrA4, addrB4},
		{"IPv6", netip.IPv6Unspecified(), addrA6, addrB6},
		{"mapped", netip.IPv6Unspecified(), addrA4, addrB4},
	} {
		t.Run(tc.name, func(t *testing.T) {
			is6 := tc.to.Is6()
			a, b := openSocket(t, p.a, listenAt(tc.from)), openSocket(t, p.b, listenAt(tc.listen))
			raw, err := b.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			if err := raw.Control(func(fd uintptr) { // as quic-go does
				for _, o := range [][2]int{{unix.IPPROTO_IP, unix.IP_RECVTOS}, {unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS},
					{unix.IPPROTO_IP, unix.IP_PKTINFO}, {unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO}} {
					_ = unix.SetsockoptInt(int(fd), o[0], o[1], 1) // half of them fails on an IPv4 socket
				}
			}); err != nil {
				t.Fatal(err)
			}
			want := []byte{2, 2, 2, 1, 1, 0, 3, 3, 3}
			for _, w := range []struct {
				n   int
				tos byte
			}{{3, 2}, {2, 1}, {1, 0}, {3, 3}} {
				oob := append(segmentOOB(1000), tosOOB(is6, w.tos)...)
				if _, _, err := a.WriteMsgUDP(make([]byte, 1000*w.n), oob, socketPort(b, tc.to)); err != nil {
					t.Fatal(err)
				}
			}
			var got []byte
			ms := batch(8)
			for len(got) < len(want) {
				n, err := b.ReadBatch(ms, 0)
				if err != nil {
					t.Fatal(err)
				}
				for _, m := range ms[:n] {
					tos, local := byte(0xff), netip.Addr{}
					controlMessages(m.OOB[:m.NN], func(level, typ int32, data, _ []byte) {
						switch [2]int32{level, typ} {
						case [2]int32{unix.IPPROTO_IP, unix.IP_TOS}:
							tos = data[0]
						case [2]int32{unix.IPPROTO_IPV6, unix.IPV6_TCLASS}:
							tos = byte(binary.NativeEndian.Uint32(data))
						case [2]int32{unix.IPPROTO_IP, unix.IP_PKTINFO}:
							local, _ = netip.AddrFromSlice(data[8:12])
						case [2]int32{unix.IPPROTO_IPV6, unix.IPV6_PKTINFO}:
							local, _ = netip.AddrFromSlice(data[:16])
						case [2]int32{unix.IPPROTO_UDP, unix.UDP_GRO}:
							t.Error("UDP_GRO was passed on")
						}
					})
					if local.Unmap() != tc.to || m.N != 1000 {
						t.Errorf("%d bytes for %v, want 1000 for %v", m.N, local, tc.to)
					}
					got = append(got, tos)
				}
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("ECN bits: %s", d)
			}
		})
	}
}
