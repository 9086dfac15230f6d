package userspace

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	client4, client6 = netip.MustParseAddr("10.91.0.2"), netip.MustParseAddr("fd91::2")
	own4, own6       = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:1::1")
	far4, far6       = netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8:1::2")
)

// A lab is a host with an Exit, and another one beside it, which has an echo at
// port 7.
type lab struct {
	*Exit
	t        *testing.T
	own, far *netlab.NS

	mu      sync.Mutex // guards what follows
	owner   string     // of the client's addresses
	places  int        // for sockets, that are left
	answers []packet.Packet
	refused []string // what was, and why
}

func newLab(t *testing.T, pings bool) *lab {
	t.Helper()
	n := netlab.New(t)
	l := &lab{t: t, own: n.NS("own"), far: n.NS("far"), owner: "somebody", places: 10}
	n.Link(l.own, l.far, netlab.LinkConfig{
		A: netlab.End{Addresses: []netip.Prefix{netip.PrefixFrom(own4, 24), netip.PrefixFrom(own6, 64)}},
		B: netlab.End{Addresses: []netip.Prefix{netip.PrefixFrom(far4, 24), netip.PrefixFrom(far6, 64)}},
	})
	l.far.ServeEcho(7)
	// Its ICMP errors are not limited.
	l.far.Sysctl("net.ipv4.icmp_ratemask", "0")
	l.far.Sysctl("net.ipv6.icmp.ratemask", "0")
	if pings {
		l.own.Sysctl("net.ipv4.ping_group_range", "0 0")
	}
	var err error
	l.Exit, err = New(Config{
		Do:    l.own.Do,
		Dial:  func(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) { return nil, net.ErrClosed },
		Owner: func(netip.Addr) string { l.mu.Lock(); defer l.mu.Unlock(); return l.owner },
		Take: func(netip.Addr) (func(), bool) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.places == 0 {
				return nil, false
			}
			l.places--
			return func() { l.mu.Lock(); defer l.mu.Unlock(); l.places++ }, true
		},
		Queues: 2,
		Answer: func(_ int, pkts []packet.Packet) {
			l.mu.Lock()
			defer l.mu.Unlock()
			for _, p := range pkts {
				p.Data = bytes.Clone(p.Data)
				l.answers = append(l.answers, p)
			}
		},
		Refuse: func(orig []byte, why packet.Unreachable) {
			h, err := packet.Parse(orig)
			if err != nil {
				t.Errorf("refused is what is no packet: %v, %x", err, orig)
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.refused = append(l.refused, fmt.Sprintf("%v to port %d of %v: %v", h.Src, h.DstPort, h.Dst, why))
		},
		Exceeded: func([]byte) { t.Error("a hop limit ran out") },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if l.places != 10 {
			t.Errorf("%d places are left of 10", l.places)
		}
	})
	return l
}

func (l *lab) set(change func()) { l.mu.Lock(); defer l.mu.Unlock(); change() }

// write has the Exit take a packet, which it may not keep.
func (l *lab) write(pkt packet.Packet) {
	l.t.Helper()
	if err := l.Write([]packet.Packet{pkt}); err != nil {
		l.t.Fatal(err)
	}
	clear(pkt.Data)
}

// within waits for something.
func (l *lab) within(what string, ok func() bool) {
	l.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		l.mu.Lock()
		done := ok()
		l.mu.Unlock()
		if done {
			return
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("no %s: answers %x, refused %q, drops %v", what, l.answers, l.refused, l.cfg.Drops.Snapshot())
		}
	}
}

// answer waits for a packet, and returns it and its header.
func (l *lab) answer() (pkt packet.Packet, h packet.Header) {
	l.t.Helper()
	l.within("answer", func() bool {
		if len(l.answers) == 0 {
			return false
		}
		pkt, l.answers = l.answers[0], l.answers[1:]
		return true
	})
	h, err := packet.Parse(pkt.Data)
	if err == nil {
		err = pkt.Check(h)
	}
	if err != nil {
		l.t.Fatalf("%v: %x", err, pkt.Data)
	}
	return pkt, h
}

