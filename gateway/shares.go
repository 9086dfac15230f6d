package gateway

import (
	"net/netip"
	"sync"

	"github.com/quicvpn/quicvpn/tunnel"
)

// shares divides places among clients. A client may have as many as are free: one
// alone gets half of them, a second half of the rest, and whoever comes next still
// finds some, however many greedy ones there are. (Choudhury and Hahne, "Dynamic
// queue length thresholds for shared-memory packet switches", 1998, with a factor
// of one.) In the same way the addresses of a client, which may be a host of
// containers, divide what is the client's.
type shares struct {
	total int

	mu   sync.Mutex // guards what follows
	used int
	of   map[tunnel.Fingerprint]int
	by   map[netip.Addr]int
}

func newShares(total int) *shares {
	return &shares{total: total, of: make(map[tunnel.Fingerprint]int), by: make(map[netip.Addr]int)}
}

// take takes a place for a client, and for the address of the client's that asks,
// if it is valid. What it returns gives it back.
func (s *shares) take(id tunnel.Fingerprint, from netip.Addr) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	room := s.total - s.used - s.of[id]
	if room <= 0 || from.IsValid() && s.by[from] >= room {
		return nil, false
	}
	s.used++
	s.of[id]++
	if from.IsValid() {
		s.by[from]++
	}
	return func() { s.give(id, from) }, true
}

func (s *shares) give(id tunnel.Fingerprint, from netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used--
	if s.by[from]--; s.by[from] <= 0 {
		delete(s.by, from)
	}
	if s.of[id]--; s.of[id] == 0 {
		delete(s.of, id)
	}
}
