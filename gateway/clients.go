package gateway

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/netip"
	"time"

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
	// Block4 and Block6 are the client's block, if it asked for one: its own for
	// as long.
	Block4, Block6 netip.Prefix
	// Allow limits its destinations outside of the network; empty does not.
	Allow []netip.Prefix
}

// A member is a Client as the state holds it. It never changes.
type member struct {
	host   uint32
	block  uint32 // the run of numbers; zero if it has none
	token  string // ID
	since  time.Time
	change uint64 // the change by which it came; zero if it was read
	// before is what the change replaced; nil if it enrolled the key.
	before *member
}

// is reports whether two members are of one enrolment.
func (m *member) is(n *member) bool {
	return n != nil && m.host == n.host && m.since.Equal(n.since)
}

// Authorize answers a join. Its errors are *tunnel.RefusedError.
//
// A key that is enrolled gets its Client, without a look at the secret and
// without I/O, until the token that enrolled it is revoked; that the token has
// expired or is used up since does not matter. Another key with the secret of a
// token that is in force is enrolled, which is durable before the answer. A
// secret that no token has costs no I/O.
//
// Who asks for a block gets one, which is durable before the answer as well, and
// has it from then on, also in answers to joins that do not ask.
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
	case m == nil || join.Block && m.block == 0:
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
	return s.client(id, m, s.tokens.byID[m.token]), !s.endsLocked(id, m)
}

// Admitted reports whether a Client of the past is still what its key is. The key
// may have been revoked, and enrolled anew by another token.
func (s *State) Admitted(c Client) bool {
	now, ok := s.Lookup(c.ID)
	return ok && now.TokenID == c.TokenID && now.Addr4 == c.Addr4 && now.Addr6 == c.Addr6 &&
		(!c.Block4.IsValid() || now.Block4 == c.Block4)
}

// lookLocked finds the member that a join speaks for, or the token that may
// enrol it.
func (s *State) lookLocked(join tunnel.Join, sum digest, now time.Time) (*member, *tokenRecord, error) {
	if m := s.members[join.Client]; m != nil {
		t := s.tokens.byID[m.token]
		if !t.Revoked.IsZero() {
			return nil, nil, refuseRevoked()
		}
		if s.endsLocked(join.Client, m) {
			return nil, nil, refuse(http.StatusServiceUnavailable, "unavailable", "it is about to forget this client: come again")
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
