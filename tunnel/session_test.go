package tunnel

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"github.com/quicvpn/quicvpn/internal/packet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	client4  = netip.MustParseAddr("10.91.0.2")
	client6  = netip.MustParseAddr("fd00::2")
	gateway4 = netip.MustParseAddr("10.91.0.1")
	gateway6 = netip.MustParseAddr("fd00::1")
	far4     = netip.MustParseAddr("203.0.113.9")
	far6     = netip.MustParseAddr("2001:db8::9")

	testGrant = Grant{
		Network:   "default",
		Addresses: []netip.Addr{client4, client6},
		Routes:    []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		Gateway:   []netip.Addr{gateway4, gateway6},
		Peers:     []netip.Prefix{netip.MustParsePrefix("10.91.0.0/16"), netip.MustParsePrefix("fd00::/64")},
	}
)

// collector is a sink that keeps copies.
type collector struct {
	mu   sync.Mutex
	pkts []packet.Packet
	got  chan struct{}
}

func newCollector() *collector { return &collector{got: make(chan struct{}, 1)} }

func (c *collector) WritePackets(_ int, pkts []packet.Packet) {
	c.mu.Lock()
	for _, p := range pkts {
		p.Data = bytes.Clone(p.Data)
		c.pkts = append(c.pkts, p)
	}
	c.mu.Unlock()
	select {
	case c.got <- struct{}{}:
	default:
	}
}

// wait returns the packets once there are n.
func (c *collector) wait(t *testing.T, n int) []packet.Packet {
	t.Helper()
	deadline := time.After(patience)
	for {
		c.mu.Lock()
		pkts := slices.Clone(c.pkts)
		c.mu.Unlock()
		if len(pkts) >= n {
			return pkts
		}
		select {
		case <-c.got:
		case <-deadline:
			t.Fatalf("got %d packets, want %d", len(pkts), n)
		}
	}
}

type testGateway struct {
	*Server
	key    ed25519.PrivateKey
	joins  chan Join
	serve  chan *Session
	killed bool // Run may fail
	stop   func()
}

// startGateway runs a server on loopback until the test ends.
func startGateway(t *testing.T, cfg ServerConfig) *testGateway {
	t.Helper()
	g := &testGateway{key: cfg.Key, joins: make(chan Join, 16), serve: make(chan *Session, 16)}
	if cfg.Key == nil {
		g.key = newKey(t)
	}
	cfg.Key = g.key
	if !cfg.Listen.IsValid() {
		cfg.Listen = netip.MustParseAddrPort("127.0.0.1:0")
	}
	if cfg.Authorize == nil {
		cfg.Authorize = func(_ context.Context, j Join) (Grant, error) {
			g.joins <- j
			return testGrant, nil
		}
	}
	if cfg.Serve == nil {
		cfg.Serve = func(ctx context.Context, s *Session) {
			g.serve <- s
			<-s.Context().Done()
		}
	}
	var err error
	if g.Server, err = Listen(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	g.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil && !g.killed {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(g.stop)
	return g
}

func newKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (g *testGateway) dialer(t *testing.T) *Dialer {
	return &Dialer{Key: newKey(t), Pin: KeyFingerprint(g.key.Public().(ed25519.PublicKey)), Secret: "s3cret"}
}

func dial(t *testing.T, d *Dialer, to netip.AddrPort) *Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s, err := d.Dial(ctx, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close("the test has ended") })
	return s
}

// receive runs a session's Receive until the test ends.
func receive(t *testing.T, s *Session) *collector {
	t.Helper()
	c := newCollector()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Receive(c)
	}()
	t.Cleanup(func() {
		s.Close("the test has ended")
		<-done
	})
	return c
}

// udpPacket makes a UDP packet of exactly size bytes.
func udpPacket(src, dst netip.Addr, size int) []byte {
	return ipPacket(src, dst, packet.UDP, size, func(h, whole []byte) {
		binary.BigEndian.PutUint16(h[0:], 1000)
		binary.BigEndian.PutUint16(h[2:], 2000)
		binary.BigEndian.PutUint16(h[4:], uint16(len(h)))
	})
}

