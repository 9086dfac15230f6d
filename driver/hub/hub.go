// Package hub is the data path of one network on one host: the containers' TUN
// devices, the way between them, and the way to the gateway and back.
//
// Packets between containers go from device to device, super-packets whole: they
// are on one link. What leaves the host has the address of a block that stands
// for the container's, one to one, so that the rewrite needs no state; to peers
// that know the network's own subnets it may go as it is.
//
// It does not know Docker or sessions: who makes the devices attaches them here,
// and who keeps a session says where it is.
package hub

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
	"github.com/quicvpn/quicvpn/tunnel"
)

// ErrEvicted is what Lost is told of a port whose address a newer one has.
var ErrEvicted = errors.New("a newer container has its address")

// A Config says what network it is.
type Config struct {
	// Subnets are the network's own; none where the gateway assigns addresses.
	Subnets []netip.Prefix
	// Own are the network's own addresses, one of each IP version at most. They
	// answer pings, are the source of ICMP errors, and stand for the gateway's
	// resolver at port 53.
	Own []netip.Addr
	// Internal says that nothing leaves the host and nothing comes in.
	Internal bool
	// NoNames says that the network's own addresses do not stand for a resolver.
	NoNames bool
	// Drops counts what is not passed on. The devices count what they drop where
	// tun.Config says. Nil means a counter that nobody sees.
	Drops *packet.Drops
	// Lost hears, on a goroutine of its own, of a port that the hub has detached
	// by itself: its device failed, as it does when its namespace is gone, or it
	// is ErrEvicted. Nil means that nobody hears of it.
	Lost func(id string, err error)
	// Log is where attaching and losing ports is told. Nil means nowhere.
	Log *slog.Logger
}

// A Port is a container's place at the hub.
type Port struct {
	// ID names it, for Detach.
	ID string
	// Device is the hub's from Attach on, which reads all its queues and closes
	// it.
	Device *tun.Device
	// Addrs are the container's addresses.
	Addrs []Addr
	// Exit is the container's way out; nil means the hub's own.
	Exit *Exit
}

// An Addr is an address of a container.
type Addr struct {
	// Inside is the container's own.
	Inside netip.Addr
	// Outside stands for it beyond this host: the same as Inside where there is
	// no mapping, the zero Addr while there is none yet.
	Outside netip.Addr
}

// An Uplink is a way to the gateway.
type Uplink struct {
	// Send is a session's.
	Send func(queue int, pkts []packet.Packet, errs tunnel.Sink)
	// Peers are the prefixes of the gateway's network.
	Peers []netip.Prefix
	// Announced says that our subnets are among the peers' Peers: they see the
	// containers' own addresses and are to use them. What they send to one of the
	// block is answered from the container's own.
	Announced bool
	// Gateway are the gateway's own addresses.
	Gateway []netip.Addr
}

// An Exit is a way out of the network for some of its containers, or for all that
// have no other: an uplink, and the sink for what comes out of the tunnel.
type Exit struct {
	hub    *Hub
	errs   errorSink
	uplink *Uplink // guarded by hub.mu
	local  Local   // guarded by hub.mu
}

// A Local answers containers on this host, in the place of what is beyond it and of
// the network's own address.
type Local interface {
	// Ends reports whether a packet, with its header, is one for Input. It is asked
	// about what leaves, also while there is no uplink, and about what is for the
	// network's own address.
	Ends(p *packet.Packet, h packet.Header) bool
	// Input takes packets, with the containers' own addresses, and borrows them. It
	// must not block. Its answers go to Exit.Answer.
	Input(pkts []packet.Packet)
}

// A Hub is the data path of one network. Its methods are safe for concurrent
// use.
type Hub struct {
	// Exit is the way out of containers that have no other.
	*Exit

	cfg  Config
	own4 netip.Addr
	own6 netip.Addr

	// table is what packets see. It is replaced, never changed.
	table atomic.Pointer[table]

	mu     sync.Mutex // guards what follows, and who replaces table
	exits  []*Exit
	ports  map[string]*port
	closed bool
}

