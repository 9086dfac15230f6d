package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Dialer opens sessions to one gateway.
type Dialer struct {
	// Key is the client's identity. Required.
	Key ed25519.PrivateKey
	// Pin is the fingerprint of the gateway's key. Required.
	Pin Fingerprint
	// Secret is the join token's secret. It enrols Key at the first join and is
	// not looked at afterwards.
	Secret string
	// Mark is the SO_MARK of the UDP socket; zero sets none.
	Mark uint32
	// Queues is the number of streams for super-packets; zero means one.
	Queues int
	// MTU caps the tunnel's MTU; zero leaves it to the path.
	MTU int
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// Drops counts what the sessions drop; nil counts nowhere.
	Drops *packet.Drops
	// Log is where the session speaks; nil discards.
	Log *slog.Logger
	// Now is the clock for certificates; nil is time.Now.
	Now func() time.Time

	warn sync.Once
	mu   sync.Mutex
	mtus map[netip.Addr]int // what paths were seen to carry, by gateway
}

// fallbackDelay is how long a handshake waits for an answer before smaller
// packets are tried beside it.
const fallbackDelay = time.Second

// Dial opens a session and returns it with its grant.
func (d *Dialer) Dial(ctx context.Context, gateway netip.AddrPort) (*Session, error) {
	a, err := d.handshake(ctx, gateway)
	if err != nil {
		return nil, err
	}
	s, err := d.connectIP(ctx, a.conn, a.release)
	if err != nil {
		a.close()
		return nil, err
	}
	a.session.set(s)
	return s, nil
}

// handshake connects. A handshake that gets no answer is tried beside with
// smaller packets, for paths that drop large ones silently; one that does get an
// answer with smaller packets is tried once more with large ones, because the
// gateway may have been away before.
func (d *Dialer) handshake(ctx context.Context, gateway netip.AddrPort) (*attempt, error) {
	attempts, cancel := context.WithCancel(ctx)
	results := make(chan *attempt)
	pending := 0
	defer func() {
		cancel()
		for range pending {
			(<-results).close()
		}
	}()
	smaller := make(chan int, 1) // the path's MTU, when the socket learns it
	size := 0
	try := func(next int) {
		size = next
		pending++
		go func() { results <- d.attempt(attempts, gateway, next, smaller) }()
	}
	first := d.startSize(gateway.Addr())
	try(first)
	fallback := time.NewTicker(fallbackDelay)
	defer fallback.Stop()
	for {
		select {
		case <-ctx.Done():
			a := <-results // which end with ctx, and know why nobody answered
			pending--
			return a, a.err
		case a := <-results:
			pending--
			tooBig := errors.Is(a.err, unix.EMSGSIZE) // for the first device on the way
			switch next := nextSize(size); {
			case a.err == nil && a.size < first:
				try(first)
				return d.larger(a, results, &pending), nil
			case a.err == nil || !tooBig && !isTimeout(a.err):
				return a, a.err
			case pending > 0:
			case tooBig && next != 0:
				try(next)
			default:
				return nil, a.err
			}
		case mtu := <-smaller:
			d.learn(gateway.Addr(), mtu)
			if fits := packetSize(gateway.Addr(), mtu); fits < size && fits >= minPacketSize {
				first = fits // larger ones are known not to pass
				try(fits)
			}
		case <-fallback.C:
			if next := nextSize(size); next != 0 {
				try(next)
			}
		}
	}
}

// larger waits for an attempt with larger packets than a's for as long as a path
// that carries them needs, and returns the better one.
func (d *Dialer) larger(a *attempt, results <-chan *attempt, pending *int) *attempt {
	enough := time.NewTimer(3*a.conn.ConnectionStats().SmoothedRTT + 50*time.Millisecond)
	defer enough.Stop()
	for *pending > 0 {
		select {
		case b := <-results:
			*pending--
			if b.err == nil && b.size > a.size {
				a.close()
				return b
			}
			b.close()
		case <-enough.C:
			return a
		}
	}
	return a
}

