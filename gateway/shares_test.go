package gateway

import (
	"net/netip"
	"testing"

	"github.com/quicvpn/quicvpn/tunnel"
)

func TestShares(t *testing.T) {
	s := newShares(64)
	grab := func(id byte) (got int, release []func()) {
		for {
			r, ok := s.take(tunnel.Fingerprint{id}, netip.Addr{})
			if !ok {
				return len(release), release
			}
			release = append(release, r)
		}
	}
	// Each takes what it can, and the next still gets something.
	var all []func()
	for i, want := range []int{32, 16, 8, 4, 2, 1} {
		got, release := grab(byte(i))
		if got != want {
			t.Errorf("client %d got %d places, want %d", i, got, want)
		}
		all = append(all, release...)
	}
	for _, r := range all {
		r()
	}
	if s.used != 0 || len(s.of) != 0 {
		t.Errorf("after all were given back %d are in use, by %d clients", s.used, len(s.of))
	}
	if got, _ := grab(9); got != 32 {
		t.Errorf("then one gets %d", got)
	}
}

// One address of a client leaves room for its others, and all of them for other
// clients.
func TestSharesOfAddresses(t *testing.T) {
	s := newShares(81)
	grab := func(id, host byte) (got int, release []func()) {
		for {
			r, ok := s.take(tunnel.Fingerprint{id}, netip.AddrFrom4([4]byte{10, 91, id, host}))
			if !ok {
				return len(release), release
			}
			release = append(release, r)
		}
	}
	var all []func()
	for host, want := range []int{27, 9, 3, 1} {
		got, release := grab(1, byte(host))
		if got != want {
			t.Errorf("address %d got %d places, want %d", host, got, want)
		}
		all = append(all, release...)
	}
	got, release := grab(2, 1)
	if want := (81 - len(all) + 2) / 3; got != want {
		t.Errorf("another client got %d places, want %d", got, want)
	}
	for _, r := range append(all, release...) {
		r()
	}
	if s.used != 0 || len(s.of) != 0 || len(s.by) != 0 {
		t.Errorf("after all were given back %d are in use, by %d clients with %d addresses", s.used, len(s.of), len(s.by))
	}
}
