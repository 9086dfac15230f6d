package gateway

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The parts that rules are made of. All compare in register 1.

func rule(parts ...[]expr.Any) []expr.Any {
	var r []expr.Any
	for _, p := range parts {
		r = append(r, p...)
	}
	return r
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() []expr.Any   { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

func counter() []expr.Any { return []expr.Any{&expr.Counter{}} }

func in(iface string) []expr.Any  { return meta(expr.MetaKeyIIFNAME, expr.CmpOpEq, ifname(iface)) }
func out(iface string) []expr.Any { return meta(expr.MetaKeyOIFNAME, expr.CmpOpEq, ifname(iface)) }
func notOut(iface string) []expr.Any {
	return meta(expr.MetaKeyOIFNAME, expr.CmpOpNeq, ifname(iface))
}

// ipVersion matches the IP version, NFPROTO_IPV4 or NFPROTO_IPV6.
func ipVersion(proto byte) []expr.Any {
	return meta(expr.MetaKeyNFPROTO, expr.CmpOpEq, []byte{proto})
}

func meta(key expr.MetaKey, op expr.CmpOp, data []byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: op, Register: 1, Data: data},
	}
}

// ifname pads an interface name to the kernel's field, so that the whole name is
// compared.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// icmpType matches a type of IPPROTO_ICMP or IPPROTO_ICMPV6.
func icmpType(proto, kind byte) []expr.Any {
	return rule(
		meta(expr.MetaKeyL4PROTO, expr.CmpOpEq, []byte{proto}),
		[]expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{kind}},
		})
}

// source matches a source address within a prefix.
func source(p netip.Prefix) []expr.Any {
	proto := byte(unix.NFPROTO_IPV4)
	if p.Addr().Is6() {
		proto = unix.NFPROTO_IPV6
	}
	size := uint32(p.Addr().BitLen() / 8)
	mask := make([]byte, size)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return rule(ipVersion(proto), []expr.Any{
		loadSource(p),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: size, Mask: mask, Xor: make([]byte, size)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	})
}

// loadSource loads the source address of a packet of a prefix's IP version.
func loadSource(p netip.Prefix) expr.Any {
	offset := uint32(12)
	if p.Addr().Is6() {
		offset = 8
	}
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(p.Addr().BitLen() / 8)}
}

// connState matches any of the connection tracker's states.
func connState(bits uint32) []expr.Any { return conn(expr.CtKeySTATE, bits, expr.CmpOpNeq) }

// firstOfConn matches the packet that opens a connection. All that come before
// the first answer count as new; only the first is not confirmed.
func firstOfConn() []expr.Any {
	const confirmed = 1 << 3 // IPS_CONFIRMED
	return rule(connState(expr.CtStateBitNEW), conn(expr.CtKeySTATUS, confirmed, expr.CmpOpEq))
}

// conn compares bits that the connection tracker has with zero.
func conn(key expr.CtKey, bits uint32, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Cmp{Op: op, Register: 1, Data: binaryutil.NativeEndian.PutUint32(0)},
	}
}

// connsSet is where the kernel counts the connections of each client of a pool.
// It forgets a client without any.
func connsSet(t *nftables.Table, pool netip.Prefix) *nftables.Set {
	s := &nftables.Set{Table: t, Name: "connections4", KeyType: nftables.TypeIPAddr, Dynamic: true, Size: 1 << 16}
	if pool.Addr().Is6() {
		s.Name, s.KeyType = "connections6", nftables.TypeIP6Addr
	}
	return s
}

// countConn counts a connection of the client, and matches if limit does.
func countConn(pool netip.Prefix, limit expr.Any) []expr.Any {
	return []expr.Any{
		loadSource(pool),
		&expr.Dynset{SrcRegKey: 1, SetName: connsSet(nil, pool).Name, Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{limit}},
	}
}

// blocksSet holds the first addresses of the blocks of a pool, and blockConnsSet
// is where the kernel counts the connections of each.
func blocksSet(t *nftables.Table, pool netip.Prefix) *nftables.Set {
	s := &nftables.Set{Table: t, Name: "blocks4", KeyType: nftables.TypeIPAddr}
	if pool.Addr().Is6() {
		s.Name, s.KeyType = "blocks6", nftables.TypeIP6Addr
	}
	return s
}

func blockConnsSet(t *nftables.Table, pool netip.Prefix) *nftables.Set {
	s := connsSet(t, pool)
	s.Name = "block-" + s.Name
	return s
}

// countBlockConn counts a connection of a block, and matches if limit does.
func countBlockConn(pool netip.Prefix, limit expr.Any) []expr.Any {
	mask := make([]byte, pool.Addr().BitLen()/8)
	for i := range len(mask) - 1 { // a block is what the last byte tells apart
		mask[i] = 0xff
	}
	return []expr.Any{
		loadSource(pool),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))},
		&expr.Lookup{SourceRegister: 1, SetName: blocksSet(nil, pool).Name},
		&expr.Dynset{SrcRegKey: 1, SetName: blockConnsSet(nil, pool).Name, Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{limit}},
	}
}

// acceptsInterface reports whether a rule that is somebody else's accepts what
// comes in or goes out by an interface.
func acceptsInterface(r *nftables.Rule, iface string) bool {
	named, accepts := false, false
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case *expr.Cmp:
			named = named || e.Op == expr.CmpOpEq && trimNUL(e.Data) == iface
		case *expr.Verdict:
			accepts = accepts || e.Kind == expr.VerdictAccept
		}
	}
	return named && accepts
}

func trimNUL(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
