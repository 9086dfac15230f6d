package gateway

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go4.org/netipx"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A network is what the clients of one network share: who reaches which private
// prefix for the others. Networks do not know of each other, so that any two may
// have the same prefixes.
type network struct {
	// claims are ordered by address and do not overlap. The router's mu guards
	// them.
	claims []*claim
	// table is what lookup reads: it is replaced, never changed.
	table atomic.Pointer[[]claimed]
}

// A claim is a prefix that a client announces. It stays for a while when the
// client's session has ended, so that a short outage does not hand the prefix to
// another.
type claim struct {
	prefix netip.Prefix
	client tunnel.Fingerprint
	port   *port     // nil while the client has no session
	until  time.Time // when it ends, while port is nil
}

type claimed struct {
	prefix netip.Prefix
	port   *port
}

const (
	claimTime = 5 * time.Minute
	// maxClaims bounds a network's claims, and with them what each session is
	// told.
	maxClaims = 256
)

// lookup returns the port of whoever has announced an address, nil if that
// client is away; ok is false if nobody has.
func (n *network) lookup(ip netip.Addr) (p *port, ok bool) {
	table := *n.table.Load()
	i, exact := slices.BinarySearchFunc(table, ip, func(c claimed, ip netip.Addr) int { return c.prefix.Addr().Compare(ip) })
	if !exact {
		i-- // the last that begins before the address
	}
	if i < 0 || !table[i].prefix.Contains(ip) {
		return nil, false
	}
	return table[i].port, true
}

// publish makes the claims what lookup reads.
func (n *network) publish() {
	table := make([]claimed, len(n.claims))
	for i, c := range n.claims {
		table[i] = claimed{c.prefix, c.port}
	}
	n.table.Store(&table)
}

func (r *router) networkLocked(name string) *network {
	n := r.networks[name]
	if n == nil {
		n = &network{}
		n.publish()
		r.networks[name] = n
	}
	return n
}

// claim keeps for a client what it may have of the prefixes that it announces.
// It returns them, why it may not have the others, and the prefixes of its peers.
func (r *router) claim(c Client, announce []netip.Prefix) (accepted []netip.Prefix, refused string, peers []netip.Prefix) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expireLocked()
	n := r.networkLocked(c.Network)
	var reasons []string
	changed := false
	for _, p := range announce {
		why := r.checkAnnounced(p)
		if why == "" {
			var fresh bool
			fresh, why = n.claim(p, c.ID)
			changed = changed || fresh
		}
		if why != "" {
			reasons = append(reasons, why)
			continue
		}
		accepted = append(accepted, p)
	}
	if changed {
		r.announceLocked(n)
	}
	return accepted, strings.Join(reasons, "; "), r.peersLocked(n, c.ID)
}

// claim adds a claim, or says why it cannot. One that overlaps others of its own
// client takes their place.
func (n *network) claim(p netip.Prefix, id tunnel.Fingerprint) (fresh bool, refused string) {
	for _, c := range n.claims {
		switch {
		case c.client == id && c.prefix == p:
			if c.port == nil {
				c.until = time.Now().Add(claimTime)
			}
			return false, ""
		case c.client != id && c.prefix.Overlaps(p):
			return false, fmt.Sprintf("%s overlaps %s of another host of the network: create the network with another --subnet there or here", p, c.prefix)
		}
	}
	n.claims = slices.DeleteFunc(n.claims, func(c *claim) bool { return c.client == id && c.prefix.Overlaps(p) })
	if len(n.claims) >= maxClaims {
		return true, fmt.Sprintf("%s is more than the %d prefixes that a network may announce: remove networks from other hosts", p, maxClaims)
	}
	n.claims = append(n.claims, &claim{prefix: p, client: id, until: time.Now().Add(claimTime)})
	slices.SortFunc(n.claims, func(a, b *claim) int { return a.prefix.Addr().Compare(b.prefix.Addr()) })
	return true, ""
}

