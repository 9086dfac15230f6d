package sidecar

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// The toy tunnel carries packets in clear in UDP datagrams, so that the tests of
// what happens in the namespace have both of its ends in their hands. The first
// byte of a datagram says what it is.
const (
	toyJoin    = 'J' // to the gateway, until it answers
	toyWelcome = 'W' // to the client, with a toyGrant
	toyPacket  = 'P' // both ways
	toyPing    = 'K' // to the gateway
	toyPong    = 'A' // to the client
	toyMTU     = 'M' // to the client, with a number
	toyEnd     = 'E' // to the client
)

type toyGrant struct {
	Grant tunnel.Grant
	MTU   int
}

// toySession is the client's end.
type toySession struct {
	session // what is not called

	conn    net.Conn
	remote  netip.AddrPort
	grant   tunnel.Grant
	changed chan struct{}
	done    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup

	mu      sync.Mutex // guards what follows
	mtu     int
	heard   time.Time
	waiting bool
	split   packet.Splitter
}

func dialToy(ctx context.Context, gateway netip.AddrPort) (session, error) {
	conn, err := dialMarked(ctx, Mark, "udp", gateway.String())
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { conn.SetReadDeadline(time.Unix(1, 0)) })()
	buf := make([]byte, 2048)
	for {
		if _, err := conn.Write([]byte{toyJoin}); err != nil {
			conn.Close()
			return nil, fmt.Errorf("send join: %w", err)
		}
		if ctx.Err() == nil {
			conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		}
		n, err := conn.Read(buf)
		if ctx.Err() != nil {
			conn.Close()
			return nil, ctx.Err()
		}
		if err != nil || n == 0 || buf[0] != toyWelcome {
			continue
		}
		var g toyGrant
		if err := json.Unmarshal(buf[1:n], &g); err != nil {
			conn.Close()
			return nil, err
		}
		conn.SetReadDeadline(time.Time{})
		s := &toySession{
			conn: conn, remote: gateway, grant: g.Grant, mtu: g.MTU, heard: time.Now(),
			changed: make(chan struct{}, 1), done: make(chan struct{}),
		}
		s.wg.Go(s.ping)
		return s, nil
	}
}

func (s *toySession) Grant() tunnel.Grant           { return s.grant }
func (s *toySession) Remote() netip.AddrPort        { return s.remote }
func (s *toySession) RTT() time.Duration            { return time.Millisecond }
func (s *toySession) Congestion() tunnel.Congestion { return tunnel.BBR }
func (s *toySession) MTUChanged() <-chan struct{}   { return s.changed }

func (s *toySession) Peers() []netip.Prefix         { return s.grant.Peers }
func (s *toySession) PeersChanged() <-chan struct{} { return nil }
func (s *toySession) Leave(context.Context) error {
	return errors.New("the toy gateway forgets nobody")
}

func (s *toySession) MTU() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mtu
}

func (s *toySession) LastReceived() (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heard, s.waiting
}

func (s *toySession) ping() {
	for {
		select {
		case <-s.done:
			return
		case <-time.After(100 * time.Millisecond):
			s.mu.Lock()
			s.waiting = true
			s.mu.Unlock()
			s.conn.Write([]byte{toyPing})
		}
	}
}

func (s *toySession) Send(_ int, pkts []packet.Packet, _ tunnel.Sink) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range pkts {
		h, err := packet.Parse(pkts[i].Data)
		if err != nil {
			continue
		}
		s.split.Reset(&pkts[i], h, 0)
		for b := s.split.Next(); b != nil; b = s.split.Next() {
			s.conn.Write(append([]byte{toyPacket}, b...))
		}
	}
}

func (s *toySession) Receive(sink tunnel.Sink) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := s.conn.Read(buf)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil || n == 0 {
			continue // the gateway's port is closed for a while
		}
		s.mu.Lock()
		s.heard, s.waiting = time.Now(), false
		s.mu.Unlock()
		switch body := buf[1:n]; buf[0] {
		case toyPacket:
			sink.WritePackets(0, []packet.Packet{{Data: body}})
		case toyMTU:
			s.mu.Lock()
			s.mtu = int(binary.BigEndian.Uint16(body))
			s.mu.Unlock()
			kick(s.changed)
		case toyEnd:
			return errors.New("the toy gateway ended the session")
		}
	}
}

func (s *toySession) Close(string) error {
	s.once.Do(func() {
		close(s.done)
		s.conn.Close()
	})
	s.wg.Wait()
	return nil
}

// toyGateway is the other end. It answers every echo request that comes out of
// the tunnel, whoever was meant.
type toyGateway struct {
	t  *testing.T
	pc net.PacketConn

	mu     sync.Mutex // guards what follows
	grant  toyGrant
	dead   bool // answers nothing
	lose   int  // so many packets out of the tunnel are lost
	client net.Addr
	joins  int
	heard  []string // what came out of the tunnel
}

const toyPort = 4433

