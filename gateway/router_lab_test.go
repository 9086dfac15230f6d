package gateway

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A fakeSession keeps what is sent to it.
type fakeSession struct {
	mu     sync.Mutex
	calls  int
	pkts   []packet.Packet
	queues []int
	closed []string
	// tooBig makes Send answer everything with an ICMP error of this MTU.
	tooBig int
	from   netip.Addr

	refused string         // why not all that it announced was taken
	peers   []netip.Prefix // the last that it was told
	told    int            // how often it was told
}

func (f *fakeSession) Send(queue int, pkts []packet.Packet, errs tunnel.Sink) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	for _, p := range pkts {
		if f.tooBig > 0 && errs != nil {
			errs.WritePackets(queue, []packet.Packet{{Data: packet.AppendTooBig(nil, p.Data, f.from, f.tooBig)}})
			continue
		}
		p.Data = bytes.Clone(p.Data)
		f.pkts = append(f.pkts, p)
		f.queues = append(f.queues, queue)
	}
}

func (f *fakeSession) SetPeers(peers []netip.Prefix) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.peers = peers
	f.told++
	return nil
}

// news returns how often it was told of its peers, and the last time.
func (f *fakeSession) news() (told int, peers []netip.Prefix) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.told, f.peers
}

func (f *fakeSession) Close(reason string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = append(f.closed, reason)
	return nil
}

// take returns what was sent since the last time.
func (f *fakeSession) take() []packet.Packet {
	f.mu.Lock()
	defer f.mu.Unlock()
	pkts := f.pkts
	f.pkts, f.queues, f.calls = nil, nil, 0
	return pkts
}

// A fakeExit keeps what is written to it.
type fakeExit struct {
	fakeSession
}

func (f *fakeExit) Write(pkts []packet.Packet) error {
	f.Send(0, pkts, nil)
	return nil
}

// A routerLab is a router with three clients: a and b of one network, c of
// another.
type routerLab struct {
	*router
	exits    []*fakeExit
	a, b, c  *port
	sa, sb   *fakeSession
	sc       *fakeSession
	drops    packet.Drops
	isHost   atomic.Pointer[netip.Addr]
	admitted func(Client) bool
}

const (
	gw4, a4, b4, c4, free4 = "10.91.0.1", "10.91.0.2", "10.91.0.3", "10.91.0.4", "10.91.0.9"
	gw6, a6, b6, c6, free6 = "fd12::1", "fd12::2", "fd12::3", "fd12::4", "fd12::9"
	web4, web6             = "203.0.113.10", "2001:db8:3::10"
)

func newRouterLab(t testing.TB) *routerLab {
	t.Helper()
	l := &routerLab{admitted: func(Client) bool { return true }}
	for range 2 {
		l.exits = append(l.exits, &fakeExit{})
	}
	l.router = newRouter(routerConfig{
		pool4: netip.MustParsePrefix("10.91.0.0/16"), pool6: netip.MustParsePrefix("fd12::/64"),
		exits: []exit{l.exits[0], l.exits[1]}, exit6: true,
		isHost:   func(ip netip.Addr) bool { host := l.isHost.Load(); return host != nil && ip == *host },
		admitted: func(c Client) bool { return l.admitted(c) },
		drops:    &l.drops,
	})
	l.a, l.sa = l.join(t, 1, "one", a4, a6)
	l.b, l.sb = l.join(t, 2, "one", b4, b6)
	l.c, l.sc = l.join(t, 3, "two", c4, c6)
	return l
}

func (l *routerLab) join(t testing.TB, id byte, network, ip4, ip6 string, allow ...netip.Prefix) (*port, *fakeSession) {
	t.Helper()
	return l.attachAs(t, Client{ID: tunnel.Fingerprint{id}, Network: network,
		Addr4: netip.MustParseAddr(ip4), Addr6: netip.MustParseAddr(ip6), Allow: allow})
}

// attachAs joins as a client does: it announces, and then has a session.
func (l *routerLab) attachAs(t testing.TB, c Client, announce ...netip.Prefix) (*port, *fakeSession) {
	t.Helper()
	pol, err := newPolicy(c.Allow)
	if err != nil {
		t.Fatal(err)
	}
	s := &fakeSession{from: netip.MustParseAddr(gw4)}
	var granted tunnel.Grant
	granted.Announced, granted.AnnounceRefused, granted.Peers = l.claim(c, announce)
	s.refused, s.peers = granted.AnnounceRefused, granted.Peers
	p := l.attach(c, s, pol, granted)
	if p == nil {
		t.Fatalf("client %v was not taken", c.ID)
	}
	return p, s
}

func udp(src, dst string, payload string) []byte {
	return udpPacket(netip.AddrPortFrom(netip.MustParseAddr(src), 1000), netip.AddrPortFrom(netip.MustParseAddr(dst), 53), []byte(payload))
}

func single(b ...[]byte) (pkts []packet.Packet) {
	for _, p := range b {
		pkts = append(pkts, packet.Packet{Data: p})
	}
	return pkts
}

// describe says what an ICMP error is.
func describe(p packet.Packet) string {
	h, err := packet.Parse(p.Data)
	if err != nil {
		return err.Error()
	}
	if h.Proto != packet.ICMP && h.Proto != packet.ICMPv6 {
		return fmt.Sprintf("%v > %v", h.Src, h.Dst)
	}
	t := p.Data[h.IPLen:]
	return fmt.Sprintf("%v > %v icmp %d/%d", h.Src, h.Dst, t[0], t[1])
}

// A quietSession takes everything.
type quietSession struct{}

func (*quietSession) Send(int, []packet.Packet, tunnel.Sink) {}
func (*quietSession) SetPeers([]netip.Prefix) error          { return nil }
func (*quietSession) Close(string) error                     { return nil }
func (*quietSession) Write([]packet.Packet) error            { return nil }
