package sidecar

import (
	"net/netip"
	"slices"
	"testing"
)

func TestPrivateServers(t *testing.T) {
	conf := "# a comment\nsearch lan\nnameserver 192.168.1.1\nnameserver 9.9.9.9\nnameserver 127.0.0.53\n" +
		"nameserver\nnameserver fd00::53\nnameserver fe80::1%eth0\noptions edns0\n"
	want := []netip.Addr{netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("fd00::53"), netip.MustParseAddr("fe80::1%eth0")}
	if got := privateServers([]byte(conf)); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
