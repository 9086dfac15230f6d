package tunnel

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// routedPair is a client and a server with a router between them, whose link to
// the server is the narrow one.
type routedPair struct {
	client, router, server *netlab.NS
	clientIf, farIf        *netlab.Iface
	serverIf               *netlab.Iface
}

// setMTU changes the link between router and server.
func (p *routedPair) setMTU(mtu int) {
	p.farIf.SetMTU(mtu)
	p.serverIf.SetMTU(mtu)
}

var (
	clientAddr4, serverAddr4 = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("198.51.100.1")
	clientAddr6, serverAddr6 = netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db8:2::1")
)

func newRoutedPair(t testing.TB, mtu int) *routedPair {
	t.Helper()
	noLeaks(t)
	lab := netlab.New(t)
	p := &routedPair{client: lab.NS("client"), router: lab.NS("router"), server: lab.NS("server")}
	p.router.Forward()
	near4, near6 := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8:1::2")
	far4, far6 := netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("2001:db8:2::2")
	p.clientIf, _ = lab.Link(p.client, p.router, netlab.LinkConfig{
		A: netlab.End{Addresses: []netip.Prefix{netip.PrefixFrom(clientAddr4, 24), netip.PrefixFrom(clientAddr6, 64)}},
		B: netlab.End{Name: "near", Addresses: []netip.Prefix{netip.PrefixFrom(near4, 24), netip.PrefixFrom(near6, 64)}},
	})
	p.farIf, p.serverIf = lab.Link(p.router, p.server, netlab.LinkConfig{
		MTU: mtu,
		A:   netlab.End{Name: "far", Addresses: []netip.Prefix{netip.PrefixFrom(far4, 24), netip.PrefixFrom(far6, 64)}},
		B:   netlab.End{Addresses: []netip.Prefix{netip.PrefixFrom(serverAddr4, 24), netip.PrefixFrom(serverAddr6, 64)}},
	})
	p.client.DefaultRoute(near4, near6)
	p.server.DefaultRoute(far4, far6)
	return p
}

// tooBigEvents returns a socketConfig that records its events.
func tooBigEvents(cfg socketConfig) (socketConfig, chan tooBigEvent) {
	events := make(chan tooBigEvent, 1000)
	cfg.OnTooBig = func(remote netip.AddrPort, mtu int) { events <- tooBigEvent{remote, mtu} }
	return cfg, events
}

func nextEvent(t testing.TB, events chan tooBigEvent) tooBigEvent {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(patience):
		t.Fatal("OnTooBig was not called within 5 s")
		return tooBigEvent{}
	}
}

func noEvent(t testing.TB, events chan tooBigEvent) {
	t.Helper()
	select {
	case e := <-events:
		t.Errorf("OnTooBig was called: %v", e)
	case <-time.After(50 * time.Millisecond):
	}
}

// quicPacket looks like a packet with a short header to the connection id.
func quicPacket(size int, id uint32) []byte {
	b := make([]byte, size)
	b[0] = 0x40
	binary.BigEndian.PutUint32(b[1:], id)
	return b
}

// reading keeps a socket's reader busy, as quic-go does.
func reading(t testing.TB, s *socket) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		ms := batch(8)
		for {
			if _, err := s.ReadBatch(ms, 0); err != nil {
				if !errors.Is(err, net.ErrClosed) {
					t.Errorf("read: %v", err)
				}
				return
			}
		}
	}()
	t.Cleanup(func() { s.Close(); <-done })
}

