package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/socks5"
)

// checkProxies refuses proxies that anybody could use.
func checkProxies(c *Config) error {
	for _, p := range c.Proxies {
		if !p.IsValid() || p.Port() == 0 {
			return refuse("Proxies", "%v is no address to listen on", p)
		}
		if !p.Addr().Unmap().IsLoopback() && c.ProxyAuth == nil {
			return refuse("Proxies", "%v is not a loopback address, and everybody who reaches it could use the tunnel: set ProxyAuth", p)
		}
	}
	if c.DisableTUN && len(c.Proxies) == 0 {
		return refuse("Proxies", "without a TUN device they are the only way into the tunnel, and there are none")
	}
	if c.DisableTUN && c.ResolvConf {
		return refuse("ResolvConf", "without a TUN device the gateway cannot be asked for names: programs that use a proxy leave names to it")
	}
	return nil
}

// listenProxies opens the listeners before anything else is touched. Connections
// wait in them until there is a proxy.
func listenProxies(addrs []netip.AddrPort) (all []net.Listener, err error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false) // its sockets cannot be spliced
	for _, a := range addrs {
		address := a.String()
		if a.Addr() == netip.IPv6Unspecified() { // where there is no IPv6, all of IPv4
			address = fmt.Sprintf(":%d", a.Port())
		}
		l, err := config.Listen(context.Background(), "tcp", address)
		if err != nil {
			closeAll(all)
			return nil, fmt.Errorf("listen for clients of the proxy: %w%s", err, listenHint(err))
		}
		all = append(all, l)
	}
	return all, nil
}

func listenHint(err error) string {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return ": another program has the port; give --socks5 another one"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return ": there is no interface with this address"
	case errors.Is(err, syscall.EACCES):
		return ": ports below 1024 need root or the capability NET_BIND_SERVICE"
	}
	return ""
}

// closeAll closes what has not been closed by whom it was given to.
func closeAll(listeners []net.Listener) {
	for _, l := range listeners {
		l.Close()
	}
}

// Proxy returns a proxy for SOCKS5 and HTTP whose connections and datagrams the
// gateway passes on. It lets everybody pass.
func (l *Link) Proxy() *socks5.Server { return l.dialer.proxy(l.cfg.Log) }

func (d *flowDialer) proxy(log *slog.Logger) *socks5.Server {
	relays := &udpRelays{dial: func(ctx context.Context, address string) (udpConn, error) { return d.by.DialUDP(ctx, address) }}
	return &socks5.Server{
		Dial:      d.Dial,
		Associate: func(context.Context) (socks5.PacketRelay, error) { return relays.relay(), nil },
		Name:      "quicvpn",
		Log:       log,
	}
}

// serveProxies serves the proxies' clients until ctx ends, which resets them.
func (c *Config) serveProxies(ctx context.Context, by *flowDialer, listeners []net.Listener) error {
	if len(listeners) == 0 {
		return nil
	}
	proxy := by.proxy(c.Log)
	proxy.Authenticate = c.ProxyAuth
	g, ctx := errgroup.WithContext(ctx)
	for _, l := range listeners {
		c.Log.Info("a proxy listens, for SOCKS5 and HTTP", "address", l.Addr(), "credentials", c.ProxyAuth != nil)
		g.Go(func() error { return proxy.Serve(ctx, l) })
	}
	err := g.Wait()
	if drops := proxy.Drops(); len(drops) > 0 {
		c.Log.Info("the proxies have stopped", "drops", drops)
	}
	return err
}
