package sidecar

import (
	"net/netip"
	"slices"
	"testing"
)

func TestServersOnLink(t *testing.T) {
	conf := "# a comment\nsearch lan\nnameserver 192.168.1.1\nnameserver 9.9.9.9\nnameserver 127.0.0.53\nnameserver 10.0.0.2\n" +
		"nameserver\nnameserver fd00:1::53\nnameserver fd00:2::53\nnameserver fe80::1%eth0\nnameserver example.com\noptions edns0\n"
	links := []uplink{
		{subnets: []netip.Prefix{netip.MustParsePrefix("192.168.1.0/24"), netip.MustParsePrefix("fe80::/64")}},
		{subnets: []netip.Prefix{netip.MustParsePrefix("fd00:1::/64")}},
	}
	want := []netip.Addr{netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("fd00:1::53"), netip.MustParseAddr("fe80::1%eth0")}
	if got := serversOnLink([]byte(conf), links); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestMayAnswer(t *testing.T) {
	for src, want := range map[string]bool{
		"203.0.113.10": true, "192.168.1.1": true, "169.254.169.253": true, "2001:db8::1": true, "fd00::53": true,
		"fe80::1": false, "127.0.0.53": false, "::1": false, "0.0.0.0": false, "224.0.0.1": false, "255.255.255.255": false,
		"ff02::1": false, "::ffff:192.0.2.1": false, "::": false,
	} {
		if got := mayAnswer(netip.MustParseAddr(src)); got != want {
			t.Errorf("%s: %t", src, got)
		}
	}
}
