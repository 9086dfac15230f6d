package sidecar

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tun"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A LinkConfig says which gateway a Link keeps a session to, as whom, and who
// hears of it.
//
// Connected, Changed and Disconnected are called one at a time, by Run; Check
// may be called by several goroutines. None of them may wait for Run to return.
type LinkConfig struct {
	// Token says where the gateway is and how to recognise it. Required.
	Token token.Token
	// Key is the client's identity. Required.
	Key ed25519.PrivateKey
	// Queues is the number of streams for super-packets; zero means one for each
	// CPU, at most 8.
	Queues int
	// MTU caps the tunnel's, 1280 to 1500; zero leaves it to the path.
	MTU int
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// Block asks the gateway for a block of addresses, beside the client's own.
	Block bool
	// Announce are the prefixes that other members of the network shall reach
	// through this client.
	Announce []netip.Prefix
	// Drops counts what the sessions drop, and what comes while there is none; nil
	// counts nowhere.
	Drops *packet.Drops
	// Log is where the link speaks; nil discards.
	Log *slog.Logger

	// Check refuses a session whose grant cannot be used; nil takes any.
	Check func(tunnel.Grant) error
	// Connected is called when a session has taken over, before anything is sent
	// to it or received from it: what it receives goes to the sink. MTU and Peers
	// are already the session's. Required.
	Connected func(tunnel.Grant) tunnel.Sink
	// Disconnected is called when there is no session any more. A session that
	// another one replaces is not told of. Optional.
	Disconnected func()
	// Changed is called when MTU or Peers of the session in use have changed.
	// Optional.
	Changed func()
}

// A LinkStatus says how a Link is at the moment.
type LinkStatus struct {
	// Gateway is the address at the other end of the session; the zero AddrPort
	// while there is none.
	Gateway netip.AddrPort
	// Since is when the session began, or since when there is none.
	Since time.Time
	// Err says, in words for people, why there is no session, or that the one in
	// use has fallen silent. It is nil while all is well, and before the first
	// attempt has failed.
	Err error
}

// A Link keeps a session to a gateway: it opens one, watches it, and opens the
// next one when it ends or falls silent. It works in the network namespace of
// the process.
type Link struct {
	cfg  LinkConfig
	out  wayOut
	c    *connector
	left chan struct{} // closed when the membership was given up

	current atomic.Pointer[session] // nil while there is none

	mu       sync.Mutex // guards what follows
	gateways []netip.AddrPort
	adopted  time.Time // when the session in use was
	mtu      int
	peers    []netip.Prefix
	status   LinkStatus
}

// A session is what a link uses of a *tunnel.Session.
type session interface {
	Grant() tunnel.Grant
	Remote() netip.AddrPort
	RTT() time.Duration
	MTU() int
	MTUChanged() <-chan struct{}
	Send(queue int, pkts []packet.Packet, errs tunnel.Sink)
	Receive(sink tunnel.Sink) error
	LastReceived() (at time.Time, waiting bool)
	Close(reason string) error
}

// NewLink checks the configuration. It touches nothing of the network.
func NewLink(cfg LinkConfig) (*Link, error) {
	l, err := newLink(cfg, wayOut{
		hint: "see to the name servers in /etc/resolv.conf of this host, give the name an address in /etc/hosts, or make a token with the gateway's IP address",
	})
	if err != nil {
		return nil, fmt.Errorf("configure link: %w", err)
	}
	return l, nil
}

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
	l := &Link{cfg: cfg, out: out, left: make(chan struct{})}
	dial := out.dial
	if dial == nil {
		dial = l.dialer()
	}
	l.c = &connector{
		host: host, port: port, hint: out.hint,
		dial:   dial,
		lookup: (&resolver{out: out}).lookup,
		check:  l.check,
		allow:  l.allow,
		adopt:  l.adopt,
		resize: l.refresh,
		drop:   l.release,
		fail:   l.fail,
		moved:  out.moved,
		log:    cfg.Log,
	}
	return l, nil
}

// dialer returns the function that opens sessions.
func (l *Link) dialer() func(context.Context, netip.AddrPort) (session, error) {
	dialer := &tunnel.Dialer{
		Key:    l.cfg.Key,
		Pin:    l.cfg.Token.Pin,
		Secret: l.cfg.Token.SecretText(),
		Mark:   l.out.mark,
		Queues: l.cfg.Queues,
		MTU:    l.cfg.MTU,
		Drops:  l.cfg.Drops,
		Log:    l.cfg.Log,

		DisableOffload: l.cfg.DisableOffload,
	}
	return func(ctx context.Context, gateway netip.AddrPort) (session, error) {
		if err := l.out.check(ctx, gateway); err != nil {
			return nil, err
		}
		s, err := dialer.Dial(ctx, gateway)
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
	l.set(func() { l.status.Since = time.Now() })
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	if l.out.moved == nil {
		moved := make(chan struct{}, 1)
		l.c.moved = moved
		g.Go(func() error { return l.follow(ctx, moved) })
	}
	g.Go(func() error { l.c.run(ctx); return nil })
	g.Go(func() error {
		select {
		case <-l.left:
			cancel()
		case <-ctx.Done():
		}
		return nil
	})
	return g.Wait()
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

// Leave gives up the membership at the gateway, and with it the addresses: the
// key is not known there any more. It needs a session. Run then returns.
func (l *Link) Leave(ctx context.Context) error {
	return errors.New("leave the network: there is no session with the gateway")
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

// allow is told where gateways will be dialled.
func (l *Link) allow(gateways []netip.AddrPort) {
	l.set(func() { l.gateways = gateways })
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
		l.mtu, l.peers = l.mtuLocked(s), grant.Peers
		l.status = LinkStatus{Gateway: s.Remote(), Since: l.adopted}
	})
	sink := l.cfg.Connected(grant)
	l.current.Store(&s)
	return sink
}

// refresh follows what may change while a session is in use.
func (l *Link) refresh(s session) {
	changed := false
	l.set(func() {
		mtu := l.mtuLocked(s)
		changed = mtu != l.mtu
		l.mtu = mtu
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
	l.current.Store(nil)
	l.set(func() {
		l.mtu, l.peers = 0, nil
		l.status.Gateway, l.status.Since = netip.AddrPort{}, time.Now()
	})
	if l.cfg.Disconnected != nil {
		l.cfg.Disconnected()
	}
}

// fail keeps what is wrong; nil where nothing is any more.
func (l *Link) fail(err error) { l.set(func() { l.status.Err = err }) }

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

// gatewayOf returns where a token says that the gateway is.
func gatewayOf(t token.Token) (host string, port uint16, err error) {
	host, text, err := net.SplitHostPort(t.Address)
	if err != nil {
		return "", 0, refuse("Token", "no gateway address: give the join token that `quicvpn token create` printed on the gateway")
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || host == "" {
		return "", 0, refuse("Token", "the gateway's address %q is not host:port: make another token on the gateway", t.Address)
	}
	return host, uint16(n), nil
}

// queuesOf returns a number of queues, filled in where it is left open.
func queuesOf(n int) (int, error) {
	if n < 0 || n > tun.MaxQueues {
		return 0, refuse("Queues", "%d is out of range: 1 to %d, or 0 for one a CPU", n, tun.MaxQueues)
	}
	if n == 0 {
		return tun.DefaultQueues(), nil
	}
	return n, nil
}

func checkMTU(mtu int) error {
	if mtu != 0 && (mtu < minIPv6MTU || mtu > maxMTU) {
		return refuse("MTU", "%d is out of range: %d to %d, or 0 to follow the path", mtu, minIPv6MTU, maxMTU)
	}
	return nil
}