// New returns a hub without ports and without an uplink.
func New(cfg Config) *Hub {
	if cfg.Drops == nil {
		cfg.Drops = new(packet.Drops)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	h := &Hub{cfg: cfg, ports: make(map[string]*port)}
	h.Exit = h.NewExit()
	for _, ip := range cfg.Own {
		if ip.Is4() {
			h.own4 = ip
		} else {
			h.own6 = ip
		}
	}
	return h
}

// NewExit returns another way out, without an uplink.
func (h *Hub) NewExit() *Exit {
	e := &Exit{hub: h}
	e.errs.exit = e
	h.mu.Lock()
	defer h.mu.Unlock()
	h.exits = append(h.exits, e)
	h.rebuildLocked()
	return e
}

// Attach puts a container in its place and starts to read its device. An older
// port that has one of its addresses is evicted: where an engine was killed, the
// next container comes before the kernel tells of the end of the last one. On an
// error the device stays the caller's.
func (h *Hub) Attach(p Port) error {
	if err := h.check(p); err != nil {
		return fmt.Errorf("attach %s: %w", p.ID, err)
	}
	n := &port{hub: h, Port: p, queues: p.Device.Queues()}
	n.Addrs = slices.Clone(p.Addrs)
	if p.Exit == nil {
		n.Exit = h.Exit
	}
	old, err := h.replace(n)
	if err != nil {
		return fmt.Errorf("attach %s: %w", p.ID, err)
	}
	for _, o := range old {
		h.lose(o, fmt.Errorf("%w: %s", ErrEvicted, p.ID))
	}
	return nil
}

func (h *Hub) check(p Port) error {
	if p.Device == nil || len(p.Addrs) == 0 {
		return errors.New("a port needs a device and an address")
	}
	for _, a := range p.Addrs {
		switch {
		case !a.Inside.IsGlobalUnicast() || a.Inside.Is4In6():
			return fmt.Errorf("%v is no address for a container", a.Inside)
		case a.Inside == h.own4 || a.Inside == h.own6:
			return fmt.Errorf("%v is the network's own address", a.Inside)
		}
		if err := a.check(); err != nil {
			return err
		}
	}
	return nil
}

func (a Addr) check() error {
	if a.Outside.IsValid() && a.Outside.BitLen() != a.Inside.BitLen() {
		return fmt.Errorf("%v cannot stand for %v: it is of another IP version", a.Outside, a.Inside)
	}
	return nil
}

// replace puts a port in place and returns those that had one of its addresses.
func (h *Hub) replace(n *port) (old []*port, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed:
		return nil, net.ErrClosed
	case !slices.Contains(h.exits, n.Exit):
		return nil, errors.New("its exit is another hub's")
	case h.ports[n.ID] != nil:
		return nil, errors.New("it is attached already: detach it first")
	}
	for _, p := range h.ports {
		if !p.gone && slices.ContainsFunc(n.Addrs, func(a Addr) bool { return p.has(a.Inside, n.Exit) || p.has(a.Outside, n.Exit) }) {
			p.gone = true
			old = append(old, p)
		}
	}
	h.ports[n.ID] = n
	h.rebuildLocked()
	n.start()
	return old, nil
}

// Detach takes a container from its place and closes its device; its readers have
// ended when it returns. An unknown id is none.
func (h *Hub) Detach(id string) {
	h.mu.Lock()
	p := h.ports[id]
	if p != nil {
		p.gone = true
		h.rebuildLocked()
	}
	h.mu.Unlock()
	if p != nil {
		h.remove(p)
	}
}

