// Package sidecar is the client role for one network namespace: the session to
// a gateway and its reconnection, the TUN device, routes and the kill switch, and
// proxies for programs that prefer those.
//
// It owns everything that it puts into the namespace and takes it away again. A
// Link is the session alone, for those who bring the packets themselves.
// It does not know what a session is made of, writes no sysctl, and needs no
// program beside itself.
package sidecar

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strconv"

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
	// StateDir holds the client's key, which is made at the first start, what is
	// known of the paths to gateways, and while the sidecar runs a file that says how
	// it is, for CheckHealth. Required.
	StateDir string
	// Interface is the name of the TUN device; empty means quicvpn0.
	Interface string
	// Queues of the TUN device; zero means one for each CPU, at most 8.
	Queues int
	// MTU caps the TUN device's, 1280 to 1500; zero leaves it to the path.
	MTU int
	// Congestion decides how fast sessions send; empty means tunnel.BBR.
	Congestion tunnel.Congestion
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// KillSwitch is on by default.
	KillSwitch KillSwitch
	// DisableTUN leaves the namespace as it is, without a device, routes and kill
	// switch, which needs no privilege: what goes through Proxies goes through the
	// tunnel, and nothing else. Interface, Queues and KillSwitch mean nothing then.
	DisableTUN bool
	// Proxies are the TCP addresses at which programs find a proxy, SOCKS5 and HTTP.
	// Those that are not loopback addresses need ProxyAuth.
	Proxies []netip.AddrPort
	// ProxyAuth says whether a user may use the proxies, as socks5.Credentials does;
	// nil lets everybody.
	ProxyAuth func(user, password string) bool
	// TCP says how the namespace's TCP connections go to the gateway.
	TCP TCPMode
	// TCPOpen says when a connection that goes as a flow is open for a program, by a
	// proxy or by TCP.
	TCPOpen TCPOpen
	// ResolvConf has /etc/resolv.conf name the gateway for as long as the sidecar
	// runs.
	ResolvConf bool
	// Log is where the sidecar speaks; nil discards.
	Log *slog.Logger
}

// A Sidecar carries the traffic of the network namespace that it runs in.
type Sidecar struct {
	cfg   Config
	key   ed25519.PrivateKey
	drops packet.Drops

	// dial opens a session; nil means by QUIC.
	dial func(ctx context.Context, gateway netip.AddrPort) (session, error)
}

// New checks the configuration and loads the client's key, or makes it. It
// touches nothing of the network.
func New(cfg Config) (*Sidecar, error) {
	s := &Sidecar{cfg: cfg}
	if err := s.configure(); err != nil {
		return nil, fmt.Errorf("configure sidecar: %w", err)
	}
	key, created, err := identity.LoadOrCreate(filepath.Join(cfg.StateDir, "client.key"))
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w: give --state-dir a directory that this user may write", err)
	}
	if err != nil {
		return nil, fmt.Errorf("configure sidecar: %w", err)
	}
	if created {
		s.cfg.Log.Info("made this client's key; keep the state directory, the key is the client's identity", "dir", cfg.StateDir)
	}
	s.key = key
	return s, nil
}

