package gateway

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// A firewall is the gateway's nftables table. Its methods are called inside the
// gateway's network namespace.
//
// The table bounds what the router in userspace decides: were that wrong, still
// nothing would come from the TUN device to the gateway's own services, nothing
// under a source outside the pools would leave, and nobody would open a
// connection to a client from outside.
type firewall struct {
	table        string
	iface        string       // the TUN device
	pool4, pool6 netip.Prefix // pool6 is zero without IPv6
	rules        int          // that were installed

	// limit and blockLimit are true of an address, and of a block, that has more
	// connections out than it may; nil where the kernel cannot count them.
	limit, blockLimit expr.Any
	// blocks are the clients' blocks, of both pools.
	blocks map[netip.Prefix]struct{}
}

// maxConns is how many connections out an address may have, and maxBlockConns a
// whole block. All clients share the 64,512 ports that the gateway's address has
// for each destination: one that opens connections without end would take them
// all.
const (
	maxConns      = 4096
	maxBlockConns = 4 * maxConns
)

// forced says where packets are forwarded only because the gateway turned it on:
// there nothing is forwarded but what comes from or goes to the TUN device.
type forced struct {
	v4, v6 []string // interfaces that a packet comes in by
	all6   bool     // all interfaces, IPv6
}

func newFirewall(iface string, pool4, pool6 netip.Prefix) *firewall {
	return &firewall{table: "quicvpn-gw-" + iface, iface: iface, pool4: pool4, pool6: pool6,
		limit:      &expr.Connlimit{Count: maxConns, Flags: expr.NFT_CONNLIMIT_F_INV},
		blockLimit: &expr.Connlimit{Count: maxBlockConns, Flags: expr.NFT_CONNLIMIT_F_INV},
		blocks:     make(map[netip.Prefix]struct{})}
}

// install puts the table in place, atomically instead of one that is there.
// Translations of connections that exist are the kernel's connection tracker's
// and live on.
func (f *firewall) install(open forced) error {
	c, err := nftables.New()
	if err != nil {
		return explainNft(err)
	}
	// Added first, so that there is one to delete.
	c.DelTable(c.AddTable(tableRef(f.table)))
	t := c.AddTable(tableRef(f.table))
	if f.limit != nil {
		for _, pool := range each(f, func(pool netip.Prefix) netip.Prefix { return pool }) {
			blocks := f.blocksOf(pool)
			err := errors.Join(c.AddSet(connsSet(t, pool), nil), c.AddSet(blockConnsSet(t, pool), nil), c.AddSet(blocksSet(t, pool), blocks))
			if err != nil {
				return err
			}
		}
	}
	n := 0
	chain := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, prio *nftables.ChainPriority, rules ...[]expr.Any) {
		ch := c.AddChain(&nftables.Chain{Table: t, Name: name, Type: kind, Hooknum: hook, Priority: prio})
		for _, r := range rules {
			c.AddRule(&nftables.Rule{Table: t, Chain: ch, Exprs: r})
		}
		n += len(rules)
	}
	chain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter,
		rule(in(f.iface), drop()))
	// The kernel's own errors about a client's packet; nothing else of this host
	// has business with clients.
	chain("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, nftables.ChainPriorityFilter,
		rule(out(f.iface), icmpType(unix.IPPROTO_ICMP, 3), accept()),   // unreachable, fragmentation needed
		rule(out(f.iface), icmpType(unix.IPPROTO_ICMP, 11), accept()),  // time exceeded
		rule(out(f.iface), icmpType(unix.IPPROTO_ICMP, 12), accept()),  // parameter problem
		rule(out(f.iface), icmpType(unix.IPPROTO_ICMPV6, 1), accept()), // unreachable
		rule(out(f.iface), icmpType(unix.IPPROTO_ICMPV6, 2), accept()), // packet too big
		rule(out(f.iface), icmpType(unix.IPPROTO_ICMPV6, 3), accept()), // time exceeded
		rule(out(f.iface), icmpType(unix.IPPROTO_ICMPV6, 4), accept()), // parameter problem
		rule(out(f.iface), drop()))
	chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter,
		f.forward(open)...)
	chain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource,
		each(f, func(pool netip.Prefix) []expr.Any {
			return rule(notOut(f.iface), source(pool), []expr.Any{&expr.Masq{}})
		})...)
	if err := c.Flush(); err != nil {
		return explainNft(err)
	}
	f.rules = n
	return nil
}

func (f *firewall) forward(open forced) [][]expr.Any {
	rules := [][]expr.Any{
		// From client to client is the router's.
		rule(in(f.iface), out(f.iface), drop()),
		rule(out(f.iface), connState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
		rule(out(f.iface), drop()),
		// The connection tracker does not translate what it calls invalid: it
		// would leave with a source from the pool.
		rule(in(f.iface), connState(expr.CtStateBitINVALID), drop()),
	}
	if f.limit != nil {
		rules = append(rules, each(f, func(pool netip.Prefix) []expr.Any {
			return rule(in(f.iface), source(pool), firstOfConn(), countConn(pool, f.limit), counter(), drop())
		})...)
		rules = append(rules, each(f, func(pool netip.Prefix) []expr.Any {
			return rule(in(f.iface), source(pool), firstOfConn(), countBlockConn(pool, f.blockLimit), counter(), drop())
		})...)
	}
	rules = append(rules, each(f, func(pool netip.Prefix) []expr.Any {
		return rule(in(f.iface), source(pool), accept())
	})...)
	rules = append(rules, rule(in(f.iface), drop()))
	for _, name := range open.v4 {
		rules = append(rules, rule(ipVersion(unix.NFPROTO_IPV4), in(name), drop()))
	}
	if open.all6 {
		return append(rules, rule(ipVersion(unix.NFPROTO_IPV6), drop()))
	}
	for _, name := range open.v6 {
		rules = append(rules, rule(ipVersion(unix.NFPROTO_IPV6), in(name), drop()))
	}
	return rules
}

// each returns what every pool has.
func each[T any](f *firewall, of func(pool netip.Prefix) T) (all []T) {
	for _, pool := range []netip.Prefix{f.pool4, f.pool6} {
		if pool.IsValid() {
			all = append(all, of(pool))
		}
	}
	return all
}

// removeTable takes a gateway's table away; that there is none is fine.
func removeTable(name string) error {
	c, err := nftables.New()
	if err != nil {
		return explainNft(err)
	}
	c.DelTable(c.AddTable(tableRef(name)))
	if err := c.Flush(); err != nil {
		return explainNft(err)
	}
	return nil
}

// intact reports whether the table is as it was installed. Other programs that
// load rules are apt to flush everything first.
func (f *firewall) intact() (bool, error) {
	c, err := nftables.New()
	if err != nil {
		return false, explainNft(err)
	}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, explainNft(err)
	}
	n := 0
	for _, ch := range chains {
		if ch.Table.Name != f.table {
			continue
		}
		rules, err := c.GetRules(ch.Table, ch)
		if err != nil {
			return false, explainNft(err)
		}
		n += len(rules)
	}
	return n == f.rules, nil
}

func tableRef(name string) *nftables.Table {
	return &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
}

// explainNft says what to do about an error from nftables.
func explainNft(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: the gateway needs the capability NET_ADMIN: start it as root, or its container with --cap-add NET_ADMIN", err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EAFNOSUPPORT),
		errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: the kernel lacks nftables with NAT for IPv4 and IPv6 together: "+
			"use Linux 5.2 or newer with nf_tables, nft_ct, nft_nat and nft_masq, and run `modprobe -a nf_tables nft_ct nft_masq` where they are modules", err)
	}
	return err
}
