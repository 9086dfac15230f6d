package gateway

import (
	"errors"
	"fmt"
	"net/netip"

	"go4.org/netipx"
)

// A policy says which destinations a client may reach beyond the pools: the
// clients of its own network it always reaches, those of others never.
//
// Without an allow list that is the public internet. With one it is what the
// list holds, and nothing else. Two lists of special addresses bound both:
//
//   - closedNever is never reached, whatever the allow list says: addresses that
//     mean the gateway's own machine or link, metadata services of clouds, and
//     the forms of IPv6 that carry an IPv4 address and with it a way around the
//     rules for IPv4. All IPv6 outside 2000::/3 and fc00::/7 is among them. The
//     addresses of the gateway's host are too; they change, so that the router
//     looks them up on its own.
//   - closedPrivate is reached only by a prefix of the allow list that lies
//     itself wholly inside private space: 10.1.0.0/16 opens that, 0.0.0.0/0
//     opens no private address.
//
// Prefixes for documentation are ordinary addresses here.
//
// It is compiled once a session; a lookup is a binary search without allocation.
type policy struct {
	open *netipx.IPSet
	// private is what the allow list itself opens of private space.
	private *netipx.IPSet
}

// closedPrivate is the address space of private networks.
var closedPrivate = mustSet(
	"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", // RFC 1918
	"100.64.0.0/10", // carrier-grade NAT, RFC 6598
	"192.0.0.0/24",  // protocol assignments, RFC 6890
	"198.18.0.0/15", // benchmarks, RFC 2544
	"fc00::/7",      // unique local, RFC 4193
)

// closedNever is what no allow list opens.
var closedNever = mustSet(
	"0.0.0.0/8",          // this host, RFC 1122
	"127.0.0.0/8",        // loopback
	"169.254.0.0/16",     // link-local, and the metadata service of most clouds
	"192.88.99.0/24",     // relays of 6to4, RFC 7526
	"224.0.0.0/4",        // multicast
	"240.0.0.0/4",        // reserved, and the broadcast address
	"100.100.100.200/32", // metadata of Alibaba Cloud
	"168.63.129.16/32",   // the host's agent of Azure
	"192.0.0.192/32",     // metadata of Oracle Cloud

	// Unspecified, loopback, IPv4-compatible ::/96, IPv4-mapped
	// ::ffff:0:0/96, NAT64 64:ff9b::/96 and 64:ff9b:1::/48, discard 100::/64.
	"::/3",
	"4000::/2", "8000::/2", "c000::/3", "e000::/4", "f000::/5", "f800::/6",
	"fe00::/7",          // link-local, site-local fec0::/10, multicast
	"2001::/32",         // Teredo, RFC 4380
	"2002::/16",         // 6to4, RFC 3056
	"fd00:ec2::254/128", // metadata of Amazon's cloud
	"fd00:ec2::23/128",  // credentials of its pods
	"fd20:ce::254/128",  // metadata of Google's cloud
)

func mustSet(prefixes ...string) *netipx.IPSet {
	var b netipx.IPSetBuilder
	for _, s := range prefixes {
		b.AddPrefix(netip.MustParsePrefix(s))
	}
	set, err := b.IPSet()
	if err != nil {
		panic(err) // the literals above
	}
	return set
}

// newPolicy compiles a client's allow list.
func newPolicy(allow []netip.Prefix) (*policy, error) {
	if len(allow) == 0 {
		allow = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	}
	var open, private netipx.IPSetBuilder
	for _, prefix := range allow {
		open.AddPrefix(prefix)
	}
	// Private space goes, with whatever wide prefix covered it, and comes back
	// for the prefixes that name it.
	open.RemoveSet(closedPrivate)
	for _, prefix := range allow {
		if closedPrivate.ContainsPrefix(prefix) {
			open.AddPrefix(prefix)
			private.AddPrefix(prefix)
		}
	}
	open.RemoveSet(closedNever)
	private.RemoveSet(closedNever)
	var pol policy
	var err, err2 error
	pol.open, err = open.IPSet()
	pol.private, err2 = private.IPSet()
	if err := errors.Join(err, err2); err != nil {
		return nil, fmt.Errorf("read the allowed prefixes: %w", err)
	}
	return &pol, nil
}

// allows reports whether the client may reach dst.
func (p *policy) allows(dst netip.Addr) bool { return p.open.Contains(dst) }

// names reports whether the allow list opens a private address: it is then the
// one that the gateway reaches, whatever other clients announce.
func (p *policy) names(dst netip.Addr) bool { return p.private.Contains(dst) }