func udp(from, to netip.AddrPort, payload string) packet.Packet {
	return packet.Packet{Data: packet.AppendUDP(nil, from, to, []byte(payload))}
}

var versions = map[string]struct{ client, own, far netip.Addr }{
	"IPv4": {client4, own4, far4},
	"IPv6": {client6, own6, far6},
}

func TestUDP(t *testing.T) {
	for version, at := range versions {
		t.Run(version, func(t *testing.T) {
			l := newLab(t, false)
			from, to := netip.AddrPortFrom(at.client, 4000), netip.AddrPortFrom(at.far, 7)
			for _, text := range []string{"", "x", strings.Repeat("y", 1400), strings.Repeat("z", 9000)} {
				l.write(udp(from, to, text))
				pkt, h := l.answer()
				if h.Src != to.Addr() || h.SrcPort != 7 || h.Dst != from.Addr() || h.DstPort != 4000 ||
					!pkt.ChecksumHolds(h) || string(pkt.Data[h.HeaderLen:]) != text {
					t.Errorf("%d bytes came back as %+v, %d bytes", len(text), h, len(pkt.Data)-h.HeaderLen)
				}
			}
			// A super-packet: three whole datagrams, and a shorter one.
			var text string
			for i := range 3 {
				text += strings.Repeat(string(rune('a'+i)), 1000)
			}
			text += "end"
			super := udp(from, to, text)
			super.Segment = 1000
			l.write(super)
			var got string
			for len(got) < len(text) {
				pkt, h := l.answer()
				got += string(pkt.Data[h.HeaderLen:])
			}
			if got != text {
				t.Errorf("a super-packet came back as %d bytes, other than it was", len(got))
			}
			if left := l.places; left != 9 {
				t.Errorf("%d places are left, want one socket for one endpoint", left)
			}
		})
	}
}

// A datagram from whom the client did not send to is not the client's.
func TestStranger(t *testing.T) {
	l := newLab(t, false)
	from := netip.AddrPortFrom(client4, 4000)
	l.write(udp(from, netip.AddrPortFrom(far4, 7), "x"))
	l.answer()
	l.Exit.mu.Lock()
	sock := l.flows[key{from, packet.UDP}].sock
	l.Exit.mu.Unlock()
	var bound unix.Sockaddr
	var err error
	if cerr := sock.raw.Control(func(fd uintptr) { bound, err = unix.Getsockname(int(fd)) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	stranger, err := l.own.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	if _, err := stranger.WriteTo([]byte("x"), &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(addrPort(bound).Port())}); err != nil {
		t.Fatal(err)
	}
	l.within("drop", func() bool { return l.cfg.Drops.Snapshot()[packet.DropSource.String()] == 1 })
}

// TestClosedPorts wants each ICMP error to reach the client, whichever call of the
// kernel's tells of it.
func TestClosedPorts(t *testing.T) {
	for version, at := range versions {
		t.Run(version, func(t *testing.T) {
			l := newLab(t, false)
			want := make(map[string]bool)
			for port := range uint16(500) {
				l.write(udp(netip.AddrPortFrom(at.client, 4000), netip.AddrPortFrom(at.far, 1000+port), "x"))
				want[fmt.Sprintf("%v to port %d of %v: %v", at.client, 1000+port, at.far, packet.PortUnreachable)] = true
				// This call is the one that fails for the last one's sake.
				l.write(udp(netip.AddrPortFrom(at.client, 4000), netip.AddrPortFrom(at.far, 7), "x"))
				if port%20 > 0 {
					continue // the kernel keeps some
				}
				l.within("refusal of each", func() bool {
					for _, r := range l.refused {
						delete(want, r)
					}
					return len(want) == 0
				})
			}
		})
	}
}

func TestNobodyIsThere(t *testing.T) {
	for version, at := range versions {
		t.Run(version, func(t *testing.T) {
			l := newLab(t, true)
			from, nobody := netip.AddrPortFrom(at.client, 4000), netip.AddrPortFrom(at.far.Next(), 9)
			noRoute := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), 9)
			if at.far.Is6() {
				noRoute = netip.AddrPortFrom(netip.MustParseAddr("2001:db8:9::1"), 9)
			}
			for _, tt := range []struct {
				to   netip.AddrPort
				want packet.Unreachable
			}{{noRoute, packet.NoRoute}, {nobody, packet.HostUnreachable}} {
				l.set(func() { l.refused = nil })
				l.write(udp(from, tt.to, "x"))
				want := fmt.Sprintf("%v to port 9 of %v: %v", at.client, tt.to.Addr(), tt.want)
				l.within(want, func() bool { return len(l.refused) > 0 })
				if l.refused[0] != want {
					t.Errorf("%q, want %q", l.refused, want)
				}
			}
		})
	}
}

