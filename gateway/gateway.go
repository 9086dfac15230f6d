package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A Config says how a gateway runs.
type Config struct {
	// StateDir is what Init made. Required.
	StateDir string
	// Listen is the UDP address; zero means all addresses, IPv4 and IPv6, and the
	// port that Init was given.
	Listen netip.AddrPort
	// Egress says how clients' packets leave. Without the kernel, Interface means
	// nothing.
	Egress Egress
	// Interface is the name of the TUN device; empty means "quicvpn-gw".
	Interface string
	// Queues is the number of queues of the TUN device, and of streams of each
	// session; zero means GOMAXPROCS, and at most 8.
	Queues int
	// MTU caps the tunnels' MTU, from 1280 to 1500; zero leaves it to each
	// path.
	MTU int
	// Congestion decides how fast sessions send; empty means tunnel.BBR.
	Congestion tunnel.Congestion
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// NameServers resolve names for clients whose own name servers the gateway
	// refuses; none means those of /etc/resolv.conf, as it is at each time.
	NameServers []netip.AddrPort
	// DisableDNS refuses the queries of such clients as well.
	DisableDNS bool
	// Log is where the gateway speaks; nil discards.
	Log *slog.Logger
}

const (
	defaultInterface = "quicvpn-gw"
	// minMTU is what every link carries for IPv6 (RFC 8200, section 5).
	minMTU = 1280
	// maxMTU is also the MTU of the TUN device where none is given: sessions
	// know better what they carry, and say so.
	maxMTU = 1500

	// reportInterval is how often sessions and drops are logged, if they have
	// changed.
	reportInterval = time.Minute
	batchSize      = 128
)

