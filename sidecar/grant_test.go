package sidecar

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go4.org/netipx"

	"github.com/quicvpn/quicvpn/tunnel"
)

func TestGrants(t *testing.T) {
	var b netipx.IPSetBuilder
	b.AddPrefix(netip.MustParsePrefix("10.91.3.0/24"))
	set, err := b.IPSet()
	if err != nil {
		t.Fatal(err)
	}
	links := []uplink{{
		name: "eth0", addrs: []netip.Addr{netip.MustParseAddr("10.91.3.2"), addr6a}, onLink: set.Ranges(),
		subnets: []netip.Prefix{netip.MustParsePrefix("10.91.3.0/24"), netip.MustParsePrefix("2606:4700:4700::/64")},
	}}
	for text, want := range map[string]string{
		"10.88.0.5":         "",
		"fd88::5":           "",
		"10.91.3.7":         "in the subnet 10.91.3.0/24 of its interface eth0", // a neighbour's, perhaps
		"10.91.3.0":         "in the subnet 10.91.3.0/24 of its interface eth0",
		"2606:4700:4700::8": "in the subnet 2606:4700:4700::/64 of its interface eth0",
		"8.8.8.7":           "",
		"2606:4700::8":      "",
		"10.91.3.2":         "interface eth0 has already",
		"::ffff:10.91.3.2":  "interface eth0 has already",
		"2001:db8::1":       "interface eth0 has already",
		"127.0.0.1":         "no host's",
		"0.0.0.0":           "no host's",
		"255.255.255.255":   "no host's",
		"224.0.0.1":         "no host's",
		"169.254.169.254":   "no host's",
		"::1":               "no host's",
		"fe80::1":           "no host's",
		"ff02::1":           "no host's",
		"0.1.2.3":           "no host's",
		"240.1.2.3":         "no host's",
		"::2":               "no host's",
		"::10.88.0.5":       "no host's",
		"fec0::1":           "no host's",
		"64:ff9b::a58:5":    "no host's",
		"2002:a58:5::1":     "no host's",
	} {
		err := checkGrant(tunnel.Grant{Addresses: []netip.Addr{netip.MustParseAddr(text)}}, links)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
	if checkGrant(tunnel.Grant{}, links) == nil || checkGrant(tunnel.Grant{Addresses: make([]netip.Addr, 100)}, links) == nil {
		t.Error("no address, or a hundred, are accepted")
	}
	own := []netip.Addr{toyOwn4}
	if checkGrant(tunnel.Grant{Addresses: own, Peers: slices.Repeat([]netip.Prefix{netip.MustParsePrefix("10.88.0.0/24")}, 17)}, links) == nil {
		t.Error("17 prefixes of peers are accepted")
	}
	if checkGrant(tunnel.Grant{Addresses: own, Gateway: slices.Repeat(own, 5)}, links) == nil {
		t.Error("5 addresses of the gateway are accepted")
	}
	for peers, good := range map[string]bool{
		"10.0.0.0/9": true, "8.0.0.0/8": true, "100.64.0.0/10": true, "2606:4700::/32": true, "fd00::/8": true,
		"0.0.0.0/0": false, "0.0.0.0/1": false, "8.0.0.0/7": false, "::/0": false, "2000::/3": false,
		"2606:4700::/31": false,
	} {
		p := netip.MustParsePrefix(peers)
		g := tunnel.Grant{Addresses: []netip.Addr{toyOwn4, toyOwn6, netip.MustParseAddr("8.0.0.1"), netip.MustParseAddr("100.64.0.1"), netip.MustParseAddr("2606:4700::1")}}
		g.Peers = []netip.Prefix{p}
		err := checkGrant(g, nil)
		if (err == nil) != good || err != nil && !strings.Contains(err.Error(), peers) {
			t.Errorf("clients in %s: got %v, want it to be good: %t", peers, err, good)
		}
	}
	for peers, want := range map[string]string{
		"10.91.0.0/16": "the network's 10.91.0.0/16 and 10.91.3.0/24 of eth0",
		"10.91.3.7/32": "the network's 10.91.3.7/32 and 10.91.3.0/24 of eth0",
		"10.92.0.0/16": "",
		"fd88::/64":    "",
	} {
		p := netip.MustParsePrefix(peers)
		g := tunnel.Grant{Addresses: []netip.Addr{p.Addr().Next()}, Peers: []netip.Prefix{p}}
		if p.IsSingleIP() {
			g.Addresses = []netip.Addr{p.Addr()}
		}
		if got := overlap(p, links); got != want {
			t.Errorf("%s: got %q, want %q", peers, got, want)
		}
		if err := checkGrant(g, links); (err == nil) != (want == "") {
			t.Errorf("%s: accepted: %v", peers, err)
		}
	}
}

// TestAnnouncedPeers: what other clients of the network announce neither ends a
// session nor takes this namespace's neighbours away.
func TestAnnouncedPeers(t *testing.T) {
	links := []uplink{{name: "eth0", onLink: []netipx.IPRange{netipx.RangeOfPrefix(netip.MustParsePrefix("172.17.0.0/16"))}}}
	pool, docker, other := netip.MustParsePrefix("10.88.0.0/24"), netip.MustParsePrefix("172.17.3.0/24"), netip.MustParsePrefix("172.18.0.0/16")
	half, mapped := netip.MustParsePrefix("128.0.0.0/1"), netip.MustParsePrefix("::ffff:0.0.0.0/96")
	many := slices.Repeat([]netip.Prefix{other}, maxPeers)
	for _, tt := range []struct {
		peers, before, want []netip.Prefix
		bad                 string
	}{
		{[]netip.Prefix{pool, other}, nil, []netip.Prefix{pool, other}, ""},
		{[]netip.Prefix{pool, docker, other}, nil, []netip.Prefix{pool, other}, "172.17.3.0/24 and 172.17.0.0/16 of eth0"},
		{[]netip.Prefix{pool, docker}, []netip.Prefix{pool, docker}, []netip.Prefix{pool, docker}, ""},
		{[]netip.Prefix{half, pool}, nil, []netip.Prefix{pool}, "128.0.0.0/1 is not one network's"},
		{[]netip.Prefix{mapped, pool}, nil, []netip.Prefix{pool}, "::ffff:0.0.0.0/96 is not one network's"},
		{slices.Concat([]netip.Prefix{pool}, many), nil, slices.Concat([]netip.Prefix{pool}, many[1:]), ""},
	} {
		g := tunnel.Grant{Addresses: []netip.Addr{toyOwn4}, Peers: tt.peers}
		if err := checkGrant(g, links); err != nil {
			t.Errorf("%v: %v", tt.peers, err)
		}
		got, bad := usable(g, tt.peers, tt.before, links)
		if !slices.Equal(got, tt.want) || (bad == "") != (tt.bad == "") || !strings.Contains(bad, tt.bad) {
			t.Errorf("%v after %v: got %v (%s), want %v (%s)", tt.peers, tt.before, got, bad, tt.want, tt.bad)
		}
	}
}

func TestWholeInternet(t *testing.T) {
	all4, all6, some := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0"), netip.MustParsePrefix("10.20.0.0/16")
	both, v4 := []netip.Addr{toyOwn4, toyOwn6}, []netip.Addr{toyOwn4}
	for _, tt := range []struct {
		addrs  []netip.Addr
		routes []netip.Prefix
		want   bool
	}{
		{both, []netip.Prefix{some, all4, all6}, true},
		{both, []netip.Prefix{all4}, false},
		{v4, []netip.Prefix{all4}, true},
		{v4, []netip.Prefix{all6, some}, false},
		{v4, nil, false},
	} {
		if got := wholeInternet(tunnel.Grant{Addresses: tt.addrs, Routes: tt.routes}); got != tt.want {
			t.Errorf("%v by %v: %t, want %t", tt.addrs, tt.routes, got, tt.want)
		}
	}
}
