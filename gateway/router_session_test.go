package gateway

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

func TestRouterReplacesSessions(t *testing.T) {
	l := newRouterLab(t)
	old, sold := l.a, l.sa
	l.a, l.sa = l.join(t, 1, "one", a4, a6)
	if len(sold.closed) != 1 || sold.closed[0] == "" {
		t.Errorf("the old session was closed with %q", sold.closed)
	}
	if n := l.sessions(); n != 3 {
		t.Errorf("%d sessions, want 3", n)
	}
	l.fromKernel(0, single(udp(web4, a4, "x"), udp(web6, a6, "x")))
	if n, m := len(sold.take()), len(l.sa.take()); n != 0 || m != 2 {
		t.Errorf("the old session got %d packets, the new one %d", n, m)
	}
	// What is left of the old one changes nothing for the new one.
	old.WritePackets(0, single(udp(a4, web4, "x")))
	if n := len(l.exits[0].take()); n != 0 || l.drops.Snapshot()["closed"] != 1 {
		t.Errorf("%d packets of the old session left", n)
	}
	l.detach(old)
	l.fromKernel(0, single(udp(web4, a4, "x")))
	if n := len(l.sa.take()); n != 1 {
		t.Errorf("the new session got %d packets after the old one had ended", n)
	}
	l.detach(l.a)
	l.fromKernel(0, single(udp(web4, a4, "x"), udp(web6, a6, "x")))
	if n := l.drops.Snapshot()["no-session"]; n != 2 || len(l.sa.take()) != 0 || l.sessions() != 2 {
		t.Errorf("after the end: %d drops, %d sessions", n, l.sessions())
	}
}

// A client that joins with other addresses than before loses the old ones, and
// an address that has another client now is taken from the one before.
func TestRouterMovesAddresses(t *testing.T) {
	l := newRouterLab(t)
	_, moved := l.join(t, 1, "one", "10.91.0.20", a6)
	l.fromKernel(0, single(udp(web4, a4, "x"), udp(web4, "10.91.0.20", "x"), udp(web6, a6, "x")))
	if n := len(moved.take()); n != 2 || l.drops.Snapshot()["no-session"] != 1 {
		t.Errorf("the moved client got %d packets", n)
	}
	_, heir := l.join(t, 9, "two", b4, "fd12::20")
	if len(l.sb.closed) != 1 {
		t.Errorf("the client that lost its address was closed with %q", l.sb.closed)
	}
	l.b.WritePackets(0, single(udp(b4, web4, "x")))
	l.fromKernel(0, single(udp(web4, b4, "x"), udp(web6, b6, "x")))
	if n, m, k := len(heir.take()), len(l.sb.take()), len(l.exits[0].take()); n != 1 || m != 0 || k != 0 {
		t.Errorf("the new owner got %d packets, the old one %d and sent %d", n, m, k)
	}
}

func TestRouterRevokes(t *testing.T) {
	l := newRouterLab(t)
	l.detachRevoked([]tunnel.Fingerprint{{1}, {3}, {77}})
	if !slices.Equal(l.sa.closed, []string{"revoked or removed"}) || !slices.Equal(l.sc.closed, []string{"revoked or removed"}) || l.sb.closed != nil {
		t.Errorf("closed: %q, %q, %q", l.sa.closed, l.sb.closed, l.sc.closed)
	}
	l.a.WritePackets(0, single(udp(a4, web4, "x")))
	l.fromKernel(0, single(udp(web4, a4, "x")))
	if n, m := len(l.exits[0].take()), len(l.sa.take()); n != 0 || m != 0 {
		t.Errorf("a revoked client sent %d packets and got %d", n, m)
	}
	// Revoked between the answer to its join and its session.
	l.admitted = func(Client) bool { return false }
	late := &fakeSession{}
	pol, err := newPolicy(nil)
	if err != nil {
		t.Fatal(err)
	}
	if p := l.attach(Client{ID: tunnel.Fingerprint{1}, Addr4: netip.MustParseAddr(a4)}, late, pol, tunnel.Grant{}); p != nil || l.sessions() != 1 {
		t.Error("a revoked client was taken")
	}
}

