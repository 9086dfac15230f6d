package sidecar

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A Link keeps a session to a gateway: it opens one, watches it, and opens the
// next one when it ends or falls silent. It works in the network namespace of
// the process.
type Link struct {
	cfg LinkConfig
	out wayOut
	c   *connector

	changed chan struct{}           // receives a value when the way to the gateway may have
	news    chan struct{}           // receives a value when Status has changed
	leaving atomic.Bool             // the membership is being given up: no session may open
	current atomic.Pointer[session] // nil while there is none
	dialer  flowDialer
	ended   chan struct{} // receives a value when a session has ended
	paths   tunnel.Paths

	// Of who saves the paths.
	stored  []byte
	unsaved repeated

	mu       sync.Mutex         // guards what follows
	up       chan struct{}      // closed while there is a session
	end      context.CancelFunc // of Run
	gateways []netip.AddrPort
	adopted  time.Time // when the session in use was
	mtu      int
	peers    []netip.Prefix
	status   LinkStatus
	failed   time.Time // when status.Err was
}

// A session is what a link uses of a *tunnel.Session.
type session interface {
	Grant() tunnel.Grant
	Remote() netip.AddrPort
	RTT() time.Duration
	MinRTT() time.Duration
	Congestion() tunnel.Congestion
	MTU() int
	MTUChanged() <-chan struct{}
	Peers() []netip.Prefix
	PeersChanged() <-chan struct{}
	Send(queue int, pkts []packet.Packet, errs tunnel.Sink)
	Receive(sink tunnel.Sink) error
	LastReceived() (at time.Time, waiting bool)
	DialTCP(ctx context.Context, address string) (*tunnel.Flow, error)
	OpenTCP(ctx context.Context, address string) (*tunnel.Flow, error)
	DialUDP(ctx context.Context, address string) (*tunnel.UDPFlow, error)
	Leave(ctx context.Context) error
	Close(reason string) error
}

// maxAnnounce is what a gateway takes.
const maxAnnounce = 16

// NewLink checks the configuration. It touches nothing of the network.
func NewLink(cfg LinkConfig) (*Link, error) {
	l, err := newLink(cfg, wayOut{hint: hostHint})
	if err != nil {
		return nil, fmt.Errorf("configure link: %w", err)
	}
	return l, nil
}

// hostHint is what to do where the gateway's name cannot be resolved and nothing is
// in the way.
const hostHint = "see to the name servers in /etc/resolv.conf of this host, give the name an address in /etc/hosts, or make a token with the gateway's IP address"