func echo(t *testing.T, from, to netip.Addr, id int, text string) packet.Packet {
	t.Helper()
	kind := icmp.Type(ipv4.ICMPTypeEcho)
	if from.Is6() {
		kind = ipv6.ICMPTypeEchoRequest
	}
	m, err := (&icmp.Message{Type: kind, Body: &icmp.Echo{ID: id, Seq: 3, Data: []byte(text)}}).Marshal(nil)
	if err != nil {
		t.Fatal(err)
	}
	k := key{from: netip.AddrPortFrom(from, uint16(id))}
	return packet.Packet{Data: appendICMP(nil, from, to, k, m[0], m)}
}

func TestEcho(t *testing.T) {
	for version, at := range versions {
		t.Run(version, func(t *testing.T) {
			l := newLab(t, true)
			for _, text := range []string{"", "odd", strings.Repeat("x", 1300)} {
				l.write(echo(t, at.client, at.far, 0x1234, text))
				pkt, h := l.answer()
				proto := 1
				if at.client.Is6() {
					proto = 58
				}
				m, err := icmp.ParseMessage(proto, pkt.Data[h.IPLen:])
				if err != nil {
					t.Fatal(err)
				}
				body, ok := m.Body.(*icmp.Echo)
				if !ok || body.ID != 0x1234 || body.Seq != 3 || string(body.Data) != text || h.Src != at.far || h.Dst != at.client {
					t.Errorf("%+v from %v to %v: %+v", m, h.Src, h.Dst, m.Body)
				}
			}
			l.write(echo(t, at.client, at.far.Next(), 0x1234, "x"))
			want := fmt.Sprintf("%v to port 0 of %v: %v", at.client, at.far.Next(), packet.HostUnreachable)
			l.within(want, func() bool { return len(l.refused) == 1 && l.refused[0] == want })
		})
	}
}

func TestEchoWithoutSockets(t *testing.T) {
	l := newLab(t, false)
	l.write(echo(t, client4, far4, 1, "x"))
	want := fmt.Sprintf("%v to port 0 of %v: %v", client4, far4, packet.AdminProhibited)
	if len(l.refused) != 1 || l.refused[0] != want {
		t.Errorf("%q, want %q", l.refused, want)
	}
}

// Whoever has a client's address next hears nothing of what its earlier owner asked.
func TestAnotherOwner(t *testing.T) {
	l := newLab(t, false)
	from, to := netip.AddrPortFrom(client4, 4000), netip.AddrPortFrom(far4, 7)
	l.write(udp(from, to, "x"))
	l.answer()
	l.set(func() { l.owner = "somebody else" })
	l.write(udp(from, netip.AddrPortFrom(far4, 1000), "x"))
	want := fmt.Sprintf("%v to port 1000 of %v: %v", client4, far4, packet.PortUnreachable)
	l.within(want, func() bool { return len(l.refused) == 1 && l.refused[0] == want })
	l.within("end of the first socket", func() bool { return l.places == 9 })

	l.set(func() { l.owner = "" })
	l.sweep(time.Now())
	l.within("socket of one that may come back", func() bool { return l.places == 9 })
	l.sweep(time.Now().Add(absence + time.Second))
	l.within("end of all sockets", func() bool { return l.places == 10 })
	l.write(udp(from, to, "x"))
	if drops := l.cfg.Drops.Snapshot(); drops[packet.DropQueueFull.String()] != 1 {
		t.Errorf("a packet of nobody: drops %v", drops)
	}
}