// A router on the way refuses what its next link cannot carry: the true size is
// known a round trip later, and what fits goes on as before.
func TestSocketPathMTU(t *testing.T) {
	for _, tc := range []struct {
		name   string
		listen netip.Addr
		server netip.Addr
		mtu    int
		header int
	}{
		{"IPv4 1400", netip.IPv4Unspecified(), serverAddr4, 1400, 28},
		{"IPv4 1300", netip.IPv4Unspecified(), serverAddr4, 1300, 28},
		{"IPv6 1400", netip.IPv6Unspecified(), serverAddr6, 1400, 48},
		{"IPv6 1300", netip.IPv6Unspecified(), serverAddr6, 1300, 48},
		{"IPv4 on both 1400", netip.IPv6Unspecified(), serverAddr4, 1400, 28},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newRoutedPair(t, tc.mtu)
			server := openSocket(t, p.server, listenAt(tc.server))
			for _, way := range []struct {
				name  string
				size  int
				oob   []byte
				reads bool
			}{
				{"single", 1452, nil, true},
				{"one too much", tc.mtu - tc.header + 1, nil, true},
				{"segments", 10 * 1452, segmentOOB(1452), true},
				{"nobody reads", 1452, nil, false},
			} {
				t.Run(way.name, func(t *testing.T) {
					cfg, events := tooBigEvents(listenAt(tc.listen))
					client := openSocket(t, p.client, cfg)
					if way.reads {
						reading(t, client)
					}
					to := socketPort(server, tc.server)
					start := time.Now()
					if _, _, err := client.WriteMsgUDP(quicPacket(way.size, 0xabcd1234), way.oob, to); err != nil {
						t.Fatal(err)
					}
					if !way.reads {
						time.Sleep(20 * time.Millisecond)
						noEvent(t, events)
						// The next write finds the error, and is sent nevertheless.
						start = time.Now()
						if _, _, err := client.WriteMsgUDP(quicPacket(1200, 0xabcd1234), nil, to); err != nil {
							t.Fatal(err)
						}
						receivePackets(t, server, 1)
					}
					got := nextEvent(t, events)
					took := time.Since(start)
					if d := cmp.Diff(tooBigEvent{to.AddrPort(), tc.mtu}, got, compareNetip, cmp.AllowUnexported(tooBigEvent{}),
						cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
						t.Error(d)
					}
					if took > 500*time.Millisecond {
						t.Errorf("it took %v", took)
					}
					// Just what fits, alone and in segments. The kernel must not have
					// drawn conclusions of its own: larger probes are still sent.
					fits := tc.mtu - tc.header
					for _, oob := range [][]byte{nil, segmentOOB(fits)} {
						if _, _, err := client.WriteMsgUDP(quicPacket(fits, 0xabcd1234), oob, to); err != nil {
							t.Fatal(err)
						}
						if got := receivePackets(t, server, 1); len(got[0]) != fits {
							t.Errorf("%d bytes came, not %d", len(got[0]), fits)
						}
					}
					p.setMTU(1500)
					if _, _, err := client.WriteMsgUDP(quicPacket(1452, 0xabcd1234), nil, to); err != nil {
						t.Fatal(err)
					}
					if got := receivePackets(t, server, 1); len(got[0]) != 1452 {
						t.Errorf("after the path grew %d bytes came, not 1452", len(got[0]))
					}
					p.setMTU(tc.mtu)
					if st := client.Stats(); st.SendLost+st.SendTooBig+st.ICMPIgnored+st.GSORefused != 0 || st.ICMPErrors == 0 {
						t.Errorf("stats %+v", st)
					}
				})
			}
		})
	}
}

// What the device itself cannot carry is refused at once, with its MTU.
func TestSocketDeviceMTU(t *testing.T) {
	p := newRoutedPair(t, 1500)
	p.clientIf.SetMTU(1300)
	for _, tc := range []struct {
		name           string
		listen, server netip.Addr
		header         int
	}{
		{"IPv4", netip.IPv4Unspecified(), serverAddr4, 28},
		{"IPv6", netip.IPv6Unspecified(), serverAddr6, 48},
		{"mapped", netip.IPv6Unspecified(), serverAddr4, 28},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := openSocket(t, p.server, listenAt(tc.server))
			cfg, events := tooBigEvents(listenAt(tc.listen))
			client := openSocket(t, p.client, cfg)
			reading(t, client)
			to := socketPort(server, tc.server)
			want := tooBigEvent{to.AddrPort(), 1300}
			if _, _, err := client.WriteMsgUDP(quicPacket(1301-tc.header, 1), nil, to); !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("a single packet: %v, want EMSGSIZE", err)
			}
			if got := nextEvent(t, events); got != want {
				t.Errorf("a single packet: %v, want %v", got, want)
			}
			// Of segments, the short last one fits.
			if _, _, err := client.WriteMsgUDP(quicPacket(10*1452+700, 1), segmentOOB(1452), to); err != nil {
				t.Errorf("segments: %v", err)
			}
			if got := nextEvent(t, events); got != want {
				t.Errorf("segments: %v, want %v", got, want)
			}
			if got := receivePackets(t, server, 1); len(got[0]) != 700 {
				t.Errorf("%d bytes came, not 700", len(got[0]))
			}
			noEvent(t, events)
			if st := client.Stats(); st.SendTooBig != 11 || st.GSORefused != 0 || st.SendLost != 0 {
				t.Errorf("stats %+v", st)
			}
			// Segments that fit are merged as before.
			fits := 1300 - tc.header
			if _, _, err := client.WriteMsgUDP(quicPacket(4*fits, 1), segmentOOB(fits), to); err != nil {
				t.Fatal(err)
			}
			receivePackets(t, server, 4)
		})
	}
}

