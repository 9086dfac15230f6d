package gateway

import (
	"testing"

	"github.com/quicvpn/quicvpn/tunnel"
)

func TestShares(t *testing.T) {
	s := newShares(64)
	grab := func(id byte) (got int, release []func()) {
		for {
			r, ok := s.take(tunnel.Fingerprint{id})
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