// remove ends a port that is gone from the table.
func (h *Hub) remove(p *port) {
	if err := p.stop(); err != nil {
		h.cfg.Log.Warn("closing a container's device", "container", p.ID, "error", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ports[p.ID] == p {
		delete(h.ports, p.ID)
	}
}

// lose removes a port that nobody asked to detach, and tells of it.
func (h *Hub) lose(p *port, why error) {
	h.remove(p)
	h.cfg.Log.Info("container detached", "container", p.ID, "reason", why)
	if h.cfg.Lost != nil {
		go h.cfg.Lost(p.ID, why)
	}
}

// failed is called by a port's readers.
func (h *Hub) failed(p *port, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.gone {
		return
	}
	p.gone = true
	h.rebuildLocked()
	go h.lose(p, err)
}

// SetOutside says which addresses stand for a container's beyond this host: the
// block may come later than the container. Addresses that are not given keep what
// they have. An unknown id is none.
func (h *Hub) SetOutside(id string, addrs []Addr) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.ports[id]
	if p == nil || p.gone {
		return nil
	}
	next := slices.Clone(p.Addrs)
	for _, a := range addrs {
		i := slices.IndexFunc(next, func(have Addr) bool { return have.Inside == a.Inside })
		if i < 0 {
			return fmt.Errorf("map %v of %s: it has no such address", a.Inside, id)
		}
		if err := a.check(); err != nil {
			return fmt.Errorf("map %v of %s: %w", a.Inside, id, err)
		}
		for _, other := range h.ports {
			if other != p && !other.gone && other.has(a.Outside, p.Exit) {
				return fmt.Errorf("map %v of %s to %v: that is %s's", a.Inside, id, a.Outside, other.ID)
			}
		}
		next[i] = a
	}
	p.Addrs = next
	h.rebuildLocked()
	return nil
}

// SetUplink says where what leaves goes. Nil means nowhere: it is dropped and
// counted, whatever comes.
func (e *Exit) SetUplink(u *Uplink) {
	if u != nil {
		c := *u
		c.Peers, c.Gateway = slices.Clone(u.Peers), slices.Clone(u.Gateway)
		u = &c
	}
	e.hub.mu.Lock()
	defer e.hub.mu.Unlock()
	e.uplink = u
	e.hub.rebuildLocked()
}

// SetLocal says who answers containers on this host. Nil means nobody.
func (e *Exit) SetLocal(l Local) {
	e.hub.mu.Lock()
	defer e.hub.mu.Unlock()
	e.local = l
	e.hub.rebuildLocked()
}

// Close detaches everything. It returns when all readers have ended.
func (h *Hub) Close() error {
	h.mu.Lock()
	h.closed = true
	var all []*port
	for _, p := range h.ports {
		p.gone = true
		all = append(all, p)
	}
	for _, e := range h.exits {
		e.uplink = nil
	}
	h.rebuildLocked()
	h.mu.Unlock()
	var errs []error
	for _, p := range all {
		errs = append(errs, p.stop())
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.ports)
	return errors.Join(errs...)
}

// A port is a container that is attached.
type port struct {
	hub *Hub
	Port
	queues  []*tun.Queue
	limit   packet.Limiter // of the ICMP errors that answer this container
	readers sync.WaitGroup

	gone bool // no longer in the table. hub.mu guards it, and Addrs.
}

// has reports whether an address is the container's, its own or one that stands for
// it beyond an exit.
func (p *port) has(ip netip.Addr, e *Exit) bool {
	return ip.IsValid() && slices.ContainsFunc(p.Addrs, func(a Addr) bool { return a.Inside == ip || a.Outside == ip && p.Exit == e })
}

// start starts the readers.
func (p *port) start() {
	for i := range p.queues {
		r := &reader{hub: p.hub, port: p, queue: i}
		p.readers.Go(r.run)
	}
}

// stop closes the device and waits for the readers.
func (p *port) stop() error {
	err := p.Device.Close()
	p.readers.Wait()
	return err
}

var _ tunnel.Sink = (*Exit)(nil)
