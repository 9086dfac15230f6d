package hub

import (
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A table is what the data path knows of the network at one moment.
type table struct {
	inside map[netip.Addr]host // by containers' own addresses
	views  map[*Exit]*view
}

// A view is the network as one exit has it.
type view struct {
	*table
	exit    *Exit
	outside map[netip.Addr]host // by the addresses that stand for containers beyond this host
	uplink  *Uplink             // nil: there is none
	local   Local               // nil: nobody answers here
}

// A host is one address of a container.
type host struct {
	port *port
	Addr
}

func (h *Hub) rebuildLocked() {
	t := &table{inside: make(map[netip.Addr]host), views: make(map[*Exit]*view)}
	for _, e := range h.exits {
		t.views[e] = &view{table: t, exit: e, outside: make(map[netip.Addr]host), uplink: e.uplink, local: e.local}
	}
	for _, p := range h.ports {
		if p.gone {
			continue
		}
		for _, a := range p.Addrs {
			t.inside[a.Inside] = host{p, a}
			if a.Outside.IsValid() {
				t.views[p.Exit].outside[a.Outside] = host{p, a}
			}
		}
	}
	h.table.Store(t)
}

// A verdict says what becomes of the packets from one address to another.
type verdict struct {
	way way         // the zero one: they are dropped
	why packet.Drop // the reason for which
	// answer says that an ICMP error tells the sender of because.
	answer  bool
	because packet.Unreachable
	// src and dst replace the packet's addresses, where they are valid.
	src, dst netip.Addr
	// door is where ports or protocols make a difference.
	door door
	// leaves says that the packet leaves the network, or would if there were a way.
	leaves bool
}

// A way is where packets go.
type way struct {
	port  *port // to a container
	up    bool  // to the gateway
	local bool  // to who answers on this host
}

type door uint8

const (
	// ownDoor: to the network's own address. It answers pings, lets DNS through, has
	// a Local answer what it will, and refuses the rest.
	ownDoor door = 1 + iota
	// gatewayDoor: to or from the gateway's own address, while the network's own
	// stands for its resolver. Answers from there have the network's own as their
	// source, so that who asks the gateway itself would not know them: refused.
	gatewayDoor
)

// prohibited is the verdict on what the network does not allow.
var prohibited = verdict{why: packet.DropDestination, answer: true, because: packet.AdminProhibited}

// outbound judges packets that come from a port.
func (t *view) outbound(from *port, src, dst netip.Addr) verdict {
	if !unicast(dst) {
		return verdict{why: packet.DropDestination}
	}
	self := t.inside[src]
	if self.port != from {
		return verdict{why: packet.DropSource}
	}
	if dst == t.exit.hub.own4 || dst == t.exit.hub.own6 {
		return t.toOwn(self, dst)
	}
	if to, ok := t.inside[dst]; ok {
		return verdict{way: way{port: to.port}}
	}
	if to, ok := t.outside[dst]; ok {
		// As if it came back from the gateway, less the way there.
		if !self.Outside.IsValid() {
			return verdict{why: packet.DropUnmapped}
		}
		return verdict{way: way{port: to.port}, src: self.Outside, dst: to.Inside}
	}
	if subnet, ok := t.exit.hub.subnet(dst); ok {
		if dst.Is4() && subnet.Bits() < 31 && (dst == subnet.Masked().Addr() || dst == netipx.PrefixLastIP(subnet)) {
			return verdict{why: packet.DropDestination} // broadcast
		}
		return verdict{why: packet.DropDestination, answer: true, because: packet.HostUnreachable}
	}
	v := t.toGateway(self, dst)
	if t.isResolver(dst) {
		v.door = gatewayDoor
	}
	v.leaves = !t.exit.hub.cfg.Internal
	return v
}

// toOwn judges packets to the network's own address.
func (t *view) toOwn(self host, own netip.Addr) verdict {
	to := t.gateway(own)
	v := t.toGateway(self, to)
	if v.way.up {
		// The gateway answers members, not what is behind them.
		if v = byBlock(self); v.way.up {
			v.dst = to
		}
		if !to.IsValid() {
			v = prohibited
		}
	}
	v.door = ownDoor
	v.leaves = !t.exit.hub.cfg.Internal
	return v
}

// toGateway judges packets that leave the host.
func (t *view) toGateway(self host, dst netip.Addr) verdict {
	switch {
	case t.exit.hub.cfg.Internal:
		return prohibited
	case t.uplink == nil:
		return verdict{why: packet.DropNoSession}
	case t.uplink.Announced && t.uplink.isPeer(dst):
		return verdict{way: way{up: true}}
	}
	return byBlock(self)
}

// byBlock is the verdict on packets that leave by an address of the block.
func byBlock(self host) verdict {
	switch {
	case !self.Outside.IsValid():
		return verdict{why: packet.DropUnmapped}
	case self.Outside == self.Inside:
		return verdict{way: way{up: true}}
	}
	return verdict{way: way{up: true}, src: self.Outside}
}

// inbound judges packets that come out of the tunnel. What the uplink itself says
// about our own packets is trusted with what it says.
func (t *view) inbound(src, dst netip.Addr, trusted bool) verdict {
	switch {
	case trusted:
	case t.exit.hub.cfg.Internal:
		return verdict{why: packet.DropDestination}
	case !unicast(src) || t.isLocal(src):
		return verdict{why: packet.DropSource}
	}
	to, ok := t.outside[dst]
	if !ok {
		to, ok = t.inside[dst]
		ok = ok && to.port.Exit == t.exit && (trusted || t.uplink != nil && t.uplink.Announced &&
			(t.uplink.isPeer(src) || slices.Contains(t.uplink.Gateway, src)))
	}
	if !ok {
		return verdict{why: packet.DropDestination}
	}
	v := verdict{way: way{port: to.port}}
	if to.Inside != dst {
		v.dst = to.Inside
	}
	if t.isResolver(src) {
		v.door = gatewayDoor
		v.src = t.exit.hub.own(src)
	}
	return v
}

// isLocal reports whether an address is of this network on this host: nobody
// beyond it may have it as a source.
func (t *view) isLocal(ip netip.Addr) bool {
	if ip == t.exit.hub.own4 || ip == t.exit.hub.own6 {
		return true
	}
	if _, ok := t.inside[ip]; ok {
		return true
	}
	if _, ok := t.outside[ip]; ok {
		return true
	}
	_, ok := t.exit.hub.subnet(ip)
	return ok
}

// isResolver reports whether an address is the gateway's for which the network's
// own stands at port 53.
func (t *view) isResolver(ip netip.Addr) bool {
	return t.exit.hub.own(ip).IsValid() && ip == t.gateway(ip)
}

// gateway returns the gateway's first address of the IP version that like has, or
// the zero Addr.
func (t *view) gateway(like netip.Addr) netip.Addr {
	if t.uplink == nil {
		return netip.Addr{}
	}
	i := slices.IndexFunc(t.uplink.Gateway, func(ip netip.Addr) bool { return ip.BitLen() == like.BitLen() })
	if i < 0 {
		return netip.Addr{}
	}
	return t.uplink.Gateway[i]
}

func (u *Uplink) isPeer(ip netip.Addr) bool {
	return slices.ContainsFunc(u.Peers, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// own returns the network's own address of the IP version that like has.
func (h *Hub) own(like netip.Addr) netip.Addr {
	if like.Is4() {
		return h.own4
	}
	return h.own6
}

// subnet returns the network's subnet that an address is in.
func (h *Hub) subnet(ip netip.Addr) (netip.Prefix, bool) {
	i := slices.IndexFunc(h.cfg.Subnets, func(p netip.Prefix) bool { return p.Contains(ip) })
	if i < 0 {
		return netip.Prefix{}, false
	}
	return h.cfg.Subnets[i], true
}

// unicast says whether an address can be one end of a way through the hub: no
// multicast, broadcast or loopback address, and no IPv4 address written as an IPv6
// one. Of link-local ones only those of IPv4: some clouds give them to their name
// servers, in whose place the gateway answers; all else there it refuses.
func unicast(ip netip.Addr) bool {
	return ip.IsGlobalUnicast() && !ip.Is4In6() || ip.Is4() && ip.IsLinkLocalUnicast()
}
