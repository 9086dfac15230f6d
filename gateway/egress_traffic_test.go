package gateway

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

const patience = 30 * time.Second

// A wire is the TUN device of an egress without a router: what the kernel hands
// out is kept.
type wire struct {
	t *testing.T
	e *egress

	mu  sync.Mutex
	got [][]byte
}

func newWire(t *testing.T, e *egress) *wire {
	w := &wire{t: t, e: e}
	var readers sync.WaitGroup
	for _, q := range e.dev.Queues() {
		readers.Go(func() {
			pkts := make([]packet.Packet, 16)
			for {
				n, err := q.Read(pkts)
				if err != nil {
					return // closed
				}
				w.mu.Lock()
				for _, p := range pkts[:n] {
					w.got = append(w.got, bytes.Clone(p.Data))
				}
				w.mu.Unlock()
			}
		})
	}
	t.Cleanup(func() {
		e.dev.Close()
		readers.Wait()
	})
	return w
}

func (w *wire) send(b []byte) {
	w.t.Helper()
	if err := w.e.dev.Queues()[0].Write([]packet.Packet{{Data: b}}); err != nil {
		w.t.Fatal(err)
	}
}

// forget drops what the kernel has handed out.
func (w *wire) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.got = nil
}

// find returns a packet that the kernel has handed out, or nil.
func (w *wire) find(match func(h packet.Header, b []byte) bool) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, b := range w.got {
		if h, err := packet.Parse(b); err == nil && match(h, b) {
			return b
		}
	}
	return nil
}

func (w *wire) wait(what string, match func(h packet.Header, b []byte) bool) (b []byte) {
	w.t.Helper()
	within(w.t, patience, what, func() bool { b = w.find(match); return b != nil })
	return b
}

// An inbox is a socket that keeps what it gets, with who sent it.
type inbox struct {
	net.PacketConn
	mu  sync.Mutex
	got map[string]netip.AddrPort
}

func newInbox(t *testing.T, ns *netlab.NS, addr netip.AddrPort) *inbox {
	t.Helper()
	return newInboxOf(t, ns, "udp", addr.String())
}

func newInboxOf(t *testing.T, ns *netlab.NS, network, addr string) *inbox {
	t.Helper()
	c, err := ns.ListenPacket(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	i := &inbox{PacketConn: c, got: make(map[string]netip.AddrPort)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 2000)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			var a netip.AddrPort
			if u, ok := from.(*net.UDPAddr); ok {
				a = netip.AddrPortFrom(u.AddrPort().Addr().Unmap(), u.AddrPort().Port())
			}
			i.mu.Lock()
			i.got[string(buf[:n])] = a
			i.mu.Unlock()
		}
	}()
	t.Cleanup(func() { c.Close(); <-done })
	return i
}

func (i *inbox) from(text string) (netip.AddrPort, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	a, ok := i.got[text]
	return a, ok
}

func (i *inbox) waitFrom(t *testing.T, text string) netip.AddrPort {
	t.Helper()
	within(t, patience, "packet "+text, func() bool { _, ok := i.from(text); return ok })
	a, _ := i.from(text)
	return a
}

