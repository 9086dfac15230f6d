package gateway

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A session is what the router needs of a tunnel.Session.
type session interface {
	Send(queue int, pkts []packet.Packet, errs tunnel.Sink)
	SetPeers(peers []netip.Prefix) error
	Close(reason string) error
}

// An exit is a queue of the TUN device. Any number may write to it at once; it
// counts what it drops.
type exit interface {
	Write(pkts []packet.Packet) error
}

// A routerConfig says what a router connects.
type routerConfig struct {
	pool4, pool6 netip.Prefix
	exits        []exit
	// exit6 says that IPv6 leaves, too.
	exit6 bool
	// isHost says whether an address is one of the gateway's host, now.
	isHost func(netip.Addr) bool
	// admitted says whether a client may still be here.
	admitted func(Client) bool
	// names takes the packets to name servers that a client may not reach, and
	// reports whether a packet was one. Nil takes none.
	names func(from *port, queue int, pkt *packet.Packet, h packet.Header) bool
	drops *packet.Drops
}

// A router passes packets between the sessions of clients, and between them and
// the TUN device.
type router struct {
	cfg      routerConfig
	own4     netip.Addr // the gateway's own in the pools
	own6     netip.Addr
	numbers  numbers
	toKernel kernelSink

	// shards find the port of an address without a lock. Each map is replaced,
	// never changed.
	shards [shardCount]atomic.Pointer[map[netip.Addr]*port]

	// blocks find the port of a block, by its run of numbers.
	blocks []atomic.Pointer[port]

	// mu guards what follows, and who replaces shards and the tables of
	// networks.
	mu       sync.Mutex
	ports    map[tunnel.Fingerprint]*port
	networks map[string]*network
}

// shardCount bounds what a join copies: a shard holds one in so many addresses.
const shardCount = 256

// A port is a session's place at the router, and the sink of what its client
// sends.
type port struct {
	router  *router
	client  Client
	session session
	policy  *policy
	network *network
	names   tunnel.Names // which queries for names are answered here
	// announced are the prefixes of the client's claims.
	announced []netip.Prefix
	errors    errorSink
	limit     packet.Limiter // of the ICMP errors that answer this client
	// gone is set before another may have the addresses.
	gone atomic.Bool
}

func newRouter(cfg routerConfig) *router {
	r := &router{cfg: cfg, own4: firstHost(cfg.pool4), own6: firstHost(cfg.pool6),
		numbers: newNumbers(cfg.pool4, cfg.pool6),
		ports:   make(map[tunnel.Fingerprint]*port), networks: make(map[string]*network)}
	r.blocks = make([]atomic.Pointer[port], r.numbers.runs())
	r.toKernel.router = r
	for i := range r.shards {
		r.shards[i].Store(&map[netip.Addr]*port{})
	}
	return r
}

// shard returns the shard of an address. Addresses are handed out in a row, so
// that the last byte spreads them evenly.
func (r *router) shard(ip netip.Addr) *atomic.Pointer[map[netip.Addr]*port] {
	if ip.Is4() {
		return &r.shards[ip.As4()[3]]
	}
	return &r.shards[ip.As16()[15]]
}

// lookup returns the port of an address, or of the block around it, or nil.
func (r *router) lookup(ip netip.Addr) *port {
	if p := (*r.shard(ip).Load())[ip]; p != nil {
		return p
	}
	if host, ok := r.numbers.of(ip); ok && host < r.numbers.end {
		return r.blocks[host/blockSize].Load()
	}
	return nil
}

// setLocked replaces the shard of an address; p nil removes the address.
func (r *router) setLocked(ip netip.Addr, p *port) {
	s := r.shard(ip)
	next := maps.Clone(*s.Load())
	if p == nil {
		delete(next, ip)
	} else {
		next[ip] = p
	}
	s.Store(&next)
}

// attach gives a client's addresses, and the prefixes that it may announce, to a
// session. An older session of the client loses them in the same moment and is
// closed. It returns nil for a client that was revoked meanwhile.
func (r *router) attach(c Client, s session, pol *policy, granted tunnel.Grant) *port {
	p := &port{router: r, client: c, session: s, policy: pol, names: granted.Names}
	p.errors.port = p
	old, ok := r.replace(p, granted)
	if !ok {
		return nil
	}
	for _, o := range old {
		o.session.Close("replaced by a newer session of the same client")
	}
	return p
}

// replace puts a port in place and returns those that had its client or one of
// its addresses.
func (r *router) replace(p *port, granted tunnel.Grant) (old []*port, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Asked under the lock that detachRevoked takes after the revocation.
	if !r.cfg.admitted(p.client) {
		return nil, false
	}
	p.network = r.networkLocked(p.client.Network)
	if o := r.ports[p.client.ID]; o != nil {
		old = append(old, o)
	}
	for _, ip := range p.addrs() {
		if o := r.lookup(ip); o != nil && !slices.Contains(old, o) {
			old = append(old, o)
		}
	}
	block := p.block()
	if block != nil {
		if o := block.Load(); o != nil && !slices.Contains(old, o) {
			old = append(old, o)
		}
	}
	for _, o := range old {
		o.gone.Store(true)
	}
	r.ports[p.client.ID] = p
	for _, ip := range p.addrs() {
		r.setLocked(ip, p)
	}
	if block != nil {
		block.Store(p)
	}
	for _, o := range old {
		r.removeLocked(o)
	}
	r.holdLocked(p, granted)
	return old, true
}

// detach takes a port's addresses away, unless they are another's by now.
func (r *router) detach(p *port) {
	p.gone.Store(true)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.removeLocked(p)
}

func (r *router) removeLocked(p *port) {
	if r.ports[p.client.ID] == p {
		delete(r.ports, p.client.ID)
	}
	for _, ip := range p.addrs() {
		if r.lookup(ip) == p {
			r.setLocked(ip, nil)
		}
	}
	if block := p.block(); block != nil {
		block.CompareAndSwap(p, nil)
	}
	r.releaseLocked(p)
}

// detachRevoked takes the addresses of clients away that were revoked or removed,
// closes their sessions, and returns when that is done.
func (r *router) detachRevoked(ids []tunnel.Fingerprint) {
	var wg sync.WaitGroup
	for _, p := range r.forget(ids) {
		wg.Go(func() { p.session.Close("revoked or removed") })
	}
	wg.Wait()
}

// forget takes the addresses and the claims of clients away, and returns the
// ports that had them.
func (r *router) forget(ids []tunnel.Fingerprint) (gone []*port) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range ids {
		if p := r.ports[id]; p != nil {
			p.gone.Store(true)
			r.removeLocked(p)
			gone = append(gone, p)
		}
		r.dropLocked(id, nil)
	}
	return gone
}

// sessions returns how many clients are here.
func (r *router) sessions() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.ports)
}

// addrs returns the client's addresses.
func (p *port) addrs() []netip.Addr {
	var ips []netip.Addr
	for _, ip := range [...]netip.Addr{p.client.Addr4, p.client.Addr6} {
		if ip.IsValid() {
			ips = append(ips, ip)
		}
	}
	return ips
}

// block returns where the port of the client's block stands, or nil if it has
// none.
func (p *port) block() *atomic.Pointer[port] {
	run, ok := p.router.numbers.run(p.client.Block4, p.client.Block6)
	if !ok {
		return nil
	}
	return &p.router.blocks[run]
}