func newLink(cfg LinkConfig, out wayOut) (*Link, error) {
	host, port, err := gatewayOf(cfg.Token)
	if err != nil {
		return nil, err
	}
	if len(cfg.Key) != ed25519.PrivateKeySize {
		return nil, refuse("Key", "there is none, and the gateway knows clients by their keys")
	}
	if cfg.Queues, err = queuesOf(cfg.Queues); err != nil {
		return nil, err
	}
	if err := checkMTU(cfg.MTU); err != nil {
		return nil, err
	}
	if err := cfg.Congestion.Check(); err != nil {
		return nil, refuse("Congestion", "%v", err)
	}
	if len(cfg.Announce) > maxAnnounce {
		return nil, refuse("Announce", "%d prefixes: up to %d are possible", len(cfg.Announce), maxAnnounce)
	}
	for _, p := range cfg.Announce {
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() {
			return nil, refuse("Announce", "%v is no prefix of a network", p)
		}
	}
	if cfg.Connected == nil {
		return nil, refuse("Connected", "nobody takes what a session receives")
	}
	if cfg.Drops == nil {
		cfg.Drops = new(packet.Drops)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l := &Link{
		cfg: cfg, changed: make(chan struct{}, 1), news: make(chan struct{}, 1), up: make(chan struct{}),
		ended: make(chan struct{}, 1),
	}
	if out.dial == nil {
		out.dial = l.quicDialer(out)
	}
	l.out = out
	l.loadPaths()
	l.dialer = flowDialer{by: l, mode: cfg.TCPOpen}
	l.status.Since = time.Now()
	l.c = &connector{
		host: host, port: port, hint: out.hint,
		dial:    l.dial,
		lookup:  (&resolver{out: out}).lookup,
		check:   l.check,
		allow:   l.allow,
		adopt:   l.adopt,
		refresh: l.refresh,
		drop:    l.release,
		fail:    l.fail,
		moved:   out.moved,
		log:     cfg.Log,
	}
	return l, nil
}

// quicDialer returns the function that opens sessions by QUIC. Before it asks for
// one, an older session that speaks again is preferred.
func (l *Link) quicDialer(out wayOut) func(context.Context, netip.AddrPort) (session, error) {
	cfg := l.cfg
	d := &tunnel.Dialer{
		Key:      cfg.Key,
		Pin:      cfg.Token.Pin,
		Secret:   cfg.Token.SecretText(),
		Block:    cfg.Block,
		Announce: cfg.Announce,
		Names:    cfg.Names,
		Mark:     out.mark,
		Queues:   cfg.Queues,
		MTU:      cfg.MTU,
		Drops:    cfg.Drops,
		Log:      cfg.Log,

		Congestion:     cfg.Congestion,
		Paths:          &l.paths,
		DisableOffload: cfg.DisableOffload,
		Reached:        func(ctx context.Context) error { return l.c.giveWay(ctx) },
	}
	return func(ctx context.Context, gateway netip.AddrPort) (session, error) {
		if err := out.check(ctx, gateway); err != nil {
			return nil, err
		}
		s, err := d.Dial(ctx, gateway)
		if err != nil {
			return nil, err
		}
		return s, nil
	}
}

// Run keeps connecting, for as long as it takes, until ctx ends or Leave has
// succeeded, and then returns nil. It returns an error only where the kernel
// does not tell of changes of the network. It runs once.
func (l *Link) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l.set(func() { l.end = cancel })
	g, ctx := errgroup.WithContext(ctx)
	if l.out.moved == nil {
		moved := make(chan struct{}, 1)
		l.c.moved = moved
		g.Go(func() error { return l.follow(ctx, moved) })
	}
	g.Go(func() error { l.c.run(ctx); return nil })
	g.Go(func() error { l.keepPaths(ctx); return nil })
	err := g.Wait()
	l.savePaths()
	return err
}

// Send takes packets for the gateway and never blocks; ICMP errors for those
// that do not fit go to errs. While there is no session it drops them. It may
// write to the packets and does not keep them.
func (l *Link) Send(queue int, pkts []packet.Packet, errs tunnel.Sink) {
	if s := l.session(); s != nil {
		s.Send(queue, pkts, errs)
		return
	}
	l.cfg.Drops.Add(packet.DropNoSession, len(pkts))
}

// MTU returns the largest packet that the session in use carries, to which
// devices that lead to it should be set; zero while there is none.
func (l *Link) MTU() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mtu
}

// Peers returns the prefixes in which the other members of the network live, by
// the session in use; none while there is none.
func (l *Link) Peers() []netip.Prefix {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.peers)
}

// Status returns how the link is.
func (l *Link) Status() LinkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// Leave gives up the membership at the gateway, and with it the client's
// addresses, and ends Run. It needs a session. After an error the membership may
// be as it was, and Run goes on.
func (l *Link) Leave(ctx context.Context) error {
	s := l.session()
	if s == nil {
		return errors.New("leave the network: there is no session with the gateway: try again when there is one")
	}
	// Whoever joins again is a new member.
	l.leaving.Store(true)
	if err := s.Leave(ctx); err != nil {
		l.leaving.Store(false)
		return fmt.Errorf("leave the network: %w", err)
	}
	l.set(func() { l.end() })
	return nil
}

