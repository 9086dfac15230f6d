package gateway

import (
	"fmt"

	"github.com/quicvpn/quicvpn/tunnel"
)

// Remove forgets a client that will not come back, and returns when that is
// durable. It calls gone with it, and frees its addresses after gone has
// returned. After an error the client is what it was.
func (s *State) Remove(id tunnel.Fingerprint, gone func([]tunnel.Fingerprint)) error {
	s.mu.Lock()
	m := s.members[id]
	if m == nil || s.leaving[id] {
		s.mu.Unlock()
		return nil
	}
	s.leaving[id] = true // from here on Authorize refuses it
	s.changes++
	change := s.changes
	s.mu.Unlock()

	err := s.store(change)
	if err == nil {
		gone([]tunnel.Fingerprint{id})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leaving, id)
	if err == nil {
		s.removeLocked(map[tunnel.Fingerprint]*member{id: m})
		return nil
	}
	s.changes++
	if m.is(s.members[id]) {
		// A write that came later may have left it out.
		back := *s.members[id]
		back.change, back.before = s.changes, s.members[id]
		s.members[id] = &back
	}
	return fmt.Errorf("forget client %s: %w", id, err)
}

// endsLocked reports whether a member is on its way out.
func (s *State) endsLocked(id tunnel.Fingerprint, m *member) bool {
	removed, ok := s.tokens.removed[id]
	return !s.tokens.byID[m.token].Revoked.IsZero() || s.leaving[id] || ok && removed.Equal(m.since)
}

// endedLocked returns the members whose tokens are revoked, and those that the
// CLI removed.
func (s *State) endedLocked() map[tunnel.Fingerprint]*member {
	gone := make(map[tunnel.Fingerprint]*member)
	for id, m := range s.members {
		if s.endsLocked(id, m) && !s.leaving[id] {
			gone[id] = m
		}
	}
	return gone
}

// removeLocked removes members and frees their addresses.
func (s *State) removeLocked(gone map[tunnel.Fingerprint]*member) {
	for id, m := range gone {
		now := s.members[id]
		if !m.is(now) {
			continue
		}
		delete(s.members, id)
		s.pool.free(now.host)
		if now.block != 0 {
			s.pool.freeBlock(now.block)
		}
	}
	s.changes++
}
