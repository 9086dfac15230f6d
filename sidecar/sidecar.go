// Package sidecar is the client role for one network namespace: the session to
// a gateway and its reconnection, the TUN device, routes and the kill switch.
//
// It owns everything that it puts into the namespace and takes it away again.
// It does not know what a session is made of, writes no sysctl, and needs no
// program beside itself.
package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/internal/identity"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tun"
	"github.com/quicvpn/quicvpn/tunnel"
)

const (
	// Mark is the SO_MARK of the sockets that reach the gateway, and the
	// conntrack mark of connections that came in beside the tunnel.
	Mark = 0x5156
	// Table is the routing table that leads into the tunnel. The rules that
	// choose it have the priorities Table-2 to Table.
	Table = Mark // 20822

	defaultInterface = "quicvpn0"

	// minIPv6MTU is what a link must carry to bear IPv6 (RFC 8200, section 5).
	minIPv6MTU = 1280
	maxMTU     = 1500
)

// A KillSwitch says for how long the rules stand that let nothing out beside
// the tunnel.
type KillSwitch int

const (
	// KillSwitchOn stands from before the TUN device is there until a graceful
	// stop. It stays when the sidecar is killed.
	KillSwitchOn KillSwitch = iota
	// KillSwitchKeep stays at a graceful stop too: for namespaces that others
	// share, and that end with a container.
	KillSwitchKeep
	// KillSwitchOff sets no rules, and removes those of an earlier run.
	KillSwitchOff
)

func (k KillSwitch) String() string {
	switch k {
	case KillSwitchOn:
		return "on"
	case KillSwitchKeep:
		return "keep"
	case KillSwitchOff:
		return "off"
	}
	return "KillSwitch(" + strconv.Itoa(int(k)) + ")"
}

// Config is what a sidecar needs to know.
type Config struct {
	// Token says where the gateway is and how to recognise it. Required.
	Token token.Token
	// StateDir holds the client's key, which is made at the first start. Required.
	StateDir string
	// Interface is the name of the TUN device; empty means quicvpn0.
	Interface string
	// Queues of the TUN device; zero means one for each CPU, at most 8.
	Queues int
	// MTU caps the TUN device's, 1280 to 1500; zero leaves it to the path.
	MTU int
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// KillSwitch is on by default.
	KillSwitch KillSwitch
	// Log is where the sidecar speaks; nil discards.
	Log *slog.Logger
}

// A Sidecar carries the traffic of the network namespace that it runs in.
type Sidecar struct {
	cfg   Config
	host  string // of the gateway: a name or an IP address
	port  uint16
	drops packet.Drops

	// dial opens a session.
	dial func(ctx context.Context, gateway netip.AddrPort) (session, error)
}

// A session is what the sidecar uses of a *tunnel.Session.
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

// New checks the configuration and loads the client's key, or makes it. It
// touches nothing of the network.
func New(cfg Config) (*Sidecar, error) {
	s := &Sidecar{cfg: cfg}
	if err := s.configure(); err != nil {
		return nil, fmt.Errorf("configure sidecar: %w", err)
	}
	key, created, err := identity.LoadOrCreate(filepath.Join(cfg.StateDir, "client.key"))
	if err != nil {
		return nil, fmt.Errorf("configure sidecar: %w", err)
	}
	if created {
		s.cfg.Log.Info("made this client's key; keep the state directory, the key is the client's identity", "dir", cfg.StateDir)
	}
	dialer := &tunnel.Dialer{
		Key:    key,
		Pin:    cfg.Token.Pin,
		Secret: cfg.Token.SecretText(),
		Mark:   Mark,
		Queues: s.cfg.Queues,
		MTU:    cfg.MTU,
		Drops:  &s.drops,
		Log:    s.cfg.Log,

		DisableOffload: cfg.DisableOffload,
	}
	s.dial = func(ctx context.Context, gateway netip.AddrPort) (session, error) {
		if err := checkWay(ctx, gateway); err != nil {
			return nil, err
		}
		t, err := dialer.Dial(ctx, gateway)
		if err != nil {
			return nil, err
		}
		return t, nil
	}
	return s, nil
}

// configure validates the configuration and fills in what it leaves open.
func (s *Sidecar) configure() error {
	c := &s.cfg
	host, port, err := net.SplitHostPort(c.Token.Address)
	if err != nil {
		return refuse("Token", "no gateway address: give the join token that `quicvpn token create` printed on the gateway")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || host == "" {
		return refuse("Token", "the gateway's address %q is not host:port: make another token on the gateway", c.Token.Address)
	}
	s.host, s.port = host, uint16(n)
	if c.StateDir == "" {
		return refuse("StateDir", "empty: give a directory that outlives the process, the client's key is kept there")
	}
	if c.Interface == "" {
		c.Interface = defaultInterface
	}
	if !tun.PlainName(c.Interface) {
		return refuse("Interface", "%q is no name for a TUN device: use 1 to 15 letters and digits", c.Interface)
	}
	if c.Queues < 0 || c.Queues > tun.MaxQueues {
		return refuse("Queues", "%d is out of range: 1 to %d, or 0 for one a CPU", c.Queues, tun.MaxQueues)
	}
	if c.Queues == 0 {
		c.Queues = tun.DefaultQueues()
	}
	if c.MTU != 0 && (c.MTU < minIPv6MTU || c.MTU > maxMTU) {
		return refuse("MTU", "%d is out of range: %d to %d, or 0 to follow the path", c.MTU, minIPv6MTU, maxMTU)
	}
	if c.KillSwitch < KillSwitchOn || c.KillSwitch > KillSwitchOff {
		return refuse("KillSwitch", "%v: use KillSwitchOn, KillSwitchKeep or KillSwitchOff", c.KillSwitch)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// refuse is the error about a field of the configuration.
func refuse(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...))
}

// Run carries traffic until ctx ends, and then takes away what it put into the
// namespace and returns nil. The loss of a session, or of the way to the
// gateway, never ends it. It returns an error only where it could not set up
// the namespace, which is then as it was before.
//
//  1. the kill switch
//  2. the TUN device
//  3. the rules and routes that lead into it
//  4. sessions, one after the other
func (s *Sidecar) Run(ctx context.Context) (err error) {
	lock, err := lockNamespace()
	if err != nil {
		return err
	}
	defer lock.Close()
	n, err := newNetwork(s.cfg, &s.drops)
	if err != nil {
		return err
	}
	defer func() {
		if e := n.takeDown(err == nil); e != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", e))
		}
	}()
	if err := n.setUp(); err != nil {
		return err
	}
	n.report()

	c := &connector{
		host:   s.host,
		port:   s.port,
		dial:   s.dial,
		check:  n.check,
		lookup: (&resolver{allow: n.allowResolver}).lookup,
		allow:  n.allowGateways,
		adopt:  n.adopt,
		resize: n.resize,
		drop:   n.release,
		moved:  n.moved,
		log:    s.cfg.Log,
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.keep(ctx) })
	g.Go(func() error { return n.pump(ctx) })
	g.Go(func() error { c.run(ctx); return nil })
	err = g.Wait()
	s.cfg.Log.Info("stopped", "drops", s.drops.Snapshot())
	return err
}
