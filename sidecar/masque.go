package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A Masque is a proxy for CONNECT (RFC 9114, section 4.4) and CONNECT-UDP (RFC 9298)
// over HTTP/3, of whatever make.
type Masque struct {
	Address        string // host:port
	User, Password string // of Proxy-Authorization, if there is a User
}

// ParseMasque reads https://[USER:PASSWORD@]HOST[:PORT]. Its error does not repeat
// what it was given.
func ParseMasque(s string) (m Masque, err error) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return m, errors.New("not the URL of a proxy: write it as https://proxy.example.com:443 or https://USER:PASSWORD@proxy.example.com")
	}
	port := u.Port()
	if port == "" {
		port = "443"
	}
	m.Address = net.JoinHostPort(u.Hostname(), port)
	m.User = u.User.Username()
	m.Password, _ = u.User.Password()
	return m, nil
}

// Run serves the proxies of a configuration, of which nothing else counts but
// TCPOpen, DisableOffload and Log, until ctx ends: what they are asked for goes to m
// in the place of a gateway.
func (m Masque) Run(ctx context.Context, cfg Config) error {
	cfg.DisableTUN = true
	if err := checkProxies(&cfg); err != nil {
		return fmt.Errorf("configure sidecar: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	listeners, err := listenProxies(cfg.Proxies)
	if err != nil {
		return err
	}
	defer closeAll(listeners)
	var drops packet.Drops
	by := &tunnel.Proxy{
		Address: m.Address, User: m.User, Password: m.Password,
		DisableOffload: cfg.DisableOffload, Drops: &drops, Log: cfg.Log,
	}
	defer by.Close()
	err = cfg.serveProxies(ctx, &flowDialer{by: by, mode: cfg.TCPOpen}, listeners)
	cfg.Log.Info("stopped", "drops", drops.Snapshot())
	return err
}