// startSize is the first packet size for a path: what it was seen to carry.
func (d *Dialer) startSize(gateway netip.Addr) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if mtu, ok := d.mtus[gateway]; ok {
		return min(max(packetSize(gateway, mtu), minPacketSize), firstPacketSize)
	}
	return firstPacketSize
}

func (d *Dialer) learn(gateway netip.Addr, mtu int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mtus == nil {
		d.mtus = make(map[netip.Addr]int)
	}
	d.mtus[gateway] = mtu
}

func nextSize(size int) int {
	for _, s := range fallbackSizes {
		if s < size {
			return s
		}
	}
	return 0
}

// isTimeout reports an attempt that nobody answered, which smaller packets or
// another address may cure.
func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// An attempt is a handshake with packets of one size on a socket of its own.
type attempt struct {
	size    int
	conn    *quic.Conn
	err     error
	release func() // closes the socket
	session liveSession
}

// close ends a connection that is not used.
func (a *attempt) close() {
	if a.conn != nil {
		a.conn.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "")
		a.release()
	}
}

func (d *Dialer) attempt(ctx context.Context, gateway netip.AddrPort, size int, smaller chan<- int) *attempt {
	a := &attempt{size: size}
	log := orDiscard(d.Log)
	defer func() { log.Debug("handshake", "gateway", gateway, "packet_size", size, "error", a.err) }()
	now := d.Now
	if now == nil {
		now = time.Now
	}
	tlsConf, err := clientTLS(d.Key, d.Pin, now)
	if err != nil {
		a.err = err
		return a
	}
	sock, err := listenUDP(socketConfig{
		Listen: netip.AddrPortFrom(unspecified(gateway.Addr()), 0),
		Mark:   d.Mark, DisableGRO: d.DisableOffload, DisableGSO: d.DisableOffload,
		OnTooBig: func(_ netip.AddrPort, mtu int) {
			if mtu == 0 {
				return
			}
			select {
			case smaller <- mtu:
			default:
			}
			if s := a.session.get(); s != nil {
				d.learn(gateway.Addr(), mtu)
				go s.onTooBig(mtu)
			}
		},
	})
	if err != nil {
		a.err = err
		return a
	}
	d.warn.Do(func() { warnOfBuffers(sock, log) })
	transport := &quic.Transport{Conn: sock}
	a.release = func() {
		transport.Close()
		sock.Close()
	}
	a.conn, err = transport.Dial(ctx, net.UDPAddrFromAddrPort(gateway), tlsConf, quicConfig(size))
	if err != nil {
		a.release()
		a.err = fmt.Errorf("connect to gateway %v: %w", gateway, handshakeError(err))
		if last := sock.Stats().LastError; last != nil && isTimeout(err) {
			a.err = fmt.Errorf("%w (packets were lost: %w)", a.err, last)
		}
	}
	return a
}

// handshakeError looks for the reason that the certificate check gave.
func handshakeError(err error) error {
	for _, known := range []error{ErrPin, ErrNotYetValid, ErrExpired} {
		if errors.Is(err, known) || strings.Contains(err.Error(), known.Error()) {
			return known
		}
	}
	return err
}

