package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel/internal/congestion/install"
)

const (
	// alpnOwn is spoken between two quicvpn peers, alpnForeign with every other
	// MASQUE peer. See the package's documentation in docs/wire.md.
	alpnOwn     = "quicvpn"
	alpnForeign = http3.NextProtoH3

	// settingOwn is an HTTP/3 setting that both quicvpn peers announce: the
	// version of the super-packet framing.
	settingOwn        = 0x31767073
	settingOwnVersion = 1

	// streamTypeSuper is the type of the unidirectional streams that carry
	// super-packets (RFC 9114, section 6.2).
	streamTypeSuper = 0x31767071

	keepAlive   = 5 * time.Second
	idleTimeout = 30 * time.Second

	// In an outage a client looks often whether it is over; a gateway, which may have
	// lost many clients at once, less often.
	clientMaxPTO  = 250 * time.Millisecond
	gatewayMaxPTO = time.Second

	// busyLook is how many packets within a look are more than answers to pings.
	busyLook = 16
)

// errPathShrank ends a session whose packets no longer fit the path: its next
// session starts with packets that do.
var errPathShrank = errors.New("the path's MTU shrank")

// A Session is one CONNECT-IP request (RFC 9484) seen from either of its ends.
type Session struct {
	conn    *quic.Conn
	control *control
	grant   Grant
	peer    Fingerprint
	own     bool // the peer is a quicvpn peer too
	client  bool // this end is the client

	*flows            // of the client's end; nil at the server
	udpFlows sync.Map // of *UDPFlow, by quarter stream ID, if we read the datagrams

	drops *packet.Drops
	log   *slog.Logger

	steering *install.Handle // of the congestion control; nil for quic-go's
	learner  learner

	prefix    []byte // of every datagram: quarter stream ID if we write it, context ID
	path      pathMTU
	datagrams *fairQueue
	outboxes  []*outbox // one a stream, by queue number
	incoming  chan *quic.ReceiveStream
	heard     liveness
	peers     peers
	leave     func(Fingerprint) error // of a server that hears of it

	endOnce sync.Once
	cause   atomic.Pointer[error] // why we ended it
	onClose func()                // frees what belongs to the session alone
	wg      sync.WaitGroup
}

// sessionConfig is what a session is made of.
type sessionConfig struct {
	conn     *quic.Conn
	control  *control
	grant    Grant
	queues   int
	maxMTU   int
	drops    *packet.Drops
	log      *slog.Logger
	incoming chan *quic.ReceiveStream
	onClose  func()
	requests *http3.ClientConn // of the client
	steering *install.Handle
	paths    *Paths
	saved    Path // what was known of the path
	leave    func(Fingerprint) error
}

func newSession(c sessionConfig) *Session {
	s := &Session{
		conn: c.conn, control: c.control, grant: c.grant,
		peer:     peerFingerprint(c.conn),
		own:      isOwn(c.conn),
		client:   c.requests != nil,
		steering: c.steering,
		drops:    c.drops,
		log:      c.log,
		incoming: c.incoming,
		onClose:  c.onClose,
		leave:    c.leave,
	}
	if s.client {
		s.flows = &flows{conn: c.conn, client: c.requests, authority: serverName, drops: c.drops}
		if s.own {
			s.flows.session = s
		}
	}
	s.learner = learner{paths: c.paths, saved: c.saved, peer: s.Remote().Addr(), at: time.Now()}
	s.peers.init(c.grant.Peers)
	if s.own {
		s.prefix = quicvarint.Append(nil, uint64(c.control.StreamID()/4))
	}
	s.prefix = append(s.prefix, 0) // context ID 0: an IP packet (RFC 9484, section 6)
	s.path = pathMTU{max: c.maxMTU, changed: make(chan struct{}, 1)}
	s.path.update(s.datagramSpace())
	s.heard.at.Store(time.Now().UnixNano())
	s.datagrams = newFairQueue()
	s.outboxes = make([]*outbox, min(max(c.queues, 1), maxStreams))
	for i := range s.outboxes {
		s.outboxes[i] = &outbox{wake: make(chan struct{}, 1)}
		s.wg.Go(func() { s.writeStream(i) })
	}
	s.wg.Go(s.writeDatagrams)
	s.wg.Go(s.writePeers)
	s.wg.Go(s.watch)
	return s
}

// Grant returns what the gateway granted.
func (s *Session) Grant() Grant { return s.grant }

