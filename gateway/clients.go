package gateway

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A Client is a key that was enrolled.
type Client struct {
	// ID is the fingerprint of the key, the client's identity.
	ID tunnel.Fingerprint
	// Name and TokenID are those of the token that enrolled it.
	Name, TokenID string
	// Network is the network that it is in.
	Network string
	// Addr4 and Addr6 are its own for as long as its token is in force.
	Addr4, Addr6 netip.Addr
	// Allow limits its destinations outside of the network; empty does not.
	Allow []netip.Prefix
}

// A member is a Client as the state holds it. It never changes.
type member struct {
	host   uint32
	token  string // ID
	since  time.Time
	change uint64 // the change by which it came; zero if it was read
}

// Authorize answers a join. Its errors are *tunnel.RefusedError.
//
// A key that is enrolled gets its Client, without a look at the secret and
// without I/O, until the token that enrolled it is revoked; that the token has
// expired or is used up since does not matter. Another key with the secret of a
// token that is in force is enrolled, which is durable before the answer. A
// secret that no token has costs no I/O.
//
// A token may be revoked between the answer and the moment where the caller has
// a session that Watch's callback could end: ask Admitted then.
func (s *State) Authorize(join tunnel.Join, now time.Time) (Client, error) {
	var sum digest
	secret, err := token.ParseSecret(join.Secret)
	if err == nil {
		sum = sha256.Sum256(secret[:])
	}

	// Most joins, and all guesses at secrets, end under the shared lock.
	s.mu.RLock()
	m, t, err := s.lookLocked(join, sum, now)
	s.mu.RUnlock()
	switch {
	case err != nil:
		return Client{}, err
	case m == nil:
		if m, err = s.enrol(join, sum, now); err != nil {
			return Client{}, err
		}
	case m.change <= s.disk.stored.Load():
		return s.client(join.Client, m, t), nil
	}
	return s.settle(join.Client, m)
}

// Lookup returns the client that a key is now, if it is one.
func (s *State) Lookup(id tunnel.Fingerprint) (Client, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	m := s.members[id]
	if m == nil {
		return Client{}, false
	}
	t := s.tokens.byID[m.token]
	return s.client(id, m, t), t.Revoked.IsZero()
}

// Admitted reports whether a Client of the past is still what its key is. The key
// may have been revoked, and enrolled anew by another token.
func (s *State) Admitted(c Client) bool {
	now, ok := s.Lookup(c.ID)
	return ok && now.TokenID == c.TokenID && now.Addr4 == c.Addr4 && now.Addr6 == c.Addr6
}

// lookLocked finds the member that a join speaks for, or the token that may
// enrol it.
func (s *State) lookLocked(join tunnel.Join, sum digest, now time.Time) (*member, *tokenRecord, error) {
	if m := s.members[join.Client]; m != nil {
		t := s.tokens.byID[m.token]
		if !t.Revoked.IsZero() {
			return nil, nil, refuseRevoked()
		}
		return m, t, nil
	}
	t := s.tokens.withSecret(sum)
	switch {
	case t == nil && join.Secret == "":
		return nil, nil, refuse(http.StatusUnauthorized, "token-unknown",
			"it does not know this client, which brought no join token: "+another)
	case t == nil:
		return nil, nil, refuse(http.StatusUnauthorized, "token-unknown",
			"it does not know the join token, which another gateway may have made: "+another)
	case !t.Revoked.IsZero():
		return nil, nil, refuseRevoked()
	case !t.Expires.IsZero() && !now.Before(t.Expires):
		return nil, nil, refuse(http.StatusForbidden, "token-expired", fmt.Sprintf(
			"the join token expired at %s: %s", t.Expires.Format(time.RFC3339), another))
	case t.Uses > 0 && s.enrolled[t.ID] >= t.Uses:
		return nil, nil, refuse(http.StatusForbidden, "token-used-up", fmt.Sprintf(
			"the join token has enrolled as many clients as it may, which is %d: %s", t.Uses, another))
	}
	return nil, t, nil
}

const another = "make a join token on the gateway with `quicvpn token create` and give it to the client"

func refuse(status int, code, text string) error {
	return &tunnel.RefusedError{Status: status, Code: code, Text: text}
}

func refuseRevoked() error {
	return refuse(http.StatusForbidden, "token-revoked", "the join token was revoked: "+another)
}

