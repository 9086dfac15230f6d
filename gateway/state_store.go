package gateway

import (
	"net"
	"slices"
)

// store returns when clients.json holds a change. Changes that come while a
// write is under way share the next one.
func (s *State) store(change uint64) error {
	s.disk.writing.Lock()
	defer s.disk.writing.Unlock()
	if change <= s.disk.stored.Load() {
		return nil
	}
	if change <= s.disk.failed {
		return s.disk.failure
	}
	s.mu.RLock()
	closed, upTo, file := s.closed, s.changes, s.snapshotLocked()
	s.mu.RUnlock()
	if closed {
		return net.ErrClosed
	}
	slices.SortFunc(file.Clients, func(a, b clientRecord) int { return a.Addr4.Compare(b.Addr4) })
	if err := writeFile(s.dir, clientsFile, &file); err != nil {
		if s.disk.failure == nil { // once for all that fail in a row
			s.log().Error("no client can be enrolled or forgotten", "error", err)
		}
		s.disk.failed, s.disk.failure = upTo, err
		return err
	}
	s.disk.failure = nil
	s.disk.stored.Store(upTo)
	return nil
}

func (s *State) snapshotLocked() clients {
	file := clients{Version: version, Clients: make([]clientRecord, 0, len(s.members)), Enrolled: make(map[string]int)}
	for id, m := range s.members {
		if s.leaving[id] {
			continue
		}
		r := clientRecord{Key: digest(id), Token: m.token, Since: m.since}
		r.Addr4, r.Addr6 = s.pool.addresses(m.host)
		if m.block != 0 {
			r.Block4, r.Block6 = s.pool.block(m.block)
		}
		file.Clients = append(file.Clients, r)
	}
	for id, n := range s.enrolled {
		if n > 0 {
			file.Enrolled[id] = n
		}
	}
	return file
}
