package sidecar

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// A chain is a base chain of the kill switch's table.
type chain struct {
	name     string
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	policy   nftables.ChainPolicy
	rules    []rule
}

// A rule's comment is what `nft list table` shows.
type rule struct {
	comment string
	exprs   []expr.Any
}

func (c chain) in(t *nftables.Table) *nftables.Chain {
	return &nftables.Chain{
		Table: t, Name: c.name, Type: nftables.ChainTypeFilter,
		Hooknum: c.hook, Priority: c.priority, Policy: &c.policy,
	}
}

// add appends a rule of several parts.
func (c *chain) add(comment string, parts ...[]expr.Any) {
	r := rule{comment: comment}
	for _, p := range parts {
		r.exprs = append(r.exprs, p...)
	}
	c.rules = append(c.rules, r)
}

// chains compiles the policy. In every chain the order matters, and what sees
// most packets stands first.
func (p policy) chains() []chain {
	return []chain{p.arrival(), p.input(), p.forward(), p.output()}
}

// arrival marks the connections that came in beside the tunnel, so that their
// replies may go back there.
func (p policy) arrival() chain {
	c := chain{name: "arrival", hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityMangle, policy: nftables.ChainPolicyAccept}
	c.add("a connection that came in beside the tunnel",
		iifNot(p.tun), iifNot("lo"), ctDirection(directionOriginal), setCtMark(Mark))
	return c
}

// input lets the network's other clients reach what listens here. What comes in
// by other interfaces is not the kill switch's business, except packets to the
// tunnel's addresses: answers to them would tell who is on the same link what
// goes on inside the tunnel.
func (p policy) input() chain {
	c := chain{name: "input", hook: nftables.ChainHookInput, priority: nftables.ChainPriorityFilter, policy: nftables.ChainPolicyDrop}
	c.add("loopback", iif("lo"), accept())
	for _, a := range p.own {
		c.add("the tunnel's address from elsewhere", iifNot(p.tun), dst(a, a), drop())
	}
	c.add("other interfaces", iifNot(p.tun), accept())
	c.add("answers and what belongs to them", ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept())
	c.add("echo request", proto4(unix.IPPROTO_ICMP), transport(0, 1, []byte{8}), accept())
	c.add("echo request", proto6(unix.IPPROTO_ICMPV6), transport(0, 1, []byte{128}), accept())
	for _, a := range p.gatewaySelf {
		c.add("the gateway itself", src(a, a), drop())
	}
	for _, r := range ranges(p.peers) {
		c.add("clients of the network", src(r.From(), r.To()), accept())
	}
	return c
}

// forward lets nothing pass between other interfaces.
func (p policy) forward() chain {
	c := chain{name: "forward", hook: nftables.ChainHookForward, priority: nftables.ChainPriorityFilter, policy: nftables.ChainPolicyDrop}
	c.add("into the tunnel", oif(p.tun), accept())
	c.add("answers out of the tunnel", iif(p.tun), ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept())
	return c
}

// output is the kill switch proper. What it refuses is answered by an ICMP error
// to the sender, which stays inside, so that programs fail at once.
func (p policy) output() chain {
	c := chain{name: "output", hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityFilter, policy: nftables.ChainPolicyDrop}
	c.add("the tunnel", oif(p.tun), accept())
	c.add("loopback", oif("lo"), accept())
	for _, a := range p.own {
		// Whoever sends something in by the tunnel must not choose who gets the
		// answer: the route to it may lead to a neighbour.
		c.add("the tunnel's address beside the tunnel", src(a, a), drop())
	}
	for _, g := range p.gateways {
		c.add("the gateway", metaMark(Mark), dst(g.Addr(), g.Addr()), protoPort(unix.IPPROTO_UDP, g.Port()), accept())
	}
	for _, r := range p.resolvers {
		for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			c.add("the gateway's name", metaMark(Mark), dst(r.Addr(), r.Addr()), protoPort(proto, r.Port()), accept())
		}
	}
	for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		c.add("no DNS beside the tunnel, on-link neither", protoPort(proto, 53), reject())
	}
	for _, u := range p.uplinks {
		c.add("answers to connections that came in here", oif(u.name), ctMark(Mark), ctDirection(directionReply), accept())
	}
	for _, r := range ranges(p.peers) {
		// A link that came later may overlap with the network.
		c.add("clients of the network beside the tunnel", dst(r.From(), r.To()), reject())
	}
	for _, u := range p.uplinks {
		for _, r := range u.onLink {
			c.add("on-link", oif(u.name), dst(r.From(), r.To()), accept())
		}
		for _, s := range u.subnets {
			// The gateway, or the router to it, may be a neighbour there.
			if r := netipx.RangeOfPrefix(s); s.Addr().Is6() && !local(s) {
				c.add("neighbour discovery", oif(u.name), proto6(unix.IPPROTO_ICMPV6), transportRange(0, 135, 136), dst(r.From(), r.To()), accept())
			}
		}
	}
	c.add("DHCP", proto4(unix.IPPROTO_UDP), transport(0, 4, []byte{0, 68, 0, 67}), dst(broadcast, broadcast), accept())
	c.add("DHCPv6", proto6(unix.IPPROTO_UDP), transport(0, 4, []byte{546 >> 8, 546 & 0xff, 547 >> 8, 547 & 0xff}), dst(dhcpServers, dhcpServers), accept())
	for _, t := range [][2]byte{
		{131, 132}, // multicast listener report and done: where switches snoop, solicitations come only to those who reported
		{133, 133}, // router solicitation
		{135, 136}, // neighbour solicitation and advertisement
		{143, 143}, // version 2 multicast listener report
	} {
		c.add("neighbour discovery", proto6(unix.IPPROTO_ICMPV6), transportRange(0, t[0], t[1]), dst(linkMulticast.From(), linkMulticast.To()), accept())
	}
	c.add("nothing else", reject())
	return c
}