// A tokenTable is the tokens as the state holds them. It never changes.
type tokenTable struct {
	all  []tokenRecord
	byID map[string]*tokenRecord
}

func newTokenTable(file tokens) *tokenTable {
	t := &tokenTable{all: file.Tokens, byID: make(map[string]*tokenRecord, len(file.Tokens))}
	for i := range t.all {
		t.byID[t.all[i].ID] = &t.all[i]
	}
	return t
}

// withSecret looks at every token, for as long whichever it is.
func (t *tokenTable) withSecret(sum digest) *tokenRecord {
	found := -1
	for i := range t.all {
		if subtle.ConstantTimeCompare(t.all[i].SHA256[:], sum[:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return nil
	}
	return &t.all[found]
}

// A token whose secret somebody else has, or a client that forgets its key in a
// loop, shall not empty the pool before anybody notices.
const (
	enrolBurst = 1024 // by one token, at once
	enrolRate  = 1    // afterwards, in a second
)

// enrol adds a member, in memory. Where another join of the same key was
// faster, it returns that one's.
func (s *State) enrol(join tunnel.Join, sum digest, now time.Time) (*member, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, t, err := s.lookLocked(join, sum, now)
	if m != nil || err != nil {
		return m, err
	}
	pace := s.pace[t.ID]
	if pace == nil {
		pace = rate.NewLimiter(enrolRate, enrolBurst)
		s.pace[t.ID] = pace
	}
	if pace.TokensAt(now) < 1 {
		return nil, refuse(http.StatusServiceUnavailable, "enrolment-rate", fmt.Sprintf(
			"the join token enrols clients too fast, which is more than %d, and then one a second: "+
				"come again in a minute, or make another with `quicvpn token create`", enrolBurst))
	}
	host, ok := s.pool.allocate()
	if !ok {
		return nil, refuse(http.StatusServiceUnavailable, "pool-exhausted", fmt.Sprintf(
			"it has no address left in %s and %s: revoke tokens whose clients are gone, on the gateway with `quicvpn token revoke`",
			s.cfg.Pool4, s.cfg.Pool6))
	}
	pace.AllowN(now, 1)
	s.changes++
	m = &member{host: host, token: t.ID, since: now.UTC().Round(0), change: s.changes}
	s.members[join.Client] = m
	s.enrolled[t.ID]++
	return m, nil
}

// settle answers for a member that may not be durable yet.
func (s *State) settle(id tunnel.Fingerprint, m *member) (Client, error) {
	if err := s.store(m.change); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.members[id] == m {
			s.enrolled[m.token]--
			s.removeLocked(map[tunnel.Fingerprint]*member{id: m})
		}
		return Client{}, refuse(http.StatusServiceUnavailable, "unavailable",
			"it could not store the enrolment: the gateway's log says why")
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	t := s.tokens.byID[m.token]
	if s.members[id] != m || !t.Revoked.IsZero() {
		return Client{}, refuseRevoked()
	}
	return s.client(id, m, t), nil
}

func (s *State) client(id tunnel.Fingerprint, m *member, t *tokenRecord) Client {
	c := Client{ID: id, Name: t.Name, TokenID: t.ID, Network: t.Network, Allow: slices.Clone(t.Allow)}
	c.Addr4, c.Addr6 = s.pool.addresses(m.host)
	return c
}

// revokedLocked returns the members whose tokens are revoked.
func (s *State) revokedLocked() map[tunnel.Fingerprint]*member {
	gone := make(map[tunnel.Fingerprint]*member)
	for id, m := range s.members {
		if !s.tokens.byID[m.token].Revoked.IsZero() {
			gone[id] = m
		}
	}
	return gone
}

// removeLocked removes members and frees their addresses.
func (s *State) removeLocked(gone map[tunnel.Fingerprint]*member) {
	for id, m := range gone {
		if s.members[id] == m {
			delete(s.members, id)
			s.pool.free(m.host)
		}
	}
	s.changes++
}

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
			s.log().Error("no client can be enrolled", "error", err)
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
		r := clientRecord{Key: digest(id), Token: m.token, Since: m.since}
		r.Addr4, r.Addr6 = s.pool.addresses(m.host)
		file.Clients = append(file.Clients, r)
	}
	for id, n := range s.enrolled {
		if n > 0 {
			file.Enrolled[id] = n
		}
	}
	return file
}
