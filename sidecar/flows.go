package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A TCPOpen says when a connection through the gateway is open for the app that
// asked for it.
type TCPOpen int

const (
	// TCPOpenAuto is early for a host and port to which the gateway has connected
	// within the last minutes, and strict for others.
	TCPOpenAuto TCPOpen = iota
	// TCPOpenEarly is at once: the app's first bytes go with the request, which saves
	// a round trip. Where the gateway then cannot connect, the app sees a reset.
	TCPOpenEarly
	// TCPOpenStrict is when the gateway has connected, so that the app hears of a port
	// that is closed and of a host that is away as such.
	TCPOpenStrict
)

func (o TCPOpen) String() string {
	switch o {
	case TCPOpenAuto:
		return "auto"
	case TCPOpenEarly:
		return "early"
	case TCPOpenStrict:
		return "strict"
	}
	return "TCPOpen(" + strconv.Itoa(int(o)) + ")"
}

// sessionWait is how long a flow waits for a session.
const sessionWait = 10 * time.Second

// Dial connects to address, "host:port", through the gateway, which resolves names;
// the network is "tcp". LinkConfig.TCPOpen says when it returns. It waits for a
// session if there is none.
func (l *Link) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return l.dialer.Dial(ctx, network, address)
}

// An opener opens flows: a Link, or another proxy.
type opener interface {
	DialTCP(ctx context.Context, address string) (*tunnel.Flow, error)
	OpenTCP(ctx context.Context, address string) (*tunnel.Flow, error)
	DialUDP(ctx context.Context, address string) (*tunnel.UDPFlow, error)
}

// A flowDialer opens connections through an opener, each as its mode says.
type flowDialer struct {
	by       opener
	mode     TCPOpen
	answered reached
}

func (d *flowDialer) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if network != "tcp" {
		return nil, net.UnknownNetworkError(network)
	}
	early := d.mode == TCPOpenEarly || d.mode == TCPOpenAuto && d.answered.lately(address)
	if !early {
		f, err := d.by.DialTCP(ctx, address)
		d.answered.tell(address, err)
		if err != nil {
			return nil, err
		}
		return f, nil
	}
	f, err := d.by.OpenTCP(ctx, address)
	if err != nil {
		return nil, err
	}
	f.Answered = func(err error) { d.answered.tell(address, err) }
	return f, nil
}

// DialTCP is tunnel.Session.DialTCP on the session in use. It waits for one if there
// is none.
func (l *Link) DialTCP(ctx context.Context, address string) (*tunnel.Flow, error) {
	return open(ctx, l, func(s session) (*tunnel.Flow, error) { return s.DialTCP(ctx, address) })
}

// OpenTCP is tunnel.Session.OpenTCP on the session in use. It waits for one if there
// is none.
func (l *Link) OpenTCP(ctx context.Context, address string) (*tunnel.Flow, error) {
	return open(ctx, l, func(s session) (*tunnel.Flow, error) { return s.OpenTCP(ctx, address) })
}

// DialUDP is tunnel.Session.DialUDP on the session in use. It waits for one if there
// is none.
func (l *Link) DialUDP(ctx context.Context, address string) (*tunnel.UDPFlow, error) {
	return open(ctx, l, func(s session) (*tunnel.UDPFlow, error) { return s.DialUDP(ctx, address) })
}

// open opens a flow on the session in use, and on the next one where that has just
// ended.
func open[F any](ctx context.Context, l *Link, dial func(session) (F, error)) (f F, err error) {
	waiting, cancel := context.WithTimeout(ctx, sessionWait)
	defer cancel()
	for {
		s, err := l.await(waiting)
		if err != nil {
			return f, err
		}
		f, err := dial(s)
		if err == nil || !errors.Is(err, syscall.ENETDOWN) {
			return f, err
		}
		if sleep(waiting, 10*time.Millisecond); waiting.Err() != nil {
			return f, err
		}
	}
}

// await returns the session in use, or the next one.
func (l *Link) await(ctx context.Context) (session, error) {
	for {
		l.mu.Lock()
		up := l.up
		l.mu.Unlock()
		if s := l.session(); s != nil {
			return s, nil
		}
		select {
		case <-up:
		case <-ctx.Done():
			if why := l.Status().Err; why != nil {
				// Not to be taken for the destination's fault: the gateway may have refused.
				return nil, fmt.Errorf("%w: there is no session with the gateway: %v", syscall.ENETDOWN, why)
			}
			return nil, fmt.Errorf("%w: there is no session with the gateway", syscall.ENETDOWN)
		}
	}
}

// reached are addresses to which the gateway has connected lately. The zero value
// has none.
type reached struct {
	mu   sync.Mutex
	last map[string]time.Time
}

const (
	answerLasts = 5 * time.Minute
	maxAnswered = 4096
)

func (a *reached) lately(address string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.last[address]
	return ok && time.Since(at) < answerLasts
}

// tell keeps how a dial ended.
func (a *reached) tell(address string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		delete(a.last, address)
		return
	}
	if a.last == nil || len(a.last) >= maxAnswered { // a hint may be forgotten
		a.last = make(map[string]time.Time)
	}
	a.last[address] = time.Now()
}
