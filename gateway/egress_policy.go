package gateway

import (
	"fmt"

	"github.com/google/nftables"
)

// A blocker is a forward chain of somebody else's that drops what it does not
// know. The gateway cannot overrule it: of all chains at a hook each has to let a
// packet through.
type blocker struct {
	family nftables.TableFamily
	table  string
	chain  string
	// docker says that the chain leaves users' rules to DOCKER-USER.
	docker bool
}

// findBlockers returns the chains that stand in the gateway's way. One with a
// rule that accepts the TUN device does not.
func findBlockers(iface string, ipv6 bool) ([]blocker, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, explainNft(err)
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, explainNft(err)
	}
	var found []blocker
	for _, ch := range chains {
		if !dropsForwarded(ch, ipv6) {
			continue
		}
		b := blocker{family: ch.Table.Family, table: ch.Table.Name, chain: ch.Name}
		look := []*nftables.Chain{ch}
		for _, other := range chains {
			if other.Table.Name == ch.Table.Name && other.Table.Family == ch.Table.Family && other.Name == "DOCKER-USER" {
				b.docker = true
				look = append(look, other)
			}
		}
		accepted, err := anyAccepts(c, look, iface)
		if err != nil {
			return nil, err
		}
		if !accepted {
			found = append(found, b)
		}
	}
	return found, nil
}

func dropsForwarded(ch *nftables.Chain, ipv6 bool) bool {
	if ch.Hooknum == nil || *ch.Hooknum != *nftables.ChainHookForward || ch.Type != nftables.ChainTypeFilter ||
		ch.Policy == nil || *ch.Policy != nftables.ChainPolicyDrop {
		return false
	}
	switch ch.Table.Family {
	case nftables.TableFamilyIPv4, nftables.TableFamilyINet:
		return true
	case nftables.TableFamilyIPv6:
		return ipv6
	}
	return false
}

func anyAccepts(c *nftables.Conn, chains []*nftables.Chain, iface string) (bool, error) {
	for _, ch := range chains {
		rules, err := c.GetRules(ch.Table, ch)
		if err != nil {
			return false, explainNft(err)
		}
		for _, r := range rules {
			if acceptsInterface(r, iface) {
				return true, nil
			}
		}
	}
	return false, nil
}

// remedy is the command that lets the gateway's packets through.
func (b blocker) remedy(iface string) string {
	chain := b.chain
	if b.docker {
		chain = "DOCKER-USER"
	}
	const both = "%[1]s -I %[2]s -i %[3]s -j ACCEPT && %[1]s -I %[2]s -o %[3]s -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
	if b.table == "filter" && b.family != nftables.TableFamilyINet { // iptables-nft's
		command := "iptables"
		if b.family == nftables.TableFamilyIPv6 {
			command = "ip6tables"
		}
		return fmt.Sprintf(both, command, chain, iface)
	}
	return fmt.Sprintf(`nft 'insert rule %[1]s %[2]s %[3]s iifname "%[4]s" accept; `+
		`insert rule %[1]s %[2]s %[3]s oifname "%[4]s" ct state established,related accept'`,
		familyName(b.family), b.table, chain, iface)
}

func familyName(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	}
	return "inet"
}

// warnBlockers says in the log who stands in the way, and what to do.
func (e *egress) warnBlockers() error {
	found, err := findBlockers(e.cfg.iface, e.ipv6)
	if err != nil {
		return fmt.Errorf("look for firewalls that block forwarding: %w", err)
	}
	for _, b := range found {
		e.cfg.log.Warn("another firewall drops forwarded packets, and with them what clients send to the internet; let them through",
			"chain", fmt.Sprintf("%s %s %s", familyName(b.family), b.table, b.chain), "command", b.remedy(e.cfg.iface))
	}
	return nil
}
