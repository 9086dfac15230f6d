package sidecar

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// killSwitchTable is the name of the nftables table (family inet) that holds
// the rules. Nothing else is touched.
const killSwitchTable = "quicvpn-killswitch"

// A killSwitch keeps the rules in the kernel as they are wanted. It is not safe
// for concurrent use.
//
// Rules are replaced in one transaction that leaves the chains in place, so that
// there is neither a moment without rules nor one in which everything is
// dropped.
type killSwitch struct {
	log     *slog.Logger
	applied *policy
	kernel  string // what the kernel showed right after the last change
}

// want makes the kernel's rules those of p: where p has changed, or where the
// rules are no longer what was set.
func (k *killSwitch) want(p policy) error {
	if k.applied == nil || !k.applied.equal(p) {
		return k.apply(p)
	}
	now, err := snapshot()
	if err != nil {
		return fmt.Errorf("read the kill switch's rules: %w", err)
	}
	if now == k.kernel {
		return nil
	}
	k.log.Warn("something else changed the kill switch's rules; setting them again", "table", killSwitchTable)
	return k.apply(p)
}

func (k *killSwitch) apply(p policy) error {
	chains := p.chains()
	err := k.replace(chains, false)
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EINVAL) {
		// Chains of the same names but of another kind, from another version.
		err = k.replace(chains, true)
	}
	if err != nil {
		return explainNftables(err)
	}
	now, err := snapshot()
	if err != nil {
		return fmt.Errorf("read back the kill switch's rules: %w", err)
	}
	if stripHandles(now) != describe(chains) {
		// Chains or rules that are not ours, in our table.
		if err := k.replace(chains, true); err != nil {
			return explainNftables(err)
		}
		if now, err = snapshot(); err != nil {
			return fmt.Errorf("read back the kill switch's rules: %w", err)
		}
	}
	k.applied, k.kernel = &p, now
	return nil
}

// replace sets the chains in one transaction. With anew the table is made anew:
// while that is under way the new chains have no rules yet, and drop.
func (k *killSwitch) replace(chains []chain, anew bool) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	t := c.AddTable(table())
	if anew {
		c.DelTable(t)
		c.AddTable(t)
	}
	for _, ch := range chains {
		c.AddChain(ch.in(t))
	}
	c.FlushTable(t)
	for _, ch := range chains {
		for _, r := range ch.rules {
			c.AddRule(&nftables.Rule{
				Table: t, Chain: ch.in(t), Exprs: r.exprs,
				UserData: userdata.AppendString(nil, userdata.TypeComment, r.comment),
			})
		}
	}
	return c.Flush()
}

// removeKillSwitch removes the table. It is no error if there is none.
func removeKillSwitch() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.DelTable(table())
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove the kill switch (nftables table inet %s): %w", killSwitchTable, err)
	}
	return nil
}

// killSwitchStands reports that the table is there.
func killSwitchStands() (bool, error) {
	text, err := snapshot()
	return text != "", err
}

func table() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: killSwitchTable}
}

// snapshot writes down what the kernel has in the table: every chain with its
// hook and policy, every rule by handle and comment. Nothing can change a rule
// and keep its handle. It is empty where there is no table.
func snapshot() (string, error) {
	c, err := nftables.New()
	if err != nil {
		return "", err
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == killSwitchTable })
	if i < 0 {
		return "", nil
	}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "table flags %d\n", tables[i].Flags)
	for _, ch := range chains {
		if ch.Table.Name != killSwitchTable {
			continue
		}
		writeChain(&b, ch)
		rules, err := c.GetRules(tables[i], ch)
		if errors.Is(err, unix.ENOENT) {
			return "", nil // gone in between
		}
		if err != nil {
			return "", err
		}
		for _, r := range rules {
			comment, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			fmt.Fprintf(&b, "  %s%s%d\n", comment, handleMark, r.Handle)
		}
	}
	return b.String(), nil
}

const handleMark = " # handle "

// describe writes down chains as snapshot does, but for the handles.
func describe(chains []chain) string {
	var b strings.Builder
	fmt.Fprintf(&b, "table flags %d\n", 0)
	for _, ch := range chains {
		writeChain(&b, ch.in(table()))
		for _, r := range ch.rules {
			fmt.Fprintf(&b, "  %s\n", r.comment)
		}
	}
	return b.String()
}

func writeChain(b *strings.Builder, ch *nftables.Chain) {
	if ch.Hooknum == nil || ch.Priority == nil || ch.Policy == nil {
		fmt.Fprintf(b, " chain %s\n", ch.Name)
		return
	}
	fmt.Fprintf(b, " chain %s type %s hook %d priority %d policy %d\n", ch.Name, ch.Type, *ch.Hooknum, *ch.Priority, *ch.Policy)
}

func stripHandles(snapshot string) string {
	var b strings.Builder
	for line := range strings.Lines(snapshot) {
		line, _, _ = strings.Cut(strings.TrimSuffix(line, "\n"), handleMark)
		b.WriteString(line + "\n")
	}
	return b.String()
}

// explainNftables says what to do about the kernel's answer.
func explainNftables(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("set the kill switch's rules: %w: this needs the capability NET_ADMIN: start the container with --cap-add NET_ADMIN (Compose: cap_add: [NET_ADMIN]), or run as root", err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.ENOENT),
		errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("set the kill switch's rules: %w: this kernel lacks nftables, or a part of it: load the modules on the host (modprobe -a nf_tables nft_ct nft_reject_inet), or turn the kill switch off and accept that traffic may leave beside the tunnel", err)
	}
	return fmt.Errorf("set the kill switch's rules: %w", err)
}

// A policy is all that the kill switch's rules depend on.
type policy struct {
	tun string
	// own are the addresses of the TUN device; peers and gatewaySelf say who may
	// reach them: the network's clients, but not the gateway itself.
	own         []netip.Addr
	peers       []netip.Prefix
	gatewaySelf []netip.Addr
	// gateways and resolvers are what sockets with our mark may reach: the
	// gateway by UDP, name servers on port 53.
	gateways  []netip.AddrPort
	resolvers []netip.AddrPort
	uplinks   []uplink
}

func (p policy) equal(q policy) bool {
	return p.tun == q.tun && slices.Equal(p.own, q.own) && slices.Equal(p.peers, q.peers) &&
		slices.Equal(p.gatewaySelf, q.gatewaySelf) && slices.Equal(p.gateways, q.gateways) &&
		slices.Equal(p.resolvers, q.resolvers) &&
		slices.EqualFunc(p.uplinks, q.uplinks, func(a, b uplink) bool {
			return a.name == b.name && slices.Equal(a.subnets, b.subnets) && slices.Equal(a.onLink, b.onLink)
		})
}
