package gateway

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/tunnel"
)

// TestEnrolmentRate wants a token to enrol a burst, and then no faster than it
// may, while all else goes on.
func TestEnrolmentRate(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	second := newToken(t, dir, TokenOptions{Name: "second"})
	s := reopen(t, dir)
	var refused atomic.Int64
	var wg sync.WaitGroup
	for n := range enrolBurst + 20 {
		wg.Go(func() {
			_, err := s.Authorize(join(n, first), start)
			var r *tunnel.RefusedError
			if errors.As(err, &r) && r.Code == "enrolment-rate" {
				refused.Add(1)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := refused.Load(); n != 20 {
		t.Errorf("%d of 20 too many were refused", n)
	}
	const next = 5000
	_, err := s.Authorize(join(next, first), start.Add(time.Second/2))
	wantRefused(t, err, 503, "enrolment-rate")
	mustJoin(t, s, join(next, second), start)
	for id := range s.members {
		mustJoin(t, s, tunnel.Join{Client: id}, start)
	}
	mustJoin(t, s, join(next+1, first), start.Add(time.Second))
	_, err = s.Authorize(join(next+2, first), start.Add(time.Second))
	wantRefused(t, err, 503, "enrolment-rate")
	if n := listed(t, dir)[0].Used; n != enrolBurst+1 {
		t.Errorf("the token has enrolled %d clients", n)
	}
}