var (
	toyOwn4    = netip.MustParseAddr("10.88.0.5")
	toyOwn6    = netip.MustParseAddr("fd88::5")
	toyPeer4   = netip.MustParseAddr("10.88.0.9")
	toyPeer6   = netip.MustParseAddr("fd88::9")
	toySelf4   = netip.MustParseAddr("10.88.0.1")
	toySelf6   = netip.MustParseAddr("fd88::1")
	toyRemote4 = netip.MustParseAddr("203.0.113.10") // netlab.ServerAddr4
	toyRemote6 = netip.MustParseAddr("2001:db8:3::10")
)

func defaultToyGrant() toyGrant {
	return toyGrant{MTU: 1400, Grant: tunnel.Grant{
		Network:   "default",
		Addresses: []netip.Addr{toyOwn4, toyOwn6},
		Routes:    []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		Gateway:   []netip.Addr{toySelf4, toySelf6},
		Peers:     []netip.Prefix{netip.MustParsePrefix("10.88.0.0/24"), netip.MustParsePrefix("fd88::/64")},
	}}
}

func newToyGateway(t *testing.T, ns *netlab.NS) *toyGateway {
	t.Helper()
	pc, err := ns.ListenPacket("udp", fmt.Sprintf(":%d", toyPort))
	if err != nil {
		t.Fatal(err)
	}
	g := &toyGateway{t: t, pc: pc, grant: defaultToyGrant()}
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.serve()
	}()
	t.Cleanup(func() {
		pc.Close()
		<-done
	})
	return g
}

func (g *toyGateway) serve() {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := g.pc.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || n == 0 {
			continue
		}
		g.mu.Lock()
		g.handle(buf[:n], from)
		g.mu.Unlock()
	}
}

func (g *toyGateway) handle(b []byte, from net.Addr) {
	if g.dead {
		return
	}
	switch b[0] {
	case toyJoin:
		g.joins++
		g.client = from
		welcome, err := json.Marshal(g.grant)
		if err != nil {
			g.t.Error(err)
			return
		}
		g.pc.WriteTo(append([]byte{toyWelcome}, welcome...), from)
	case toyPing:
		g.pc.WriteTo([]byte{toyPong}, from)
	case toyPacket:
		h, err := packet.Parse(b[1:])
		if g.lose > 0 {
			g.lose--
			return
		}
		if err != nil {
			g.t.Errorf("a packet that is none came out of the tunnel: %v", err)
			return
		}
		g.heard = append(g.heard, fmt.Sprintf("%d %v %d > %v %d", h.Proto, h.Src, h.SrcPort, h.Dst, h.DstPort))
		if reply := echoReply(b[1:], h); reply != nil {
			g.pc.WriteTo(append([]byte{toyPacket}, reply...), from)
		}
	}
}

// set changes the gateway.
func (g *toyGateway) set(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
}

// inject sends a packet to the client.
func (g *toyGateway) inject(kind byte, body []byte) {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, err := g.pc.WriteTo(append([]byte{kind}, body...), g.client); err != nil {
		g.t.Fatal(err)
	}
}

// take returns what came out of the tunnel since the last call.
func (g *toyGateway) take() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.heard
	g.heard = nil
	return h
}

// ipPacket puts a transport header and payload into an IP packet, without the
// transport's checksum.
func ipPacket(src, dst netip.Addr, proto byte, body []byte) []byte {
	if src.Is6() {
		b := make([]byte, 40, 40+len(body))
		b[0], b[6], b[7] = 6<<4, proto, 64
		binary.BigEndian.PutUint16(b[4:], uint16(len(body)))
		copy(b[8:], src.AsSlice())
		copy(b[24:], dst.AsSlice())
		return append(b, body...)
	}
	b := make([]byte, 20, 20+len(body))
	b[0], b[8], b[9] = 4<<4|5, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(body)))
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16))
	return append(b, body...)
}

// tcpSYN returns the packet that opens a TCP connection.
func tcpSYN(src, dst netip.Addr, srcPort, dstPort uint16) []byte {
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, srcPort)
	binary.BigEndian.PutUint16(tcp[2:], dstPort)
	binary.BigEndian.PutUint32(tcp[4:], 1)
	tcp[12], tcp[13] = 5<<4, 2 // SYN
	binary.BigEndian.PutUint16(tcp[14:], 65535)
	return withChecksum(ipPacket(src, dst, packet.TCP, tcp))
}

func withChecksum(b []byte) []byte {
	h, err := packet.Parse(b)
	if err != nil {
		panic(err)
	}
	p := packet.Packet{Data: b}
	p.SetPartial(h)
	p.CompleteChecksum(h)
	return b
}

// echoReply answers an echo request; nil for all else.
func echoReply(b []byte, h packet.Header) []byte {
	m, err := icmp.ParseMessage(int(h.Proto), b[h.IPLen:])
	if err != nil {
		return nil
	}
	var pseudo []byte
	switch m.Type {
	case ipv4.ICMPTypeEcho:
		m.Type = ipv4.ICMPTypeEchoReply
	case ipv6.ICMPTypeEchoRequest:
		m.Type = ipv6.ICMPTypeEchoReply
		pseudo = icmp.IPv6PseudoHeader(h.Dst.AsSlice(), h.Src.AsSlice())
	default:
		return nil
	}
	body, err := m.Marshal(pseudo)
	if err != nil {
		return nil
	}
	return ipPacket(h.Dst, h.Src, h.Proto, body)
}