// Peer returns the fingerprint of the key at the other end.
func (s *Session) Peer() Fingerprint { return s.peer }

// Remote returns the address of the other end.
func (s *Session) Remote() netip.AddrPort { return addrPort(s.conn.RemoteAddr()) }

// MTU returns the largest packet that the path now carries in one datagram.
func (s *Session) MTU() int { return int(s.path.mtu.Load()) }

// MTUChanged receives a value after MTU has changed.
func (s *Session) MTUChanged() <-chan struct{} { return s.path.changed }

// LastReceived returns when the peer was last heard of, and whether it owes an
// answer to something that was sent since.
func (s *Session) LastReceived() (at time.Time, waiting bool) {
	s.heard.received(s.conn.ConnectionStats().PacketsReceived)
	received := s.heard.at.Load()
	return time.Unix(0, received), s.heard.sent.Load() > received
}

// Context ends with the session; its cause says why.
func (s *Session) Context() context.Context { return s.conn.Context() }

// RTT returns the smoothed round trip time of the path.
func (s *Session) RTT() time.Duration { return s.conn.ConnectionStats().SmoothedRTT }

// MinRTT returns the shortest round trip time that was seen: the path's own, less
// what waits at its ends.
func (s *Session) MinRTT() time.Duration { return s.conn.ConnectionStats().MinRTT }

// Close ends the session, tells the peer the reason and waits for the session's
// goroutines.
func (s *Session) Close(reason string) error {
	err := s.end(http3.ErrCodeNoError, nil, reason)
	s.wg.Wait()
	return err
}

// fail ends the session for a reason that the owner and the peer are told. It
// does not wait, so that the session's own goroutines may call it.
func (s *Session) fail(cause error) { s.end(http3.ErrCodeNoError, cause, cause.Error()) }

func (s *Session) end(code http3.ErrCode, cause error, reason string) error {
	var err error
	s.endOnce.Do(func() {
		s.cause.Store(&cause)
		err = s.conn.CloseWithError(quic.ApplicationErrorCode(code), reason)
		if s.onClose != nil {
			s.onClose()
		}
	})
	return err
}

// ended returns why the session is over: nil if somebody called Close.
func (s *Session) ended() error {
	err := context.Cause(s.conn.Context())
	if app, ok := errors.AsType[*quic.ApplicationError](err); ok {
		if !app.Remote {
			if cause := s.cause.Load(); cause != nil {
				return *cause
			}
			return nil
		}
		if app.ErrorMessage != "" {
			return fmt.Errorf("the other end closed the session: %s", printable(app.ErrorMessage))
		}
		return errors.New("the other end closed the session")
	}
	if _, ok := errors.AsType[*quic.StatelessResetError](err); ok {
		return errors.New("the other end no longer knows the session (it has restarted)")
	}
	return err
}

// watch keeps the session's view of the path current: its MTU, when the peer
// was last heard of, whether large packets still arrive.
func (s *Session) watch() {
	tick := time.Second // a gateway has a thousand sessions
	if s.client {
		tick = 250 * time.Millisecond
	}
	t := time.NewTicker(tick)
	defer t.Stop()
	var received, came uint64 // packets; in all, and since the last look
	var stall stallDetector
	lastPing := time.Now()
	for {
		select {
		case <-s.conn.Context().Done():
			s.learner.look(s, s.conn.ConnectionStats(), time.Now())
			return
		case now := <-t.C:
			s.path.update(s.datagramSpace())
			if s.steering != nil && s.steering.Err() != nil {
				stock.warn(s.log, s.steering.Err())
			}
			stats := s.conn.ConnectionStats()
			s.learner.look(s, stats, now)
			before := came
			came = stats.PacketsReceived - received
			received = stats.PacketsReceived
			s.heard.received(received)
			if stall.stalled(now, s.writing(), s.moved(stats), received) {
				s.log.Info("the path no longer carries large packets; starting again with smaller ones", "remote", s.Remote())
				s.fail(errPathShrank)
				return
			}
			// A gateway that owes an answer is asked: QUIC's probes, which follow, want
			// something that is on the way. So is one that went quiet in the middle of
			// something.
			_, owed := s.LastReceived()
			if s.client && (came == 0 && (owed || before >= busyLook) || now.Sub(lastPing) >= keepAlive) {
				lastPing = now
				s.heard.sentNow()
				if err := s.control.ping(s.datagramSpace()); err != nil {
					return
				}
			}
		}
	}
}