// tcpPacket makes a TCP packet of exactly size bytes from a port.
func tcpPacket(src, dst netip.Addr, port uint16, size int) []byte {
	return ipPacket(src, dst, packet.TCP, size, func(h, whole []byte) {
		binary.BigEndian.PutUint16(h[0:], port)
		binary.BigEndian.PutUint16(h[2:], 80)
		h[12], h[13] = 5<<4, 0x10
	})
}

// ipPacket makes a packet of exactly size bytes, filled with a pattern.
func ipPacket(src, dst netip.Addr, proto byte, size int, transport func(h, whole []byte)) []byte {
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(i)
	}
	n := 20
	if src.Is6() {
		n = 40
		b[0], b[1], b[2], b[3] = 0x60, 0, 0, 0
		binary.BigEndian.PutUint16(b[4:], uint16(size-n))
		b[6], b[7] = proto, 64
		copy(b[8:], src.AsSlice())
		copy(b[24:], dst.AsSlice())
	} else {
		copy(b, []byte{0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, proto, 0, 0})
		binary.BigEndian.PutUint16(b[2:], uint16(size))
		copy(b[12:], src.AsSlice())
		copy(b[16:], dst.AsSlice())
		binary.BigEndian.PutUint16(b[10:], headerSum(b[:20]))
	}
	transport(b[n:], b)
	return b
}

func headerSum(h []byte) uint16 {
	var sum uint32
	for i := 0; i < len(h); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	return ^uint16(sum>>16 + sum)
}

