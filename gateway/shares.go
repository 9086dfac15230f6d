package gateway

import (
	"sync"

	"github.com/quicvpn/quicvpn/tunnel"
)

// shares divides places among clients. A client may have as many as are free: one
// alone gets half of them, a second half of the rest, and whoever comes next still
// finds some, however many greedy ones there are. (Choudhury and Hahne, "Dynamic
// queue length thresholds for shared-memory packet switches", 1998, with a factor
// of one.)
type shares struct {
	total int

	mu   sync.Mutex // guards what follows
	used int
	of   map[tunnel.Fingerprint]int
}

func newShares(total int) *shares {
	return &shares{total: total, of: make(map[tunnel.Fingerprint]int)}
}

// take takes a place for a client, which release gives back.
func (s *shares) take(id tunnel.Fingerprint) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[id] >= s.total-s.used {
		return nil, false
	}
	s.used++
	s.of[id]++
	return func() { s.give(id) }, true
}

func (s *shares) give(id tunnel.Fingerprint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used--
	if s.of[id]--; s.of[id] == 0 {
		delete(s.of, id)
	}
}