// fill replaces zero values by what they mean, and says what is wrong with the
// others.
func (c *Config) fill() error {
	if c.StateDir == "" {
		return errors.New("no state directory: say which with --state-dir")
	}
	if c.Listen != (netip.AddrPort{}) && !c.Listen.Addr().IsValid() {
		return fmt.Errorf("listen address %s: not an IP address", c.Listen)
	}
	if c.Interface == "" {
		c.Interface = defaultInterface
	}
	if !tun.PlainName(c.Interface) {
		return fmt.Errorf("interface name %q: take 1 to %d letters, digits, dots or dashes", c.Interface, unix.IFNAMSIZ-1)
	}
	if c.Queues < 0 || c.Queues > tun.MaxQueues {
		return fmt.Errorf("%d queues: take 1 to %d, or 0 for as many as there are CPUs, up to %d", c.Queues, tun.MaxQueues, tun.MostDefaultQueues)
	}
	if c.Queues == 0 {
		c.Queues = tun.DefaultQueues()
	}
	if c.MTU != 0 && (c.MTU < minMTU || c.MTU > maxMTU) {
		return fmt.Errorf("MTU %d: take %d to %d, or 0 to leave it to the path", c.MTU, minMTU, maxMTU)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// A Gateway is the server role on one host.
type Gateway struct {
	cfg    Config
	state  *State
	server *tunnel.Server
	egress outside
	router *router
	names  *names // nil if there are none
	flows  *flows
	drops  packet.Drops
	close  func() error
}

// New takes everything that a gateway needs, in the network namespace of the
// calling thread: the state directory, the UDP port, the TUN device, firewall
// rules and forwarding. After an error it has let go of all of them. What New
// took, Run gives back; without a Run, Close does.
func New(cfg Config) (*Gateway, error) {
	g, err := newGateway(cfg)
	if err != nil {
		return nil, fmt.Errorf("start gateway: %w", err)
	}
	return g, nil
}

func newGateway(cfg Config) (_ *Gateway, err error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	g := &Gateway{cfg: cfg}
	g.close = sync.OnceValue(g.release)
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
		}
	}()
	if g.state, err = OpenState(cfg.StateDir); err != nil {
		return nil, err
	}
	g.state.Log = cfg.Log
	if cfg.Listen == (netip.AddrPort{}) {
		cfg.Listen = netip.AddrPortFrom(netip.IPv6Unspecified(), g.state.port())
	}
	g.server, err = tunnel.Listen(tunnel.ServerConfig{
		Listen: cfg.Listen, Key: g.state.Key(), Authorize: g.authorize, Serve: g.serve, Leave: g.leave,
		Queues: cfg.Queues, MTU: cfg.MTU, Congestion: cfg.Congestion, DisableOffload: cfg.DisableOffload,
		DialTCP: g.dialTCP, DialUDP: g.dialUDP,
		Drops: &g.drops, Log: cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	pool4, pool6 := g.state.Pools()
	mtu := cfg.MTU
	if mtu == 0 {
		mtu = maxMTU
	}
	g.egress, err = openOutside(cfg.Egress, egressConfig{
		iface: cfg.Interface, stateDir: cfg.StateDir, queues: cfg.Queues, mtu: mtu,
		pool4: pool4, pool6: pool6, drops: &g.drops, log: cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	g.router = newRouter(routerConfig{
		pool4: pool4, pool6: pool6, exits: g.egress.exits(), exit6: g.egress.leaves6(),
		isHost: g.egress.isHost, admitted: g.state.Admitted, drops: &g.drops,
	})
	if !cfg.DisableDNS {
		g.names, err = openNames(namesConfig{servers: cfg.NameServers, dial: g.egress.netNS().dial, router: g.router, log: cfg.Log})
		if err != nil {
			return nil, err
		}
		g.router.cfg.names = g.names.take
	}
	g.flows = newFlows(g.router, g.egress.netNS(), g.names, cfg.Log)
	return g, nil
}

// dialTCP and dialUDP open what clients' flows lead to; clients come after New.
func (g *Gateway) dialTCP(ctx context.Context, s *tunnel.Session, address string) (net.Conn, error) {
	return g.flows.dialTCP(ctx, s, address)
}

func (g *Gateway) dialUDP(ctx context.Context, s *tunnel.Session, address string) (net.Conn, error) {
	return g.flows.dialUDP(ctx, s, address)
}

// Addr returns the UDP address that the gateway is bound to.
func (g *Gateway) Addr() netip.AddrPort { return g.server.Addr() }

// Close gives back what New took, if Run has not.
func (g *Gateway) Close() error { return g.close() }

func (g *Gateway) release() error {
	var errs []error
	if g.names != nil {
		errs = append(errs, g.names.close())
	}
	if g.egress != nil {
		errs = append(errs, g.egress.close())
	}
	if g.server != nil {
		errs = append(errs, g.server.Close())
	}
	if g.state != nil {
		errs = append(errs, g.state.Close())
	}
	return errors.Join(errs...)
}

// Run serves clients until ctx ends, and leaves the host as it was before New.
// It returns nil if ctx ended it.
func (g *Gateway) Run(ctx context.Context) error {
	g.cfg.Log.Info("gateway is up", "listen", g.Addr(), "egress", g.egress.String(), "pool4", g.router.cfg.pool4, "pool6", g.router.cfg.pool6, "ipv6", g.egress.leaves6())
	group, ctx := errgroup.WithContext(ctx)
	g.egress.start(ctx, group, g.router) // before clients
	group.Go(func() error { return g.server.Run(ctx) })
	group.Go(func() error { return g.state.Watch(ctx, g.router.detachRevoked) })
	group.Go(func() error { return g.report(ctx) })
	group.Go(func() error { return g.router.expire(ctx) })
	err := group.Wait()
	if err := errors.Join(err, g.close()); err != nil {
		return fmt.Errorf("run gateway: %w", err)
	}
	g.cfg.Log.Info("stopped", "drops", g.drops.Snapshot())
	return nil
}

// authorize answers a join.
func (g *Gateway) authorize(_ context.Context, join tunnel.Join) (tunnel.Grant, error) {
	c, err := g.state.Authorize(join, time.Now())
	if err != nil {
		return tunnel.Grant{}, err
	}
	g.egress.admit(c)
	granted := g.grant(c)
	granted.Names = join.Names
	granted.Announced, granted.AnnounceRefused, granted.Peers = g.router.claim(c, join.Announce)
	return granted, nil
}

// leave forgets a client that will not come back. Its session the tunnel ends.
func (g *Gateway) leave(key tunnel.Fingerprint) error {
	return g.state.Remove(key, func(ids []tunnel.Fingerprint) { g.router.forget(ids) })
}

func (g *Gateway) grant(c Client) tunnel.Grant {
	pools := []netip.Prefix{g.router.cfg.pool4, g.router.cfg.pool6}
	routes := []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	if len(c.Allow) > 0 {
		routes = append(append([]netip.Prefix{}, c.Allow...), pools...)
	}
	var block []netip.Prefix
	if c.Block4.IsValid() {
		block = []netip.Prefix{c.Block4, c.Block6}
	}
	return tunnel.Grant{
		Network:   c.Network,
		Block:     block,
		Addresses: []netip.Addr{c.Addr4, c.Addr6},
		Routes:    routes,
		Gateway:   []netip.Addr{g.router.own4, g.router.own6},
		Peers:     pools,
	}
}

// clientOf returns the client that has a key and a grant. Since the grant the key
// may have been revoked, and enrolled anew by another token.
func (g *Gateway) clientOf(key tunnel.Fingerprint, granted tunnel.Grant) (Client, bool) {
	c, ok := g.state.Lookup(key)
	now := g.grant(c)
	// Another join of the key may have got it a block that this one has not.
	if len(granted.Block) > 0 && !slices.Equal(now.Block, granted.Block) {
		return c, false
	}
	return c, ok && now.Network == granted.Network &&
		slices.Equal(now.Addresses, granted.Addresses) && slices.Equal(now.Routes, granted.Routes)
}

// serve owns a session until it ends.
func (g *Gateway) serve(_ context.Context, s *tunnel.Session) {
	c, ok := g.clientOf(s.Peer(), s.Grant())
	if !ok {
		s.Close("revoked")
		return
	}
	pol, err := newPolicy(c.Allow)
	if err != nil {
		g.cfg.Log.Error("a client's token is not usable", "client", c.Name, "key", c.ID, "error", err)
		s.Close("the token's allowed prefixes are not usable")
		return
	}
	p := g.router.attach(c, s, pol, s.Grant())
	if p == nil {
		s.Close("revoked")
		return
	}
	defer g.router.detach(p)
	log := g.cfg.Log.With("client", c.Name, "key", c.ID, "network", c.Network)
	here := []any{"addresses", p.addrs(), "from", s.Remote(), "congestion", s.Congestion()}
	if c.Block4.IsValid() {
		here = append(here, "block4", c.Block4, "block6", c.Block6)
	}
	if len(p.announced) > 0 {
		here = append(here, "announces", p.announced)
	}
	log.Info("client is here", here...)
	if why := s.Grant().AnnounceRefused; why != "" {
		log.Warn("not all prefixes that the client announces are taken", "reason", why)
	}
	reason := "closed by the gateway"
	if err := s.Receive(p); err != nil {
		reason = err.Error()
	}
	log.Info("client has left", "reason", reason)
}

// report logs sessions, drops and queries for names when there is something new:
// queries alone are nothing new, but those without an answer are.
func (g *Gateway) report(ctx context.Context) error {
	tick := time.NewTicker(reportInterval)
	defer tick.Stop()
	sessions, drops, names, flows := 0, map[string]uint64{}, map[string]uint64{}, map[string]uint64{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		s, d, n, f := g.router.sessions(), g.drops.Snapshot(), g.names.counters(), g.flows.counters()
		if s != sessions || !maps.Equal(d, drops) || n["failed"] != names["failed"] || n["refused"] != names["refused"] ||
			f["refused"] != flows["refused"] {
			g.cfg.Log.Info("traffic", "sessions", s, "drops", d, "names", n, "flows", f)
			sessions, drops, names, flows = s, d, n, f
		}
	}
}
