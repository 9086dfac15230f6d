package tunnel

import (
	"context"
	"net/netip"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Session is one CONNECT-IP request (RFC 9484) seen from either of its ends.
type Session struct{}

// Grant returns what the gateway granted.
func (s *Session) Grant() Grant { return Grant{} }

// Peer returns the fingerprint of the key at the other end.
func (s *Session) Peer() Fingerprint { return Fingerprint{} }

// Remote returns the address of the other end.
func (s *Session) Remote() netip.AddrPort { return netip.AddrPort{} }

// MTU returns the largest packet that the path now carries in one datagram.
func (s *Session) MTU() int { return 0 }

// MTUChanged receives a value after MTU has changed.
func (s *Session) MTUChanged() <-chan struct{} { return nil }

// Send takes packets for the peer and never blocks: what cannot be queued is
// dropped and counted. ICMP errors for packets that do not fit go to errs. It
// may write to the packets and does not keep them.
func (s *Session) Send(queue int, pkts []packet.Packet, errs Sink) {}

// Receive hands what the peer sends to sink until the session ends, and returns
// why it ended: nil after Close.
func (s *Session) Receive(sink Sink) error { return nil }

// LastReceived returns when the peer was last heard of, and whether anything was
// sent to it since.
func (s *Session) LastReceived() (at time.Time, waiting bool) { return time.Time{}, false }

// Context ends with the session; its cause says why.
func (s *Session) Context() context.Context { return context.Background() }

// Close ends the session and tells the peer the reason.
func (s *Session) Close(reason string) error { return nil }