func TestPlacesAndIdle(t *testing.T) {
	l := newLab(t, false)
	for port := range uint16(11) {
		l.write(udp(netip.AddrPortFrom(client4, 4000+port), netip.AddrPortFrom(far4, 53), "x"))
	}
	if drops := l.cfg.Drops.Snapshot(); drops[packet.DropQueueFull.String()] != 1 {
		t.Errorf("eleven sockets in ten places: drops %v", drops)
	}
	l.write(udp(netip.AddrPortFrom(client4, 4000), netip.AddrPortFrom(far4, 7), "x"))
	l.sweep(time.Now().Add(dnsIdle + time.Second))
	l.within("end of those that asked for names alone", func() bool { return l.places == 9 })
	l.sweep(time.Now().Add(udpIdle + time.Second))
	l.within("end of all", func() bool { return l.places == 10 })
}

func TestRefused(t *testing.T) {
	l := newLab(t, true)
	from, to := netip.AddrPortFrom(client4, 4000), netip.AddrPortFrom(far4, 9)
	fragment := udp(from, to, "x")
	fragment.Data[6] |= 0x20 // more fragments
	other := udp(from, to, "x")
	other.Data[9] = 132 // SCTP
	reply := echo(t, client4, far4, 1, "x")
	reply.Data[20] = echoReply4
	for name, pkt := range map[string]packet.Packet{"fragment": fragment, "SCTP": other, "echo reply": reply} {
		l.refused = nil
		l.write(pkt)
		if len(l.refused) != 1 || !strings.HasSuffix(l.refused[0], fmt.Sprint(packet.AdminProhibited)) {
			t.Errorf("%s: %q", name, l.refused)
		}
	}
	wrong := udp(from, to, "x")
	wrong.Data[len(wrong.Data)-1]++
	long := udp(from, to, "x")
	long.Data[25]++ // longer than the packet
	for range 2 {
		l.write(wrong)
		l.write(long)
		wrong, long = udp(from, netip.AddrPortFrom(far4, 0), "x"), packet.Packet{Data: []byte("no packet")}
	}
	if drops := l.cfg.Drops.Snapshot(); drops[packet.DropMalformed.String()] != 4 {
		t.Errorf("drops %v, want 4 malformed ones", drops)
	}
}

func FuzzEcho(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 1, 0, 2, 'x'}, true)
	f.Add([]byte{129, 0, 0, 0, 0, 1, 0, 2}, false)
	f.Fuzz(func(t *testing.T, message []byte, four bool) {
		from, to := far6, client6
		if four {
			from, to = far4, client4
		}
		message = message[:min(len(message), 65000)]
		data := appendEcho(nil, from, key{from: netip.AddrPortFrom(to, 77)}, message)
		if data == nil {
			return
		}
		h, err := packet.Parse(data)
		if err != nil || h.Src != from || h.Dst != to || len(data) != h.IPLen+len(message) {
			t.Fatalf("%+v, %v of %x", h, err, data)
		}
		if got := data[h.IPLen+4 : h.IPLen+6]; got[0] != 0 || got[1] != 77 {
			t.Errorf("identifier %x", got)
		}
		if isEcho(data, h) {
			t.Error("a reply counts as a request")
		}
	})
}

// Control messages come from the kernel; what is damaged is not read past its end.
func FuzzControl(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{20, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 0, 104, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		eachControl(b, func(_, _ int32, data []byte) {
			if len(data) > len(b) {
				t.Errorf("%d bytes in %d", len(data), len(b))
			}
		})
	})
}