// configure validates the configuration and fills in what it leaves open.
func (s *Sidecar) configure() error {
	c := &s.cfg
	if _, _, err := gatewayOf(c.Token); err != nil {
		return err
	}
	if c.StateDir == "" {
		return refuse("StateDir", "empty: give a directory that outlives the process, the client's key is kept there")
	}
	if c.Interface == "" {
		c.Interface = defaultInterface
	}
	if !tun.PlainName(c.Interface) {
		return refuse("Interface", "%q is no name for a TUN device: use 1 to 15 letters and digits", c.Interface)
	}
	var err error
	if c.Queues, err = queuesOf(c.Queues); err != nil {
		return err
	}
	if err := checkMTU(c.MTU); err != nil {
		return err
	}
	if err := c.Congestion.Check(); err != nil {
		return refuse("Congestion", "%v", err)
	}
	if c.KillSwitch < KillSwitchOn || c.KillSwitch > KillSwitchOff {
		return refuse("KillSwitch", "%v: use KillSwitchOn, KillSwitchKeep or KillSwitchOff", c.KillSwitch)
	}
	if err := checkProxies(c); err != nil {
		return err
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Run carries traffic until ctx ends, and then takes away what it put into the
// namespace and returns nil. The loss of a session, or of the way to the
// gateway, never ends it. It returns an error only where it could not set up
// the namespace, which is then as it was before, or where a proxy's listener fails.
//
//  1. the proxies' listeners
//  2. the kill switch
//  3. the TUN device
//  4. the rules and routes that lead into it
//  5. sessions, one after the other
func (s *Sidecar) Run(ctx context.Context) (err error) {
	lock, err := s.enter()
	if err != nil {
		return err
	}
	defer lock.Close()
	state, err := lockState(s.cfg.StateDir)
	if err != nil {
		return err
	}
	defer state.Close()
	listeners, err := listenProxies(s.cfg.Proxies)
	if err != nil {
		return err
	}
	defer closeAll(listeners)
	if s.cfg.DisableTUN {
		return s.runAlone(ctx, listeners)
	}
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

	link, err := s.link(n)
	if err != nil {
		return err
	}
	ends := NewEnder(link, n.WritePackets)
	defer ends.Close()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.keep(ctx) })
	g.Go(func() error { return n.pump(ctx, ends) })
	g.Go(func() error { return link.Run(ctx) })
	g.Go(func() error { return s.cfg.serveProxies(ctx, &link.dialer, listeners) })
	g.Go(func() error { s.keepStatus(ctx, link, n.status); return nil })
	err = g.Wait()
	s.cfg.Log.Info("stopped", "drops", s.drops.Snapshot())
	return err
}

// enter takes the namespace, and restores what an earlier run that was killed has
// left of resolv.conf. Without a TUN device there is nothing to take: others may run
// beside it, and one that does knows itself what it has changed.
func (s *Sidecar) enter() (lock io.Closer, err error) {
	lock, err = lockNamespace()
	if err != nil && s.cfg.DisableTUN {
		return io.NopCloser(nil), nil
	}
	if err != nil {
		return nil, err
	}
	err = newNamesFile(s.cfg.StateDir, s.cfg.Log).restore()
	if err != nil || s.cfg.DisableTUN {
		lock.Close()
	}
	return lock, err
}

// linkConfig is what every link of a sidecar has.
func (s *Sidecar) linkConfig() LinkConfig {
	return LinkConfig{
		Token:          s.cfg.Token,
		Key:            s.key,
		Queues:         s.cfg.Queues,
		MTU:            s.cfg.MTU,
		TCP:            s.cfg.TCP,
		TCPOpen:        s.cfg.TCPOpen,
		Drops:          &s.drops,
		Log:            s.cfg.Log,
		Congestion:     s.cfg.Congestion,
		PathFile:       filepath.Join(s.cfg.StateDir, "paths.json"),
		DisableOffload: s.cfg.DisableOffload,
	}
}

// link returns the link whose sessions carry the namespace's traffic.
func (s *Sidecar) link(n *network) (link *Link, err error) {
	cfg := s.linkConfig()
	cfg.Check = n.check
	cfg.Connected = func(g tunnel.Grant) tunnel.Sink { return n.adopt(g, link.MTU()) }
	cfg.Changed = func() { n.refresh(link.MTU(), link.Peers()) }
	link, err = newLink(cfg, wayOut{
		mark:       Mark,
		gateways:   n.allowGateways,
		nameServer: n.allowResolver,
		moved:      n.moved,
		kept:       n.keptNames(),
		dial:       s.dial,
		hint: "while there is no tunnel, only name servers that this namespace reaches by itself can answer; " +
			"give the name an address in /etc/hosts (Compose: extra_hosts), or make a token with the gateway's IP address",
	})
	return link, err
}