// writing reports whether a stream waits for the path.
func (s *Session) writing() bool {
	for _, o := range s.outboxes {
		if o.writing.Load() {
			return true
		}
	}
	return false
}

// A stallDetector finds paths that swallow large packets and carry small ones:
// streams wait and all but nothing moves, while the peer is heard of.
type stallDetector struct {
	since    time.Time
	moved    uint64 // bytes, at since
	received uint64 // packets, at since
}

const (
	stallTime  = 4 * time.Second
	stallBytes = 16 << 10
)

func (d *stallDetector) stalled(now time.Time, writing bool, moved, received uint64) bool {
	if !writing || d.since.IsZero() || moved-d.moved > stallBytes {
		*d = stallDetector{now, moved, received}
		return false
	}
	return now.Sub(d.since) >= stallTime && received > d.received
}

// moved counts the bytes that the other end has acknowledged, or, where that is not
// known, those that were sent.
func (s *Session) moved(stats quic.ConnectionStats) uint64 {
	if s.steering == nil || s.steering.Err() != nil {
		return stats.BytesSent
	}
	return s.steering.Delivered()
}

// datagramSpace returns the largest packet that now fits one HTTP Datagram.
func (s *Session) datagramSpace() int {
	// A payload that can never be sent is refused with the size that can be.
	return largestDatagram(s.conn) - s.datagramOverhead()
}

// largestDatagram returns the payload that a QUIC datagram now carries.
func largestDatagram(conn *quic.Conn) int {
	if tooLarge, ok := errors.AsType[*quic.DatagramTooLargeError](conn.SendDatagram(oversized[:])); ok {
		return int(tooLarge.MaxDatagramPayloadSize)
	}
	return 0
}

// minDatagram is what every IPv4 host takes (RFC 791, section 3.1), and a peer's
// datagrams must hold.
const minDatagram = 576 + 16

// oversized is larger than any QUIC packet and never sent.
var oversized [1 << 16]byte

func (s *Session) datagramOverhead() int {
	if s.own {
		return len(s.prefix)
	}
	return quicvarint.Len(uint64(s.control.StreamID()/4)) + len(s.prefix)
}

// onTooBig hears from the socket that the path carries IP packets of at most
// mtu bytes, and ends the session if its packets are larger.
func (s *Session) onTooBig(mtu int) {
	fits := packetSize(s.Remote().Addr(), mtu)
	if fits < minPacketSize { // not true of a path for QUIC (RFC 9000, section 14.2.1)
		return
	}
	if fits < s.datagramSpace()+s.datagramOverhead()+quicOverhead {
		s.log.Info("the path's MTU shrank; starting again with smaller packets", "mtu", mtu)
		s.fail(fmt.Errorf("%w to %d", errPathShrank, mtu))
	}
}

// liveness holds when the peer was last heard of and when it was last sent
// something that it must answer, in Unix nanoseconds.
type liveness struct {
	at, sent atomic.Int64
	packets  atomic.Uint64 // until at
}

// received takes in how many packets have come in all.
func (l *liveness) received(packets uint64) {
	if old := l.packets.Load(); packets > old && l.packets.CompareAndSwap(old, packets) {
		l.at.Store(time.Now().UnixNano())
	}
}

func (l *liveness) sentNow() {
	// Only the first packet after the last sign of life counts: the peer owes
	// an answer since then.
	if l.sent.Load() <= l.at.Load() {
		l.sent.Store(time.Now().UnixNano())
	}
}

func isOwn(conn *quic.Conn) bool {
	return conn.ConnectionState().TLS.NegotiatedProtocol == alpnOwn
}

// peerFingerprint returns the fingerprint of the key that the peer proved to
// hold, or zero if it showed none.
func peerFingerprint(conn *quic.Conn) Fingerprint {
	certs := conn.ConnectionState().TLS.PeerCertificates
	if len(certs) == 0 {
		return Fingerprint{}
	}
	if pub, ok := certs[0].PublicKey.(ed25519.PublicKey); ok {
		return KeyFingerprint(pub)
	}
	return certFingerprint(certs[0])
}

func addrPort(a net.Addr) netip.AddrPort {
	if u, ok := a.(*net.UDPAddr); ok {
		ap := u.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return netip.AddrPort{}
}
