package gateway

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/time/rate"

	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A State is what a running gateway knows durably: its identity, the join
// tokens and the clients that they enrolled. It is safe for concurrent use.
//
// Its directory and files are kept private: one that others can read, as a
// container's volume at first is, is made so when it is opened. A file that is
// missing or damaged is an error and never a fresh start.
type State struct {
	// Log is where the state speaks; it may be set before the first use. Nil
	// discards.
	Log *slog.Logger

	dir  string
	key  ed25519.PrivateKey
	cfg  settings
	lock *os.File

	// seen belongs to Watch.
	seen struct {
		tokens    stamp
		complaint string
	}

	// mu guards what follows. It is not held during I/O.
	mu       sync.RWMutex
	tokens   *tokenTable // replaced whole; has the token of every member
	members  map[tunnel.Fingerprint]*member
	enrolled map[string]int           // by token ID, ever
	pace     map[string]*rate.Limiter // by token ID, of enrolments
	pool     pool
	leaving  map[tunnel.Fingerprint]bool // members that Remove is about to remove
	changes  uint64                      // counts what happened to members and enrolled
	closed   bool

	disk disk
}

// disk is how far clients.json follows the members.
type disk struct {
	// writing is held while the file is written, and taken before State.mu. It
	// guards failed and failure.
	writing sync.Mutex
	stored  atomic.Uint64 // the change up to which the file is durable
	failed  uint64        // the change up to which a write was tried in vain
	failure error         // of the last write; nil if it went well
}

// OpenState opens a gateway's state directory, which is then its own until
// Close: a second gateway there is refused.
func OpenState(dir string) (*State, error) {
	s, err := openState(dir)
	if err != nil {
		return nil, fmt.Errorf("open gateway state: %w", err)
	}
	return s, nil
}

func openState(dir string) (_ *State, err error) {
	s := &State{dir: dir, pace: make(map[string]*rate.Limiter), leaving: make(map[tunnel.Fingerprint]bool)}
	if s.key, s.cfg, err = loadFixed(dir); err != nil {
		return nil, err
	}
	s.lock, err = lockFile(dir, gatewayLock)
	if errors.Is(err, durable.ErrLocked) {
		return nil, fmt.Errorf("another gateway runs on %s: stop it, or give this one a directory of its own", dir)
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.lock.Close()
		}
	}()
	if s.tokens, s.seen.tokens, err = readTokens(dir); err != nil {
		return nil, err
	}
	if err := s.readClients(); err != nil {
		return nil, err
	}
	// What was revoked or removed while no gateway ran.
	if gone := s.endedLocked(); len(gone) > 0 {
		s.removeLocked(gone)
		if err := s.store(s.changes); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// readClients fills members, enrolled and pool.
func (s *State) readClients() error {
	var file clients
	if err := readFile(s.dir, clientsFile, &file); err != nil {
		return err
	}
	s.pool = newPool(s.cfg.Pool4, s.cfg.Pool6)
	s.members = make(map[tunnel.Fingerprint]*member, len(file.Clients))
	s.enrolled = make(map[string]int)
	maps.Copy(s.enrolled, file.Enrolled)
	for i, r := range file.Clients {
		host, ok := s.pool.number(r.Addr4, r.Addr6)
		if !ok {
			return fmt.Errorf("%s is damaged (the addresses of client number %d are not of the pools in %s): restore both from the same backup",
				filepath.Join(s.dir, clientsFile), i+1, settingsFile)
		}
		if !s.pool.take(host) {
			return fmt.Errorf("%s is damaged (client number %d has the addresses of another): restore it from a backup",
				filepath.Join(s.dir, clientsFile), i+1)
		}
		if s.tokens.byID[r.Token] == nil {
			return fmt.Errorf("%s does not have the token of client number %d in %s: restore both from the same backup",
				filepath.Join(s.dir, tokensFile), i+1, clientsFile)
		}
		m := &member{host: host, token: r.Token, since: r.Since}
		if r.Block4.IsValid() || r.Block6.IsValid() {
			if m.block, ok = s.pool.run(r.Block4, r.Block6); !ok || !s.pool.takeBlock(m.block) {
				return fmt.Errorf("%s is damaged (the block %s of client number %d is not one of the pools in %s, or has addresses of another client): restore both from the same backup",
					filepath.Join(s.dir, clientsFile), r.Block4, i+1, settingsFile)
			}
		}
		s.members[tunnel.Fingerprint(r.Key)] = m
	}
	return nil
}

// Key returns the gateway's identity.
func (s *State) Key() ed25519.PrivateKey { return s.key }

// Address returns the "host:port" that clients dial.
func (s *State) Address() string { return s.cfg.Address }

// port returns the port of Address, which Init checked.
func (s *State) port() uint16 {
	_, text, _ := net.SplitHostPort(s.cfg.Address)
	n, _ := strconv.ParseUint(text, 10, 16)
	return uint16(n)
}

// Pools returns the prefixes in which clients live. The first host of each is
// the gateway itself.
func (s *State) Pools() (v4, v6 netip.Prefix) { return s.cfg.Pool4, s.cfg.Pool6 }

// Close ends enrolment and releases the directory. Watch must have returned.
func (s *State) Close() error {
	s.disk.writing.Lock() // no file is written after Close
	defer s.disk.writing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	return s.lock.Close()
}

func (s *State) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}
