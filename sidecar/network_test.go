package sidecar

import (
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A session that has just begun may know too little of its path: IPv6 is given
// up only when it has had time to look.
func TestNewSessionKeepsIPv6(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFakeSession(netip.AddrPort{})
		s.mtu = 1161
		n := &Link{adopted: time.Now()}
		if got := n.mtuLocked(s); got != minIPv6MTU {
			t.Errorf("at first the MTU is %d, want %d", got, minIPv6MTU)
		}
		time.Sleep(probing)
		if got := n.mtuLocked(s); got != 1161 {
			t.Errorf("after %v the MTU is %d, want the session's 1161", probing, got)
		}
	})
}

func TestPrivateServers(t *testing.T) {
	conf := "# a comment\nsearch lan\nnameserver 192.168.1.1\nnameserver 9.9.9.9\nnameserver 127.0.0.53\n" +
		"nameserver\nnameserver fd00::53\nnameserver fe80::1%eth0\noptions edns0\n"
	want := []netip.Addr{netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("fd00::53"), netip.MustParseAddr("fe80::1%eth0")}
	if got := privateServers([]byte(conf)); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