// send sends a datagram from a namespace.
func send(t *testing.T, ns *netlab.NS, to netip.AddrPort, text string) {
	t.Helper()
	c, err := ns.DialContext(t.Context(), "udp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// Some of these have nowhere to go.
	_, _ = c.Write([]byte(text))
}

// A family is the world in one IP version.
type family struct {
	name                  string
	client, other         netip.Addr // clients of the gateway
	pool, host, inet, lan netip.Addr
	prefix, lanPrefix     string
	reply, timeExceeded   byte // ICMP types
	hostEth1              netip.Addr
}

var families = []family{
	{
		name: "IPv4", client: netip.MustParseAddr("10.91.0.5"), other: netip.MustParseAddr("10.91.0.6"),
		pool: netip.MustParseAddr("10.91.0.1"), host: hostAddr4, inet: inetAddr4, lan: lanAddr4,
		hostEth1: netip.MustParseAddr("198.51.100.1"),
		prefix:   "10.91.0.0/16", lanPrefix: "198.51.100.0/24", reply: 0, timeExceeded: 11,
	},
	{
		name: "IPv6", client: netip.MustParseAddr("fd12::5"), other: netip.MustParseAddr("fd12::6"),
		pool: netip.MustParseAddr("fd12::1"), host: hostAddr6, inet: inetAddr6, lan: lanAddr6,
		hostEth1: netip.MustParseAddr("2001:db8:5::1"),
		prefix:   "fd12::/64", lanPrefix: "2001:db8:5::/64", reply: 129, timeExceeded: 3,
	},
}

func port16(ip netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(ip, port) }

// is matches packets by protocol, source and destination.
func is(proto uint8, src, dst netip.AddrPort) func(packet.Header, []byte) bool {
	return func(h packet.Header, _ []byte) bool {
		return h.Proto == proto && h.Src == src.Addr() && h.SrcPort == src.Port() && h.Dst == dst.Addr() && h.DstPort == dst.Port()
	}
}

func TestEgressMasquerades(t *testing.T) {
	for _, host := range hosts {
		if !host.ipv6 {
			continue
		}
		t.Run(host.name, func(t *testing.T) {
			w := newWorld(t)
			w.prepare(host.sysctls)
			cfg := w.config()
			cfg.everyForward = host.every
			wire := newWire(t, w.open(cfg))
			for _, f := range families {
				t.Run(f.name+" UDP", func(t *testing.T) { testUDP(t, w, wire, f) })
				t.Run(f.name+" TCP", func(t *testing.T) { testTCP(t, w, wire, f) })
				t.Run(f.name+" ICMP", func(t *testing.T) { testICMP(t, w, wire, f) })
			}
		})
	}
}

func testUDP(t *testing.T, w *world, wire *wire, f family) {
	client, server := port16(f.client, 4000), port16(f.inet, 53)
	in := newInbox(t, w.internet, server)
	wire.send(udpPacket(client, server, []byte("question")))
	from := in.waitFrom(t, "question")
	if from.Addr() != f.host {
		t.Errorf("the internet sees %v, want the host, %v", from, f.host)
	}
	if _, err := in.WriteTo([]byte("answer"), net.UDPAddrFromAddrPort(from)); err != nil {
		t.Fatal(err)
	}
	b := wire.wait("the answer", is(packet.UDP, server, client))
	if !bytes.HasSuffix(b, []byte("answer")) {
		t.Errorf("the answer is % x", b)
	}
}

func testTCP(t *testing.T, w *world, wire *wire, f family) {
	const syn, ack, push = 0x02, 0x10, 0x08
	client, server := port16(f.client, 4001), port16(f.inet, 80)
	ln, err := w.internet.Listen("tcp", server.String())
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	wire.send(tcpPacket(client, server, 100, 0, syn, nil))
	b := wire.wait("the SYN's answer", is(packet.TCP, server, client))
	h, err := packet.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	seq := binary.BigEndian.Uint32(b[h.IPLen+4:]) + 1
	wire.send(tcpPacket(client, server, 101, seq, ack|push, []byte("hello")))
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if from := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(); from != f.host {
		t.Errorf("the internet sees %v, want the host, %v", from, f.host)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
		t.Errorf("the server read %q: %v", got, err)
	}
	if _, err := conn.Write([]byte("welcome")); err != nil {
		t.Fatal(err)
	}
	wire.wait("what the server wrote", func(h packet.Header, b []byte) bool {
		return is(packet.TCP, server, client)(h, b) && bytes.HasSuffix(b, []byte("welcome"))
	})
}

func testICMP(t *testing.T, w *world, wire *wire, f family) {
	// The internet has no route to the client: what is answered was masqueraded.
	wire.send(echoPacket(f.client, f.inet, 77, 1, []byte("ping")))
	wire.wait("the reply to a ping", func(h packet.Header, b []byte) bool {
		return h.Src == f.inet && h.Dst == f.client && b[h.IPLen] == f.reply && bytes.HasSuffix(b, []byte("ping"))
	})

	// The kernel's own error about a client's packet.
	wire.send(withHops(udpPacket(port16(f.client, 4002), port16(f.inet, 53), []byte("last hop")), 1))
	wire.wait("time exceeded", func(h packet.Header, b []byte) bool {
		return h.Src == f.pool && h.Dst == f.client && b[h.IPLen] == f.timeExceeded
	})

	// An error of the gateway's, from its address in the pool, about what the
	// internet sent.
	client, server := port16(f.client, 4003), port16(f.inet, 5353)
	in := newInbox(t, w.internet, server)
	wire.send(udpPacket(client, server, []byte("big please")))
	from := in.waitFrom(t, "big please")
	if _, err := in.WriteTo(make([]byte, 1400), net.UDPAddrFromAddrPort(from)); err != nil {
		t.Fatal(err)
	}
	big := wire.wait("the big packet", is(packet.UDP, server, client))
	wire.send(packet.AppendTooBig(nil, big, f.pool, 1300))
	within(t, patience, "the sender's notice of the MTU", func() bool {
		out, err := w.internet.Command(t.Context(), "ip", "route", "get", f.host.String()).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return strings.Contains(string(out), "mtu 1300")
	})
}

// A gateway that starts anew finds the connections that there were.
func TestEgressKeepsConnections(t *testing.T) {
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprintf("killed %v", killed), func(t *testing.T) {
			w := newWorld(t)
			server4, server6 := port16(inetAddr4, 53), port16(inetAddr6, 53)
			inboxes := []*inbox{newInbox(t, w.internet, server4), newInbox(t, w.internet, server6)}
			e, err := w.tryOpen(w.config())
			if err != nil {
				t.Fatal(err)
			}
			was := make([]netip.AddrPort, len(families))
			for i, f := range families {
				b := udpPacket(port16(f.client, 4000), port16(f.inet, 53), []byte("first"))
				if err := e.dev.Queues()[0].Write([]packet.Packet{{Data: b}}); err != nil {
					t.Fatal(err)
				}
				was[i] = inboxes[i].waitFrom(t, "first")
			}
			if err := e.close(); err != nil {
				t.Fatal(err)
			}
			if killed {
				w.kill("quicvpn-gw", false)
			}
			wire := newWire(t, w.open(w.config()))
			for i, f := range families {
				// What the server sends first after the restart, and the client.
				if _, err := inboxes[i].WriteTo([]byte("late answer"), net.UDPAddrFromAddrPort(was[i])); err != nil {
					t.Fatal(err)
				}
				wire.wait("a late answer", is(packet.UDP, port16(f.inet, 53), port16(f.client, 4000)))
				wire.send(udpPacket(port16(f.client, 4000), port16(f.inet, 53), []byte("second")))
				if now := inboxes[i].waitFrom(t, "second"); now != was[i] {
					t.Errorf("the internet saw %v and sees %v", was[i], now)
				}
			}
		})
	}
}