// A checkedSession fails if it gets a packet for an address that is not its
// client's.
type checkedSession struct {
	addrs    [2]netip.Addr
	got      atomic.Int64
	strayed  *atomic.Int64
	closings atomic.Int64
}

func (s *checkedSession) Send(_ int, pkts []packet.Packet, _ tunnel.Sink) {
	for _, p := range pkts {
		h, err := packet.Parse(p.Data)
		if err != nil || h.Dst != s.addrs[0] && h.Dst != s.addrs[1] {
			s.strayed.Add(1)
		}
	}
	s.got.Add(int64(len(pkts)))
}

func (s *checkedSession) SetPeers([]netip.Prefix) error { return nil }

func (s *checkedSession) Close(string) error { s.closings.Add(1); return nil }

// Sessions come, go and replace each other while packets for them come from the
// internet and from each other.
func TestRouterUnderChurn(t *testing.T) {
	const clients, rounds = 20, 300
	l := newRouterLab(t)
	l.router.cfg.exits = []exit{&quietSession{}, &quietSession{}}
	var strayed atomic.Int64
	addr := func(i int) [2]netip.Addr {
		four := [4]byte{10, 91, 1}
		six := netip.MustParseAddr("fd12::1:0").As16()
		four[3], six[15] = byte(i+1), byte(i+1)
		return [2]netip.Addr{netip.AddrFrom4(four), netip.AddrFrom16(six)}
	}
	pol, err := newPolicy(nil)
	if err != nil {
		t.Fatal(err)
	}
	join := func(i int) (*port, *checkedSession) {
		s := &checkedSession{addrs: addr(i), strayed: &strayed}
		p := l.attach(Client{ID: tunnel.Fingerprint{100, byte(i)}, Network: "one", Addr4: s.addrs[0], Addr6: s.addrs[1]}, s, pol, tunnel.Grant{})
		return p, s
	}
	var churn, load sync.WaitGroup
	stop := make(chan struct{})
	for i := range clients {
		churn.Go(func() {
			p, s := join(i)
			for n := range rounds {
				q, next := join(i) // replaces
				if s.closings.Load() == 0 {
					t.Error("a session was replaced and not closed")
				}
				l.detach(p)
				p, s = q, next
				if n%3 == 0 {
					l.detach(p)
					p, s = join(i)
				}
				to := addr((i + n) % clients)
				p.WritePackets(n, single(
					udpPacket(netip.AddrPortFrom(p.client.Addr4, 1), netip.AddrPortFrom(to[0], 2), nil),
					udpPacket(netip.AddrPortFrom(p.client.Addr6, 1), netip.AddrPortFrom(to[1], 2), nil)))
			}
		})
	}
	for q := range 2 {
		load.Go(func() {
			for n := uint32(0); ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				var pkts []packet.Packet
				for i := range 8 {
					to := addr(int(binary.BigEndian.Uint16([]byte{0, byte(n + uint32(i)/2)})) % clients)
					pkts = append(pkts, single(udpPacket(netip.MustParseAddrPort(web4+":53"), netip.AddrPortFrom(to[0], 2), nil),
						udpPacket(netip.MustParseAddrPort("["+web6+"]:53"), netip.AddrPortFrom(to[1], 2), nil))...)
				}
				l.fromKernel(q, pkts)
			}
		})
	}
	churn.Wait()
	close(stop)
	load.Wait()
	if n := strayed.Load(); n != 0 {
		t.Errorf("%d packets reached a session that does not own their destination", n)
	}
	if n := l.sessions(); n != 3+clients {
		t.Errorf("%d sessions, want %d", n, 3+clients)
	}
	for i := range clients {
		p := l.lookup(addr(i)[0])
		if p == nil || p != l.lookup(addr(i)[1]) {
			t.Errorf("client %d has lost an address", i)
		}
	}
}