// announceable is private space, without what is never reached.
var announceable = func() *netipx.IPSet {
	var b netipx.IPSetBuilder
	b.AddSet(closedPrivate)
	b.RemoveSet(closedNever)
	set, err := b.IPSet()
	if err != nil {
		panic(err) // two sets that are valid
	}
	return set
}()

// checkAnnounced says why nobody may announce a prefix; empty if somebody may.
func (r *router) checkAnnounced(p netip.Prefix) string {
	least, most := 8, 30
	if p.Addr().Is6() {
		least, most = 32, 126
	}
	switch {
	case p.Bits() < least || p.Bits() > most:
		return fmt.Sprintf("%s is not between a /%d and a /%d: create the network with another --subnet", p, least, most)
	case !announceable.ContainsPrefix(p):
		return fmt.Sprintf("%s is not private address space: create the network with another --subnet, such as 172.30.0.0/24 or fd30::/64", p)
	}
	for _, pool := range []netip.Prefix{r.cfg.pool4, r.cfg.pool6} {
		if p.Overlaps(pool) {
			return fmt.Sprintf("%s overlaps the gateway's pool %s: create the network with another --subnet", p, pool)
		}
	}
	return ""
}

// holdLocked gives a client's claims to its new port, and drops those that it
// does not announce any more.
func (r *router) holdLocked(p *port, granted tunnel.Grant) {
	for _, c := range p.network.claims {
		if c.client == p.client.ID && slices.Contains(granted.Announced, c.prefix) {
			c.port = p
			p.announced = append(p.announced, c.prefix)
		}
	}
	p.network.publish()
	r.dropLocked(p.client.ID, p)
	// Peers may have come or gone since the grant.
	if now := r.peersLocked(p.network, p.client.ID); !slices.Equal(now, granted.Peers) {
		r.tell(p, now)
	}
}

// releaseLocked keeps a port's claims for its client.
func (r *router) releaseLocked(p *port) {
	until := time.Now().Add(claimTime)
	for _, c := range p.network.claims {
		if c.port == p {
			c.port, c.until = nil, until
		}
	}
	p.network.publish()
}

// dropLocked ends a client's claims, but for those that a port has.
func (r *router) dropLocked(id tunnel.Fingerprint, but *port) {
	r.filterLocked(func(c *claim) bool { return c.client == id && (but == nil || c.port != but) })
}

func (r *router) expireLocked() {
	now := time.Now()
	r.filterLocked(func(c *claim) bool { return c.port == nil && !now.Before(c.until) })
}

// filterLocked ends claims, and tells of it.
func (r *router) filterLocked(ends func(*claim) bool) {
	for _, n := range r.networks {
		before := len(n.claims)
		if n.claims = slices.DeleteFunc(n.claims, ends); len(n.claims) != before {
			r.announceLocked(n)
		}
	}
}

// expire ends claims whose time is over, until ctx ends.
func (r *router) expire(ctx context.Context) error {
	tick := time.NewTicker(claimTime / 30)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r.mu.Lock()
		r.expireLocked()
		r.mu.Unlock()
	}
}

// announceLocked tells a network's clients that its claims have changed.
func (r *router) announceLocked(n *network) {
	n.publish()
	for id, p := range r.ports {
		if p.network == n {
			r.tell(p, r.peersLocked(n, id))
		}
	}
}

// tell does not wait for the client.
func (r *router) tell(p *port, peers []netip.Prefix) {
	// Prefixes that do not overlap, and so few, are never refused.
	_ = p.session.SetPeers(peers)
}

// peersLocked returns where a client finds its peers: in the pools, and in what
// others announce.
func (r *router) peersLocked(n *network, id tunnel.Fingerprint) []netip.Prefix {
	peers := []netip.Prefix{r.cfg.pool4, r.cfg.pool6}
	for _, c := range n.claims {
		if c.client != id {
			peers = append(peers, c.prefix)
		}
	}
	return peers
}
