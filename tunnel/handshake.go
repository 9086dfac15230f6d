package tunnel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/tunnel/internal/congestion/install"
)

// fallbackDelay is how long a handshake waits for an answer before smaller
// packets are tried beside it.
const fallbackDelay = time.Second

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
	var failed *attempt          // of those that failed, the one that knows most
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
			// The attempts end with ctx, and know why nobody answered.
			for ; pending > 0; pending-- {
				a := <-results
				if a.err == nil {
					pending--
					return a, nil
				}
				failed = moreTelling(failed, a)
			}
			return nil, failed.err
		case a := <-results:
			pending--
			if a.err != nil {
				failed = moreTelling(failed, a)
			}
			tooBig := errors.Is(a.err, unix.EMSGSIZE) // for the first device on the way
			switch next := nextSize(size); {
			case a.err == nil && a.size < first:
				try(first)
				return d.larger(a, results, &pending), nil
			case a.err == nil:
				return a, nil
			case !tooBig && !isTimeout(a.err):
				return nil, a.err
			case pending > 0:
			case tooBig && next != 0:
				try(next)
			default:
				return nil, failed.err
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
	size int
	conn *quic.Conn
	err  error

	saved    Path            // what was known of the path
	steering *install.Handle // of its congestion control

	lost    error                   // why packets were lost, where the kernel said so
	release func()                  // closes the socket
	session atomic.Pointer[Session] // that came of it
}

// moreTelling returns the failed attempt whose error says more: routers and
// hosts limit how often they say why, so that not every attempt hears it.
func moreTelling(before, a *attempt) *attempt {
	if before != nil && before.lost != nil {
		return before
	}
	return a
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
			if s := a.session.Load(); s != nil {
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
	conf := quicConfig(size)
	conf.Tracer = d.Congestion.tracer()
	a.saved = d.memory().get(gateway.Addr().Unmap(), time.Now())
	conf.InitialStreamReceiveWindow = a.saved.streamWindow()
	began := time.Now()
	a.conn, err = transport.Dial(ctx, net.UDPAddrFromAddrPort(gateway), tlsConf, conf)
	if err != nil {
		a.release()
		a.err = fmt.Errorf("connect to gateway %v: %w", gateway, handshakeError(err))
		if a.lost = sock.Stats().LastError; a.lost != nil && isTimeout(err) {
			a.err = fmt.Errorf("%w (packets were lost: %w)", a.err, a.lost)
		}
		return a
	}
	a.steering = d.Congestion.steer(a.conn, install.Options{RTT: time.Since(began), Saved: a.saved.saved(), MaxPTO: clientMaxPTO}, log)
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

func warnOfBuffers(sock *socket, log *slog.Logger) {
	if w := sock.BufferWarning(); w != "" {
		log.Warn(w)
	}
}
