package sidecar

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// TestRepairsItself has other programs change everything that the sidecar set.
func TestRepairsItself(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{})
	l.ping(toyRemote4, toyRemote6)
	running := l.snapshot()
	const table = "inet " + killSwitchTable
	for _, damage := range []string{
		"nft flush ruleset",
		"nft delete table " + table,
		"nft flush chain " + table + " output",
		"nft insert rule " + table + " output accept",
		"nft add rule " + table + " input accept",
		"nft add chain " + table + " output { policy accept ; }",
		"nft add chain " + table + " another",
		"nft add table " + table + " { flags dormant ; }",
		"ip rule del priority 20822",
		"ip rule del priority 20821",
		"ip -6 rule del priority 20820",
		"ip rule add priority 20821 from all lookup 99",
		"ip route flush table 20822",
		"ip -6 route flush table 20822",
		"ip -6 route add 2001:db8:3::/64 dev eth0 table 20822",
		"ip addr flush dev quicvpn0",
		"ip addr add 10.99.0.1/24 dev quicvpn0",
		"ip link set quicvpn0 down",
		"ip link set quicvpn0 mtu 9000",
		"ip link set quicvpn0 mtu 1000",
		"ip link del quicvpn0",
	} {
		l.sh(strings.Fields(damage)...)
		l.eventually(func() error {
			if diff := cmp.Diff(running, l.snapshot()); diff != "" {
				return fmt.Errorf("%s: not repaired:\n%s", damage, diff)
			}
			return nil
		})
		l.ping(toyRemote4, toyRemote6)
	}
	if n := strings.Count(cmd.Log(), "something else changed the kill switch's rules"); n < 7 {
		t.Errorf("%d repairs of the kill switch were said, want 8", n)
	}
	l.stop(cmd)
}

// TestUplinkChanges: addresses and interfaces come and go.
func TestUplinkChanges(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{})
	l.Lab.Link(l.Client, l.Internet, netlab.LinkConfig{
		A: netlab.End{Name: "eth1", Addresses: []netip.Prefix{netip.MustParsePrefix("172.20.0.2/16")}},
		B: netlab.End{Name: "lan", Addresses: []netip.Prefix{netip.MustParsePrefix("172.20.0.1/16")}},
	})
	onLan := netip.MustParseAddr("172.20.0.1")
	l.ping(onLan)
	l.sh("ip", "link", "del", "eth1")
	l.eventually(func() error {
		for line := range strings.Lines(l.dump()) {
			if strings.Contains(line, "172.20.0") {
				return errors.New("still there: " + line)
			}
		}
		return nil
	})
	l.ping(toyRemote4)
	l.stop(cmd)
}
