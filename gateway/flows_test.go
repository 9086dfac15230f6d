package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A flow leads where packets may go, and nowhere else.
func TestFlowsMayDial(t *testing.T) {
	l := newRouterLab(t)
	host := netip.MustParseAddr("203.0.113.77")
	l.isHost.Store(&host)
	named, _ := l.join(t, 4, "three", "10.91.0.5", "fd12::5", netip.MustParsePrefix("192.168.7.0/24"))
	for _, tt := range []struct {
		p    *port
		to   string
		want error
	}{
		{l.a, web4, nil},
		{l.a, web6, nil},
		{l.a, "10.0.0.1", syscall.EACCES},
		{l.a, "127.0.0.1", syscall.EACCES},
		{l.a, "169.254.169.254", syscall.EACCES},
		{l.a, "224.0.0.1", syscall.EACCES},
		{l.a, "0.0.0.0", syscall.EACCES},
		{l.a, "::1", syscall.EACCES},
		{l.a, "::ffff:203.0.113.10", syscall.EACCES},
		{l.a, "64:ff9b::a00:1", syscall.EACCES},
		{l.a, "2002:a00:1::1", syscall.EACCES},
		{l.a, "fe80::1", syscall.EACCES},
		{l.a, host.String(), syscall.EACCES},
		{l.a, gw4, syscall.EACCES},
		{l.a, b4, syscall.EACCES},
		{l.a, c4, syscall.EACCES},
		{l.a, free6, syscall.EACCES},
		{named, "192.168.7.9", nil},
		{named, "192.168.8.9", syscall.EACCES},
		{named, web4, syscall.EACCES},
	} {
		if err := tt.p.mayDial(netip.MustParseAddr(tt.to)); !errors.Is(err, tt.want) || tt.want == nil && err != nil {
			t.Errorf("%s to %s: %v, want %v", tt.p.client.Network, tt.to, err, tt.want)
		}
	}
	l.router.cfg.exit6 = false
	if err := l.a.mayDial(netip.MustParseAddr(web6)); !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("IPv6 where there is none: %v", err)
	}
}

// Names are resolved by the name servers of clients; one that means an address which
// is refused is refused.
func TestFlowsResolve(t *testing.T) {
	l := newNamesLab(t)
	ns, err := currentNetNS()
	if err != nil {
		t.Fatal(err)
	}
	f := newFlows(l.router, ns, l.names, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, tt := range []struct {
		to   string
		want func(error) bool
	}{
		{"nowhere.test:80", func(err error) bool {
			dns, ok := errors.AsType[*net.DNSError](err)
			return ok && dns.IsNotFound
		}},
		{"silent.test:80", func(err error) bool {
			_, ok := errors.AsType[*net.DNSError](err)
			return ok
		}},
		{"private.test:80", func(err error) bool { return errors.Is(err, syscall.EACCES) }},
		{"[fe80::1%lo]:80", func(err error) bool { return errors.Is(err, syscall.EACCES) }},
		{"[::ffff:127.0.0.1]:80", func(err error) bool { return errors.Is(err, syscall.EACCES) }},
	} {
		if conn, err := f.connect(ctx, l.a, "tcp", tt.to); err == nil || !tt.want(err) {
			t.Errorf("%s: %v, %v", tt.to, conn, err)
		}
	}
	f.names = nil
	if _, err := f.connect(ctx, l.a, "tcp", "a.test:80"); err == nil {
		t.Error("it resolves names without name servers")
	} else if e, ok := errors.AsType[*tunnel.DialError](err); !ok || e.Code != "dns_error" {
		t.Errorf("without name servers: %v", err)
	}
}

// The first address that answers is taken; the others are let go.
func TestFlowsRace(t *testing.T) {
	l := newRouterLab(t)
	ns, err := currentNetNS()
	if err != nil {
		t.Fatal(err)
	}
	f := newFlows(l.router, ns, nil, nil)
	good, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	closed, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	at := func(l net.Listener) netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() }
	conn, err := f.race(t.Context(), "tcp", []netip.AddrPort{at(closed), at(good)})
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if _, err := f.race(t.Context(), "tcp", []netip.AddrPort{at(closed), at(closed)}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, want a refusal", err)
	}
}