// Renew ends the session in use, so that the next one asks for everything anew.
func (l *Link) Renew(reason string) {
	if s := l.session(); s != nil {
		s.Close(reason)
	}
}

// session returns the session in use, or nil.
func (l *Link) session() session {
	if s := l.current.Load(); s != nil {
		return *s
	}
	return nil
}

func (l *Link) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

func (l *Link) check(s session) error {
	if l.cfg.Check == nil {
		return nil
	}
	return l.cfg.Check(s.Grant())
}

// dial opens a session, unless the client is about to leave.
func (l *Link) dial(ctx context.Context, gateway netip.AddrPort) (session, error) {
	if l.leaving.Load() {
		return nil, errLeaving
	}
	s, err := l.out.dial(ctx, gateway)
	if err == nil && l.leaving.Load() {
		s.Close(errLeaving.Error())
		return nil, errLeaving
	}
	return s, err
}

// errLeaving is why no session opens while another one tells the gateway.
var errLeaving = errors.New("the client is leaving the network")

// allow is told where gateways will be dialled.
func (l *Link) allow(gateways []netip.AddrPort) {
	l.set(func() { l.gateways = gateways })
	kick(l.changed)
	if l.out.gateways != nil {
		l.out.gateways(gateways)
	}
}

// adopt makes a session the one in use, and returns the sink for what it
// receives.
func (l *Link) adopt(s session) tunnel.Sink {
	grant := s.Grant()
	l.set(func() {
		l.adopted = time.Now()
		l.mtu, l.peers = l.mtuLocked(s), slices.Clone(s.Peers())
		l.status = LinkStatus{Gateway: s.Remote(), Since: l.adopted, Congestion: s.Congestion()}
	})
	sink := l.cfg.Connected(grant)
	l.set(func() {
		if l.current.Swap(&s) == nil {
			close(l.up)
		}
	})
	kick(l.news)
	return sink
}

// refresh follows what may change while a session is in use.
func (l *Link) refresh(s session) {
	changed := false
	l.set(func() {
		mtu, peers := l.mtuLocked(s), s.Peers()
		changed = mtu != l.mtu || !slices.Equal(peers, l.peers)
		l.mtu, l.peers = mtu, slices.Clone(peers)
	})
	if changed && l.cfg.Changed != nil {
		l.cfg.Changed()
	}
}

// release takes the place from a session that has ended.
func (l *Link) release(s session) {
	p := l.current.Load()
	if p == nil || *p != s {
		return
	}
	l.set(func() {
		l.current.Store(nil)
		l.up = make(chan struct{})
		l.mtu, l.peers = 0, nil
		l.status.Gateway, l.status.Since = netip.AddrPort{}, time.Now()
	})
	kick(l.news)
	kick(l.ended)
	if l.cfg.Disconnected != nil {
		l.cfg.Disconnected()
	}
}

// fail keeps what is wrong; nil where nothing is any more. That there is no answer
// does not outdo a reason that was heard a moment ago: hosts limit how often they
// say that nobody listens.
func (l *Link) fail(err error) {
	l.set(func() {
		if heavier(l.status.Err, err) && time.Since(l.failed) < telling {
			return
		}
		l.status.Err, l.failed = err, time.Now()
	})
	kick(l.news)
}

// telling is for how long a reason is kept that says more than the next one.
const telling = 15 * time.Second

// mtuLocked is the MTU of the devices that lead to a session. The least is what
// every IPv4 host must take (RFC 791, section 3.1). A session that has just begun
// may still find out that its path carries more, so that IPv6 is not given up at
// once: what does not fit is answered meanwhile.
func (l *Link) mtuLocked(s session) int {
	mtu := s.MTU()
	if time.Since(l.adopted) < probing {
		mtu = max(mtu, minIPv6MTU)
	}
	if l.cfg.MTU != 0 {
		mtu = min(mtu, l.cfg.MTU)
	}
	return max(mtu, 576)
}