// A Fragmentation Needed that does not quote a packet of ours is forged.
func TestSocketForgedICMP(t *testing.T) {
	p := newRoutedPair(t, 1500)
	server := openSocket(t, p.server, listenAt(serverAddr4))
	cfg, events := tooBigEvents(listenAt(netip.IPv4Unspecified()))
	client := openSocket(t, p.client, cfg)
	reading(t, client)
	to := socketPort(server, serverAddr4)
	if _, _, err := client.WriteMsgUDP(quicPacket(1200, 0x01020304), nil, to); err != nil {
		t.Fatal(err)
	}
	receivePackets(t, server, 1)

	icmp, err := p.router.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		t.Fatal(err)
	}
	defer icmp.Close()
	from := client.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	send := func(dst netip.AddrPort, quote []byte) {
		t.Helper()
		m := []byte{3, 4, 0, 0, 0, 0, 1300 >> 8, 1300 & 0xff} // Fragmentation Needed
		m = append(m, 0x45, 0, 1300>>8, 1300&0xff, 0, 0, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0)
		m = append(append(m, clientAddr4.AsSlice()...), dst.Addr().AsSlice()...)
		m = binary.BigEndian.AppendUint16(m, from)
		m = binary.BigEndian.AppendUint16(m, dst.Port())
		m = append(append(m, 1280>>8, 1280&0xff, 0, 0), quote...)
		binary.BigEndian.PutUint16(m[2:], internetChecksum(m))
		if _, err := icmp.WriteTo(m, &net.IPAddr{IP: clientAddr4.AsSlice()}); err != nil {
			t.Fatal(err)
		}
	}
	dst := to.AddrPort()
	for i, forged := range []struct {
		dst   netip.AddrPort
		quote []byte
	}{
		{dst, nil},
		{dst, quicPacket(8, 0x01020304)[:4]},
		{dst, quicPacket(64, 0x01020305)},
		{netip.AddrPortFrom(dst.Addr(), dst.Port()+1), quicPacket(64, 0x01020304)},
	} {
		send(forged.dst, forged.quote)
		eventually(t, "the forged ICMP is counted", func() bool { return client.Stats().ICMPIgnored == uint64(i+1) })
	}
	noEvent(t, events)
	// With the right quote it is one from the path, whoever sent it.
	send(dst, quicPacket(8, 0x01020304))
	if got := nextEvent(t, events); got != (tooBigEvent{dst, 1300}) {
		t.Errorf("%v", got)
	}
}

func internetChecksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// The callback may use the socket.
func TestSocketWriteFromCallback(t *testing.T) {
	p := newRoutedPair(t, 1500)
	p.clientIf.SetMTU(1300)
	server := openSocket(t, p.server, listenAt(serverAddr4))
	to := socketPort(server, serverAddr4)
	cfg := listenAt(netip.IPv4Unspecified())
	var client *socket
	cfg.OnTooBig = func(remote netip.AddrPort, mtu int) {
		if _, err := client.WriteTo(quicPacket(mtu-28, 1), net.UDPAddrFromAddrPort(remote)); err != nil {
			t.Error(err)
		}
	}
	client = openSocket(t, p.client, cfg)
	if _, err := client.WriteTo(quicPacket(1452, 1), to); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("%v, want EMSGSIZE", err)
	}
	if got := receivePackets(t, server, 1); len(got[0]) != 1300-28 {
		t.Errorf("%d bytes came", len(got[0]))
	}
}
