package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/dnsforward"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/netstack"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A container asks the name server that its host asks, which is mostly in the
// host's own network: 192.168.1.1, 10.0.0.2, 169.254.169.253. Through the tunnel
// that means somebody else, or nobody, and the gateway refuses it. So the gateway
// answers in that name server's place, and from its address.
//
//  1. The router hands over what was refused and is for port 53 (take).
//  2. A datagram is a query. It is passed on, and its answer goes back as a
//     datagram that is made here.
//  3. A packet of TCP goes to a TCP of the gateway's own, which has every
//     address. What that sends goes to the session of its destination.
//
// None of this comes near the kernel's network, but for the queries to the name
// servers of the gateway's host: no rule has to let it in, and none can be
// missing that keeps it out.

// namePort is that of name servers.
const namePort = 53

const (
	// maxQueries and maxNameConns are how many queries and connections there may
	// be at a time.
	maxQueries   = 2048
	maxNameConns = 512
	// nameBuffer is what a connection keeps in each direction: answers that may be
	// 64 KiB long.
	nameBuffer = 128 << 10
	// querySockets is how many sockets of the host's a query has at most.
	querySockets = 3
)

// names answers clients in the place of name servers that they cannot reach.
type names struct {
	forwarder *dnsforward.Forwarder
	stack     *netstack.Stack
	router    *router
	queries   *shares
	conns     *shares

	ctx context.Context // ends with close
	end context.CancelFunc

	mu      sync.Mutex // guards closed, and additions to running
	closed  bool
	running sync.WaitGroup // queries by UDP
}

// A namesConfig says by whom names are resolved.
type namesConfig struct {
	servers []netip.AddrPort // none means those of /etc/resolv.conf
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	router  *router
	log     *slog.Logger
}

func openNames(cfg namesConfig) (*names, error) {
	n := &names{router: cfg.router, queries: newShares(queriesWithin(descriptors())), conns: newShares(maxNameConns)}
	n.ctx, n.end = context.WithCancel(context.Background())
	var err error
	n.forwarder, err = dnsforward.New(dnsforward.Config{
		Servers: cfg.servers, Dial: cfg.dial, Log: cfg.log,
		Loops: func(ip netip.Addr) bool {
			ip = ip.Unmap()
			return cfg.router.cfg.pool4.Contains(ip) || cfg.router.cfg.pool6.Contains(ip)
		},
	})
	if err != nil {
		return nil, err
	}
	n.stack, err = netstack.New(netstack.Config{
		MTU: minMTU, Buffer: nameBuffer, Admit: n.admit, Serve: n.serve, Output: n.output, Drops: cfg.router.cfg.drops,
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}

// descriptors returns how many files and sockets the process may have.
func descriptors() uint64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return limit.Cur
}

// queriesWithin returns how many queries there may be that leave half of the
// descriptors to everything else.
func queriesWithin(descriptors uint64) int {
	return int(min(maxQueries, max(descriptors/2/querySockets, 1)))
}

// close ends what is under way, and returns when it is over.
func (n *names) close() error {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.end()
	err := n.stack.Close()
	n.running.Wait()
	return err
}

// counters returns what became of queries.
func (n *names) counters() map[string]uint64 {
	if n == nil {
		return nil
	}
	return n.forwarder.Counters()
}

// take takes a packet that asks a name server which the client may not reach, and
// reports whether it is one.
//
// Only what comes from the client's own addresses is taken: the answer must find
// the way back.
func (n *names) take(p *port, queue int, pkt *packet.Packet, h packet.Header) bool {
	if h.DstPort != namePort || !h.Plain() || h.Fragment || p.names == tunnel.NamesOff || !n.standsFor(p, h.Dst) || !p.owns(h.Src) {
		return false
	}
	if h.Proto == packet.UDP && pkt.Segment != 0 {
		return false // nobody sends queries in a row
	}
	if !pkt.ChecksumHolds(h) {
		n.router.cfg.drops.Add(packet.DropMalformed, 1)
		return true
	}
	if h.Proto == packet.UDP {
		n.query(p, queue, pkt, h)
	} else {
		n.stack.Input([]packet.Packet{*pkt})
	}
	return true
}

// standsFor reports whether an address may be a name server's that the gateway
// stands for: those which the policy closes, the host's and the gateway's own. A
// public one that an allow list leaves out stays refused, unless the client wants to
// have all of them answered here.
func (n *names) standsFor(p *port, dst netip.Addr) bool {
	switch {
	case dst.IsMulticast() || dst == broadcast || dst.Is4In6():
		return false
	case p.names == tunnel.NamesAll:
		return true
	case dst == n.router.own4 || dst == n.router.own6 || closedPrivate.Contains(dst) || closedNever.Contains(dst):
		return true
	}
	return n.router.cfg.isHost(dst)
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// query answers a query by UDP. One too many is dropped: who asked comes again.
func (n *names) query(p *port, queue int, pkt *packet.Packet, h packet.Header) {
	// What is behind the datagram's own end is not the query's.
	end := h.IPLen + int(binary.BigEndian.Uint16(pkt.Data[h.IPLen+4:]))
	if end < h.HeaderLen || end > len(pkt.Data) {
		n.router.cfg.drops.Add(packet.DropMalformed, 1)
		return
	}
	query := bytes.Clone(pkt.Data[h.HeaderLen:end])
	release, ok := n.queries.take(p.client.ID, h.Src)
	if !ok {
		n.router.cfg.drops.Add(packet.DropQueueFull, 1)
		return
	}
	if !n.begin() {
		release()
		return
	}
	go func() {
		defer n.running.Done()
		defer release()
		answer := n.forwarder.Exchange(n.ctx, "udp", query)
		if answer == nil {
			n.router.cfg.drops.Add(packet.DropMalformed, 1)
			return
		}
		b := packet.AppendUDP(nil, netip.AddrPortFrom(h.Dst, h.DstPort), netip.AddrPortFrom(h.Src, h.SrcPort), answer)
		p.session.Send(queue, []packet.Packet{{Data: b}}, nil)
	}()
}

func (n *names) begin() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.running.Add(1)
	return true
}

// admit answers for the TCP whether a client may have one connection more.
func (n *names) admit(from netip.Addr) (release func(), ok bool) {
	p := n.router.lookup(from)
	if p == nil {
		return nil, false
	}
	return n.conns.take(p.client.ID, from)
}

func (n *names) serve(conn net.Conn) { n.forwarder.ServeStream(n.ctx, conn) }

// output takes what the TCP sends. All of it goes by one queue, so that it stays
// in order.
func (n *names) output(pkts []packet.Packet) {
	for i := range pkts {
		h, err := packet.Parse(pkts[i].Data)
		if err != nil {
			n.router.cfg.drops.Add(packet.DropMalformed, 1)
			continue
		}
		p := n.router.lookup(h.Dst)
		if p == nil {
			n.router.cfg.drops.Add(packet.DropNoSession, 1)
			continue
		}
		p.session.Send(0, pkts[i:i+1], nil)
	}
}