var (
	broadcast     = netip.AddrFrom4([4]byte{255, 255, 255, 255})
	dhcpServers   = netip.MustParseAddr("ff02::1:2")
	linkMulticast = netipx.RangeOfPrefix(netip.MustParsePrefix("ff02::/16"))
)

// ranges merges prefixes; they may overlap.
func ranges(prefixes []netip.Prefix) []netipx.IPRange {
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(p)
	}
	set, err := b.IPSet()
	if err != nil {
		return nil // the builder refuses invalid prefixes only: nobody may
	}
	return set.Ranges()
}

// The parts of rules. Registers are used within a part alone.

const (
	directionOriginal = 0
	directionReply    = 1
)

func iif(name string) []expr.Any    { return deviceIs(expr.MetaKeyIIFNAME, expr.CmpOpEq, name) }
func iifNot(name string) []expr.Any { return deviceIs(expr.MetaKeyIIFNAME, expr.CmpOpNeq, name) }
func oif(name string) []expr.Any    { return deviceIs(expr.MetaKeyOIFNAME, expr.CmpOpEq, name) }

func deviceIs(key expr.MetaKey, op expr.CmpOp, name string) []expr.Any {
	padded := make([]byte, unix.IFNAMSIZ)
	copy(padded, name)
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: op, Register: 1, Data: padded},
	}
}

func metaMark(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
	}
}

func ctMark(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
	}
}

func setCtMark(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1, SourceRegister: true},
	}
}

func ctDirection(direction byte) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{direction}},
	}
}

func ctState(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

func proto4(proto byte) []expr.Any { return append(family(unix.NFPROTO_IPV4), l4proto(proto)...) }
func proto6(proto byte) []expr.Any { return append(family(unix.NFPROTO_IPV6), l4proto(proto)...) }

func family(f byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f}},
	}
}

func l4proto(proto byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
	}
}

// protoPort matches a destination port.
func protoPort(proto byte, port uint16) []expr.Any {
	return append(l4proto(proto), transport(2, 2, binaryutil.BigEndian.PutUint16(port))...)
}

// transport matches bytes of the transport header.
func transport(offset, length uint32, data []byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data},
	}
}

// transportRange matches one byte of the transport header.
func transportRange(offset uint32, from, to byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 1},
		&expr.Cmp{Op: expr.CmpOpGte, Register: 1, Data: []byte{from}},
		&expr.Cmp{Op: expr.CmpOpLte, Register: 1, Data: []byte{to}},
	}
}

func src(from, to netip.Addr) []expr.Any { return address(12, 8, from, to) }
func dst(from, to netip.Addr) []expr.Any { return address(16, 24, from, to) }

// address matches the address that stands at an offset of the IPv4 or IPv6
// header.
func address(offset4, offset6 uint32, from, to netip.Addr) []expr.Any {
	from, to = from.WithZone(""), to.WithZone("")
	f, offset := byte(unix.NFPROTO_IPV4), offset4
	if from.Is6() {
		f, offset = unix.NFPROTO_IPV6, offset6
	}
	e := append(family(f), &expr.Payload{
		DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(from.BitLen() / 8),
	})
	if from == to {
		return append(e, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: from.AsSlice()})
	}
	return append(e,
		&expr.Cmp{Op: expr.CmpOpGte, Register: 1, Data: from.AsSlice()},
		&expr.Cmp{Op: expr.CmpOpLte, Register: 1, Data: to.AsSlice()})
}

func accept() []expr.Any { return verdict(expr.VerdictAccept) }
func drop() []expr.Any   { return verdict(expr.VerdictDrop) }

func verdict(v expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: v}} }

func reject() []expr.Any {
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}}
}
