package tunnel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// peers are the prefixes of Session.Peers, which come from the gateway.
type peers struct {
	now     atomic.Pointer[[]netip.Prefix]
	changed chan struct{} // of size 1

	// next is the list that the gateway has still to send: the latest alone.
	next atomic.Pointer[peerList]
	wake chan struct{} // of size 1
}

func (p *peers) init(now []netip.Prefix) {
	p.now.Store(&now)
	p.changed = make(chan struct{}, 1)
	p.wake = make(chan struct{}, 1)
}

// Peers returns the prefixes in which the other clients of the network live,
// and those that they have announced. They start as those of the grant.
func (s *Session) Peers() []netip.Prefix { return *s.peers.now.Load() }

// PeersChanged receives a value after Peers has changed.
func (s *Session) PeersChanged() <-chan struct{} { return s.peers.changed }

// SetPeers tells the client what its Peers are from now on. It does not wait: of
// lists that a slow client has not taken yet it gets the last. A client that is
// not quicvpn is told nothing.
func (s *Session) SetPeers(ps []netip.Prefix) error {
	list, err := peerListOf(ps)
	if err != nil {
		return err
	}
	s.peers.next.Store(&list)
	wake(s.peers.wake)
	return nil
}

// writePeers sends what SetPeers leaves.
func (s *Session) writePeers() {
	for {
		select {
		case <-s.conn.Context().Done():
			return
		case <-s.peers.wake:
		}
		list := s.peers.next.Swap(nil)
		if list == nil || !s.own {
			continue
		}
		if err := s.control.send(*list); err != nil {
			s.fail(fmt.Errorf("tell the client of its peers: %w", err))
			return
		}
	}
}

// peersFrom takes what the gateway says of the peers.
func (s *Session) peersFrom(c peerList) error {
	if !s.client || !s.own {
		return nil
	}
	ps := c.prefixes()
	s.peers.now.Store(&ps)
	wake(s.peers.changed)
	return nil
}

// wake leaves a value in a channel of size 1, unless there is one.
func wake(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// codeLeft is the error code with which a gateway closes the connection of a
// client that it has forgotten as the client wished.
const codeLeft http3.ErrCode = 0x31767075

// Leave tells the gateway that this client will not come back, and waits until
// it has forgotten the client: its addresses and its block are then somebody
// else's. After an error the client may be known still.
func (s *Session) Leave(ctx context.Context) error {
	if !s.own {
		return errors.New("leave the gateway: it is no quicvpn gateway, it cannot be told")
	}
	stop := context.AfterFunc(ctx, func() { s.control.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := s.control.send(leave{}); err != nil && s.conn.Context().Err() == nil {
		return fmt.Errorf("leave the gateway: %w", errors.Join(context.Cause(ctx), err))
	}
	select {
	case <-s.conn.Context().Done():
	case <-ctx.Done():
		return fmt.Errorf("leave the gateway: %w", context.Cause(ctx))
	}
	app, ok := errors.AsType[*quic.ApplicationError](context.Cause(s.conn.Context()))
	if ok && app.Remote && app.ErrorCode == quic.ApplicationErrorCode(codeLeft) {
		return nil
	}
	return fmt.Errorf("leave the gateway: %w", s.ended())
}

// left has the server forget a client that leaves, and end its sessions.
func (s *Session) left() error {
	if s.client || !s.own || s.leave == nil {
		return nil
	}
	if err := s.leave(s.peer); err != nil {
		s.log.Error("a client could not leave", "key", s.peer, "error", err)
		return errors.New("the gateway could not forget the client, its log says why: try again")
	}
	return nil
}

// leave returns what forgets a client and ends its sessions; nil if the server
// does not hear of it.
func (s *Server) leave() func(Fingerprint) error {
	if s.cfg.Leave == nil {
		return nil
	}
	return func(client Fingerprint) error {
		if err := s.cfg.Leave(client); err != nil {
			return err
		}
		s.mu.Lock()
		all := slices.Collect(maps.Keys(s.sessions))
		s.mu.Unlock()
		for _, session := range all {
			if session.peer == client {
				session.end(codeLeft, errLeft, errLeft.Error())
			}
		}
		return nil
	}
}

// errLeft ends the session of a client that has left.
var errLeft = errors.New("the client has left for good")