func TestJoin(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	d := g.dialer(t)
	s := dial(t, d, g.Addr())
	if diff := cmp.Diff(testGrant, s.Grant(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("grant (-want +got):\n%s", diff)
	}
	if s.Peer() != d.Pin {
		t.Errorf("peer = %v, want the pinned key", s.Peer())
	}
	j := <-g.joins
	if want := KeyFingerprint(d.Key.Public().(ed25519.PublicKey)); j.Client != want || j.Secret != "s3cret" || !j.Remote.IsValid() {
		t.Errorf("join = %v from %v, want client %v with its secret", j.Client, j.Remote, want)
	}
	served := <-g.serve
	if served.Peer() != j.Client || served.Remote() != j.Remote {
		t.Errorf("served session of %v at %v", served.Peer(), served.Remote())
	}
}

func TestPacketsBothWays(t *testing.T) {
	for name, to := range map[string]string{"ipv4": "127.0.0.1:0", "ipv6": "[::1]:0"} {
		t.Run(name, func(t *testing.T) {
			g := startGateway(t, ServerConfig{Listen: netip.MustParseAddrPort(to), Queues: 2})
			d := g.dialer(t)
			d.Queues = 2
			client := dial(t, d, g.Addr())
			server := <-g.serve
			atClient, atServer := receive(t, client), receive(t, server)

			super := tcpPacket(client4, far4, 4000, 40+30*1000)
			up := []packet.Packet{
				{Data: udpPacket(client4, far4, 600)},
				{Data: udpPacket(client6, far6, 600)},
				{Data: tcpPacket(client4, far4, 4001, 40)},
				{Data: super, Segment: 1000, Flags: packet.Partial},
			}
			sent := clonePackets(up)
			client.Send(1, up, nil)
			samePackets(t, sent, atServer.wait(t, len(sent)))

			down := []packet.Packet{
				{Data: udpPacket(far4, client4, 700)},
				{Data: tcpPacket(far6, client6, 4002, 1400)},
			}
			sent = clonePackets(down)
			server.Send(0, down, nil)
			samePackets(t, sent, atClient.wait(t, len(sent)))
		})
	}
}

func clonePackets(pkts []packet.Packet) []packet.Packet {
	out := slices.Clone(pkts)
	for i := range out {
		out[i].Data = bytes.Clone(out[i].Data)
	}
	return out
}

// sameBytes spares cmp from looking at every byte.
var sameBytes = cmp.Comparer(bytes.Equal)

// samePackets compares without regard to order: streams and datagrams race.
func samePackets(t *testing.T, want, got []packet.Packet) {
	t.Helper()
	less := cmpopts.SortSlices(func(a, b packet.Packet) bool { return bytes.Compare(a.Data, b.Data) < 0 })
	if diff := cmp.Diff(want, got, less, sameBytes); diff != "" {
		t.Errorf("packets (-sent +received):\n%s", diff)
	}
}

func TestTooBigIsAnswered(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	client := dial(t, g.dialer(t), g.Addr())
	server := <-g.serve
	atServer := receive(t, server)
	mtu := client.MTU()
	errs := newCollector()
	fits4, fits6 := udpPacket(client4, far4, mtu), udpPacket(client6, far6, mtu)
	client.Send(0, clonePackets([]packet.Packet{{Data: fits4}, {Data: fits6}}), errs)
	atServer.wait(t, 2)

	client.Send(0, []packet.Packet{{Data: udpPacket(client4, far4, mtu+1)}, {Data: udpPacket(client6, far6, mtu+1)}}, errs)
	answers := errs.wait(t, 2)
	for i, want := range []struct {
		from netip.Addr
		at   int // where the MTU stands in the packet
		kind byte
	}{{gateway4, 20 + 6, 3}, {gateway6, 40 + 6, 2}} {
		b := answers[i].Data
		h, err := packet.Parse(b)
		if err != nil {
			t.Fatal(err)
		}
		if got := int(binary.BigEndian.Uint16(b[want.at:])); got != mtu || h.Src != want.from || b[h.IPLen] != want.kind {
			t.Errorf("answer from %v of type %d says MTU %d; want %v, %d, %d", h.Src, b[h.IPLen], got, want.from, want.kind, mtu)
		}
	}

	// Without DF a router fragments.
	b := udpPacket(client4, far4, mtu+100)
	b[6] = 0
	binary.BigEndian.PutUint16(b[10:], 0)
	binary.BigEndian.PutUint16(b[10:], headerSum(b[:20]))
	client.Send(0, []packet.Packet{{Data: b}}, errs)
	whole := atServer.wait(t, 4)
	if n := len(whole[2].Data) + len(whole[3].Data); n != mtu+100+20 {
		t.Errorf("two fragments hold %d bytes, want %d", n, mtu+100+20)
	}
}

func TestRefusals(t *testing.T) {
	refusal := &RefusedError{Status: 403, Code: "token-revoked", Text: "the token was revoked: ask for a new one"}
	g := startGateway(t, ServerConfig{Authorize: func(context.Context, Join) (Grant, error) { return Grant{}, refusal }})
	_, err := g.dialer(t).Dial(t.Context(), g.Addr())
	var got *RefusedError
	if !errors.As(err, &got) || *got != *refusal {
		t.Errorf("Dial = %v, want the gateway's refusal", err)
	}
}

func TestTrust(t *testing.T) {
	year := 365 * 24 * time.Hour
	for name, test := range map[string]struct {
		change        func(*Dialer)
		gatewayClock  time.Duration
		want          error
		wantHandshake bool
	}{
		"wrong pin":              {change: func(d *Dialer) { d.Pin[0] ^= 1 }, want: ErrPin},
		"client's clock behind":  {change: func(d *Dialer) { d.Now = clock(-year) }, want: ErrNotYetValid},
		"client's clock ahead":   {change: func(d *Dialer) { d.Now = clock(year) }, want: ErrExpired},
		"gateway's clock ahead":  {gatewayClock: year, want: ErrNotYetValid},
		"gateway's clock behind": {gatewayClock: -year, want: ErrExpired},
	} {
		t.Run(name, func(t *testing.T) {
			g := startGateway(t, ServerConfig{Now: clock(test.gatewayClock)})
			d := g.dialer(t)
			if test.change != nil {
				test.change(d)
			}
			start := time.Now()
			if _, err := d.Dial(t.Context(), g.Addr()); !errors.Is(err, test.want) {
				t.Errorf("Dial = %v, want %v", err, test.want)
			}
			if took := time.Since(start); took > 900*time.Millisecond {
				t.Errorf("said so after %v, want at once", took)
			}
		})
	}
}

func clock(off time.Duration) func() time.Time {
	return func() time.Time { return time.Now().Add(off) }
}

func TestDialNobody(t *testing.T) {
	// A socket that never answers.
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d := &Dialer{Key: newKey(t)}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if s, err := d.Dial(ctx, addrPort(c.LocalAddr())); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial = %v, %v; want the deadline", s, err)
	}
}