// connectIP asks for a tunnel (RFC 9484, section 4) and waits for the grant.
func (d *Dialer) connectIP(ctx context.Context, conn *quic.Conn, release func()) (*Session, error) {
	own := isOwn(conn)
	transport := &http3.Transport{EnableDatagrams: !own, MaxResponseHeaderBytes: maxHeaderBytes}
	if own {
		transport.AdditionalSettings = map[uint64]uint64{settingOwn: settingOwnVersion}
	}
	client := transport.NewRawClientConn(conn)
	incoming := make(chan *quic.ReceiveStream, 1)
	go acceptUniStreams(conn, own, client.HandleUnidirectionalStream, func(stream *quic.ReceiveStream) {
		select {
		case incoming <- stream:
		case <-conn.Context().Done():
		}
	})

	// Extended CONNECT waits for the peer's settings (RFC 9220, section 3).
	select {
	case <-client.ReceivedSettings():
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the gateway's settings: %w", context.Cause(ctx))
	case <-conn.Context().Done():
		return nil, fmt.Errorf("wait for the gateway's settings: %w", context.Cause(conn.Context()))
	}
	if largestDatagram(conn) < minDatagram {
		return nil, errors.New("the gateway takes no QUIC datagrams (RFC 9221) in which packets fit")
	}
	if v := client.Settings().Other[settingOwn]; own && v != settingOwnVersion {
		return nil, fmt.Errorf("the gateway speaks version %d of the quicvpn framing, this client version %d: install the same release on both", v, settingOwnVersion)
	}
	stream, err := client.OpenRequestStream(ctx)
	if err != nil {
		return nil, fmt.Errorf("open a request: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodConnect, "https://"+serverName+pathConnectIP, nil)
	if err != nil {
		return nil, err
	}
	request.Proto = protoConnectIP
	request.Header.Set(http3.CapsuleProtocolHeader, "?1")
	if d.Secret != "" {
		request.Header.Set("Authorization", "Bearer "+d.Secret)
	}
	// What follows reads from a stream, which knows no contexts.
	stop := context.AfterFunc(ctx, func() { stream.SetDeadline(time.Unix(1, 0)) })
	grant, err := requestGrant(stream, request, own)
	if !stop() || err != nil {
		if err == nil || ctx.Err() != nil {
			err = fmt.Errorf("ask for a tunnel: %w", context.Cause(ctx))
		}
		return nil, err
	}
	return newSession(sessionConfig{
		conn: conn, control: &control{requestStream: stream}, grant: grant, queues: d.Queues, maxMTU: d.MTU,
		drops: orNew(d.Drops), log: orDiscard(d.Log), incoming: incoming, onClose: release, client: true,
	}), nil
}

// requestGrant sends the request and reads the answer up to the first addresses and
// routes.
func requestGrant(stream *http3.RequestStream, request *http.Request, own bool) (Grant, error) {
	if err := stream.SendRequestHeader(request); err != nil {
		return Grant{}, fmt.Errorf("ask for a tunnel: %w", err)
	}
	response, err := stream.ReadResponse()
	if err != nil {
		return Grant{}, fmt.Errorf("ask for a tunnel: %w", err)
	}
	if response.StatusCode < 200 || response.StatusCode > 299 {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10))
		return Grant{}, &RefusedError{
			Status: response.StatusCode,
			Code:   printable(response.Header.Get(headerError)),
			Text:   printable(strings.TrimSpace(string(text))),
		}
	}
	grant, err := grantFromHeader(response.Header)
	if err != nil {
		return Grant{}, fmt.Errorf("the gateway's answer: %w", err)
	}
	if err := readGrant(stream, &grant); err != nil {
		return Grant{}, fmt.Errorf("wait for addresses and routes: %w", err)
	}
	return grant, nil
}

// acceptUniStreams sorts the streams that the peer opens: those for
// super-packets to super, the others to HTTP/3.
func acceptUniStreams(conn *quic.Conn, own bool, http3, super func(*quic.ReceiveStream)) {
	for {
		stream, err := conn.AcceptUniStream(conn.Context())
		if err != nil {
			return
		}
		go func() {
			if own && peekType(stream) == streamTypeSuper {
				super(stream)
			} else {
				http3(stream)
			}
		}()
	}
}

// liveSession is where a socket's callback finds the session that came of it.
type liveSession struct {
	mu sync.Mutex
	s  *Session
}

func (l *liveSession) get() *Session {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.s
}

func (l *liveSession) set(s *Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.s = s
}

func warnOfBuffers(sock *socket, log *slog.Logger) {
	if w := sock.BufferWarning(); w != "" {
		log.Warn(w)
	}
}

func unspecified(like netip.Addr) netip.Addr {
	if like.Unmap().Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func orNew(d *packet.Drops) *packet.Drops {
	if d == nil {
		return new(packet.Drops)
	}
	return d
}

func orDiscard(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}
