package gateway

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/tunnel"
)

// watchInterval bounds how late a change is noticed where the kernel does not
// tell of it (a network file system, no inotify instance left).
const watchInterval = 400 * time.Millisecond

// Watch takes up what the CLI does to the tokens, until ctx ends; it then
// returns nil. It calls gone with those clients that may no longer be here,
// and frees their addresses after gone has returned. Only one Watch may run.
//
// While tokens.json cannot be used, what it said last stays in force and the log
// says so.
func (s *State) Watch(ctx context.Context, gone func([]tunnel.Fingerprint)) error {
	events := make(chan struct{}, 1)
	stop, err := notify(s.dir, events)
	if err != nil {
		s.log().Warn("cannot be told of changes to the state directory, looks for them instead", "error", err)
		stop = func() {}
	}
	defer stop()
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		s.refresh(gone)
		select {
		case <-ctx.Done():
			return nil
		case <-events:
		case <-tick.C:
		}
	}
}

// refresh reads tokens.json if it is another than before.
func (s *State) refresh(revoked func([]tunnel.Fingerprint)) {
	now, err := stampOf(filepath.Join(s.dir, tokensFile))
	if err == nil && now == s.seen.tokens {
		s.seen.complaint = ""
		return
	}
	fresh, now, err := readTokens(s.dir)
	if err == nil {
		err = s.replaceTokens(fresh, revoked)
	}
	if err != nil {
		if s.seen.complaint != err.Error() { // once for each fault
			s.seen.complaint = err.Error()
			s.log().Error("the tokens on disk are not usable, those in memory stay in force", "error", err)
		}
		return
	}
	s.seen.tokens, s.seen.complaint = now, ""
}

func (s *State) replaceTokens(fresh *tokenTable, revoked func([]tunnel.Fingerprint)) error {
	s.mu.Lock()
	for _, m := range s.members {
		if fresh.byID[m.token] == nil {
			s.mu.Unlock()
			return fmt.Errorf("%s lacks a token that clients were enrolled by: restore it, and revoke with `quicvpn token revoke`",
				filepath.Join(s.dir, tokensFile))
		}
	}
	s.tokens = fresh // from here on Authorize refuses whose token is revoked
	gone := s.endedLocked()
	s.mu.Unlock()
	if len(gone) == 0 {
		return nil
	}
	ids := make([]tunnel.Fingerprint, 0, len(gone))
	for id := range gone {
		ids = append(ids, id)
	}
	revoked(ids)

	s.mu.Lock()
	s.removeLocked(gone)
	change := s.changes
	s.mu.Unlock()
	if err := s.store(change); err != nil {
		// No harm is done: the next write, or the next start, does it again.
		s.log().Warn("revoked or removed clients are still on disk", "error", err)
	}
	return nil
}

// A tokenTable is the tokens as the state holds them. It never changes.
type tokenTable struct {
	all  []tokenRecord
	byID map[string]*tokenRecord
	// removed are the clients that the CLI removed, with when they had come.
	removed map[tunnel.Fingerprint]time.Time
}

func newTokenTable(file tokens) *tokenTable {
	t := &tokenTable{all: file.Tokens, byID: make(map[string]*tokenRecord, len(file.Tokens)),
		removed: make(map[tunnel.Fingerprint]time.Time, len(file.Removed))}
	for i := range t.all {
		t.byID[t.all[i].ID] = &t.all[i]
	}
	for _, r := range file.Removed {
		t.removed[tunnel.Fingerprint(r.Key)] = r.Since
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

// A stamp tells one version of a file from another.
type stamp struct {
	inode, size uint64
	modified    unix.Timespec
}

func stampOf(path string) (stamp, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return stamp{}, err
	}
	return stamp{inode: st.Ino, size: uint64(st.Size), modified: st.Mtim}, nil
}

// readTokens reads tokens.json with the stamp of what it read, or an older one.
func readTokens(dir string) (*tokenTable, stamp, error) {
	st, err := stampOf(filepath.Join(dir, tokensFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, st, fmt.Errorf("read gateway state: %w", err)
	}
	var file tokens
	if err := readFile(dir, tokensFile, &file); err != nil {
		return nil, st, err
	}
	return newTokenTable(file), st, nil
}

// notify sends to events after something in a directory was written or renamed.
func notify(dir string, events chan<- struct{}) (stop func(), err error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO|unix.IN_CLOSE_WRITE); err != nil {
		f.Close()
		return nil, os.NewSyscallError("inotify_add_watch", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return // stop closed it
			}
			select {
			case events <- struct{}{}:
			default:
			}
		}
	}()
	return func() { f.Close(); <-done }, nil
}