// A gateway that was killed and started again answers its clients' packets with
// stateless resets, so that they need no timeout to notice. Nor need those that were
// being sent to, and have nothing to say.
func TestGatewayRestart(t *testing.T) {
	for name, sends := range map[string]bool{"sending": true, "receiving": false} {
		t.Run(name, func(t *testing.T) {
			key := newKey(t)
			first := startGateway(t, ServerConfig{Key: key})
			client := dial(t, first.dialer(t), first.Addr())
			ended := make(chan error, 1)
			got := newCollector()
			go func() { ended <- client.Receive(got) }()
			server := <-first.serve
			if !sends {
				for range 4 * busyLook {
					server.Send(0, []packet.Packet{{Data: udpPacket(far4, client4, 1000)}}, nil)
				}
				got.wait(t, 4*busyLook)
			}
			at := first.Addr()
			first.killed = true
			first.transport.Conn.Close() // what a SIGKILL leaves: silence
			first.stop()
			second := startGateway(t, ServerConfig{Key: key, Listen: at})

			stop := time.After(3 * time.Second) // less than until a ping is due anyway
			for {
				if sends {
					client.Send(0, []packet.Packet{{Data: udpPacket(client4, far4, 100)}}, nil)
				}
				select {
				case err := <-ended:
					if err == nil {
						t.Error("Receive = nil, want a reason")
					}
					dial(t, second.dialer(t), at)
					return
				case <-time.After(50 * time.Millisecond):
				case <-stop:
					t.Fatal("the session still stands 3 s after the gateway has restarted")
				}
			}
		})
	}
}

func TestStallDetector(t *testing.T) {
	type look struct {
		after           time.Duration
		writing         bool
		moved, received uint64
		want            bool
	}
	for name, looks := range map[string][]look{
		"nothing arrives": {{0, true, 0, 0, false}, {3 * time.Second, true, 9000, 5, false}, {4 * time.Second, true, 9000, 5, true}},
		"much arrives":    {{0, true, 0, 0, false}, {3 * time.Second, true, 20000, 5, false}, {4 * time.Second, true, 20000, 6, false}},
		"nothing waits":   {{0, false, 0, 0, false}, {4 * time.Second, false, 0, 5, false}},
		"silence":         {{0, true, 0, 7, false}, {9 * time.Second, true, 0, 7, false}},
	} {
		t.Run(name, func(t *testing.T) {
			var d stallDetector
			start := time.Now()
			for i, l := range looks {
				if got := d.stalled(start.Add(l.after), l.writing, l.moved, l.received); got != l.want {
					t.Errorf("look %d: stalled %t, want %t", i, got, l.want)
				}
			}
		})
	}
}

func TestCloseEndsBothEnds(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	client := dial(t, g.dialer(t), g.Addr())
	server := <-g.serve
	ended := make(chan error, 1)
	go func() { ended <- client.Receive(newCollector()) }()
	server.Close("revoked")
	select {
	case err := <-ended:
		if err == nil || !bytes.Contains([]byte(err.Error()), []byte("revoked")) {
			t.Errorf("Receive = %v, want the reason", err)
		}
	case <-time.After(3 * time.Second):
		t.Fatal("the client did not notice")
	}
	if err := client.Close(""); err != nil {
		t.Errorf("Close after the end: %v", err)
	}
	var drops packet.Drops
	client.drops = &drops
	client.Send(0, []packet.Packet{{Data: udpPacket(client4, far4, 100)}}, nil)
	if got := drops.Snapshot()["closed"]; got != 1 {
		t.Errorf("closed drops = %d, want 1", got)
	}
}
