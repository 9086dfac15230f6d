package gateway

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A token whose secret somebody else has, or a client that forgets its key in a
// loop, shall not empty the pool before anybody notices.
const (
	enrolBurst = 1024 // by one token, at once
	enrolRate  = 1    // afterwards, in a second
	blockCost  = 16   // a block counts as so many clients
)

// enrol adds a member, or gives one a block, in memory. Where another join of
// the same key was faster, it returns that one's.
func (s *State) enrol(join tunnel.Join, sum digest, now time.Time) (*member, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, t, err := s.lookLocked(join, sum, now)
	if err != nil || m != nil && (m.block != 0 || !join.Block) {
		return m, err
	}
	pace, cost := s.pace[t.ID], 1
	if pace == nil {
		pace = rate.NewLimiter(enrolRate, enrolBurst)
		s.pace[t.ID] = pace
	}
	if join.Block {
		cost = blockCost
	}
	if pace.TokensAt(now) < float64(cost) {
		return nil, refuse(http.StatusServiceUnavailable, "enrolment-rate", fmt.Sprintf(
			"the join token enrols clients too fast, which is more than %d, or %d with blocks of addresses, and then one a second: "+
				"come again in a minute, or make another with `quicvpn token create`", enrolBurst, enrolBurst/blockCost))
	}
	next := &member{token: t.ID, since: now.UTC().Round(0)}
	if m != nil {
		*next, next.before = *m, m
	}
	if err := s.takeLocked(next, join.Block); err != nil {
		return nil, err
	}
	pace.AllowN(now, cost)
	s.changes++
	next.change = s.changes
	s.members[join.Client] = next
	if m == nil {
		s.enrolled[t.ID]++
	}
	return next, nil
}

// takeLocked gives a member what it has not got of its numbers. The block comes
// first: the number could be the one that keeps a run from being a block.
func (s *State) takeLocked(m *member, block bool) error {
	if block && m.block == 0 {
		run, ok := s.pool.allocateBlock()
		if !ok {
			return s.refuseBlock()
		}
		m.block = run
	}
	if m.host != 0 {
		return nil
	}
	host, ok := s.pool.allocate()
	if !ok {
		if m.block != 0 {
			s.pool.freeBlock(m.block)
		}
		return refuse(http.StatusServiceUnavailable, "pool-exhausted", fmt.Sprintf(
			"it has no address left in %s and %s: on the gateway, remove clients that are gone with `quicvpn client remove`, "+
				"or revoke their tokens with `quicvpn token revoke`",
			s.cfg.Pool4, s.cfg.Pool6))
	}
	m.host = host
	return nil
}

func (s *State) refuseBlock() error {
	larger := fmt.Sprintf("make another gateway with a larger --pool, such as %s", defaultPool4)
	if s.pool.blockRuns() < 2 {
		return refuse(http.StatusServiceUnavailable, "pool-exhausted", fmt.Sprintf(
			"its pools %s and %s are too small for a block of %d addresses, which this client needs: %s",
			s.cfg.Pool4, s.cfg.Pool6, blockSize, larger))
	}
	return refuse(http.StatusServiceUnavailable, "pool-exhausted", fmt.Sprintf(
		"it has no block of %d addresses left in %s and %s, which this client needs: on the gateway, remove clients that are gone "+
			"with `quicvpn client remove`, or revoke their tokens with `quicvpn token revoke`, or %s",
		blockSize, s.cfg.Pool4, s.cfg.Pool6, larger))
}

// settle answers for a member that may not be durable yet.
func (s *State) settle(id tunnel.Fingerprint, m *member) (Client, error) {
	if err := s.store(m.change); err != nil {
		s.undo(id, m)
		return Client{}, refuse(http.StatusServiceUnavailable, "unavailable",
			"it could not store the enrolment: the gateway's log says why")
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	// Meanwhile it may have got a block, which is another join's.
	if !m.is(s.members[id]) || s.endsLocked(id, m) {
		return Client{}, refuseRevoked()
	}
	return s.client(id, m, s.tokens.byID[m.token]), nil
}

// undo makes a member what it was before a change that could not be stored.
func (s *State) undo(id tunnel.Fingerprint, m *member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.members[id] != m {
		return
	}
	if m.before == nil {
		s.enrolled[m.token]--
		s.removeLocked(map[tunnel.Fingerprint]*member{id: m})
		return
	}
	if m.before.block == 0 && m.block != 0 {
		s.pool.freeBlock(m.block)
	}
	s.members[id] = m.before
	s.changes++
}

func (s *State) client(id tunnel.Fingerprint, m *member, t *tokenRecord) Client {
	c := Client{ID: id, Name: t.Name, TokenID: t.ID, Network: t.Network, Allow: slices.Clone(t.Allow)}
	c.Addr4, c.Addr6 = s.pool.addresses(m.host)
	if m.block != 0 {
		c.Block4, c.Block6 = s.pool.block(m.block)
	}
	return c
}
