package sidecar

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// A resolver finds the gateway's addresses, past the tunnel: a sidecar's sockets
// have our mark, so that neither a dead tunnel nor the kill switch is in the way.
//
// Docker's own name server, 127.0.0.11, asks others from this namespace without
// our mark, and gets no answer while there is no tunnel. Newer engines write
// into resolv.conf which ones it asks: those are then asked directly.
type resolver struct {
	out wayOut
	// conf is the path of resolv.conf; empty means /etc/resolv.conf.
	conf string
}

const resolvConf = "/etc/resolv.conf"

// nameServers returns the name servers of a resolv.conf.
func nameServers(conf []byte) (servers []netip.Addr) {
	for line := range strings.Lines(string(conf)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "nameserver" {
			if a, err := netip.ParseAddr(f[1]); err == nil {
				servers = append(servers, a)
			}
		}
	}
	return servers
}

// serversOnLink returns the name servers of a resolv.conf to which the kernel
// finds its way beside the tunnel.
func serversOnLink(conf []byte, links []uplink) []netip.Addr {
	return slices.DeleteFunc(nameServers(conf), func(a netip.Addr) bool {
		return a.Zone() == "" && !slices.ContainsFunc(links, func(u uplink) bool {
			return slices.ContainsFunc(u.subnets, func(p netip.Prefix) bool { return p.Contains(a) })
		})
	})
}

// patience is how long the name servers of resolv.conf have before those behind
// Docker's are asked too.
const patience = time.Second

// lookup returns the addresses of a host, by /etc/hosts and DNS.
func (r *resolver) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan resolution, 2)
	ask := func(dial func(ctx context.Context, network, server string) (net.Conn, error)) {
		res := net.Resolver{PreferGo: true, Dial: func(dctx context.Context, network, server string) (net.Conn, error) {
			conn, err := dial(dctx, network, server)
			if err == nil {
				// The resolver itself would wait for an answer that nobody wants.
				context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
			}
			return conn, err
		}}
		go func() {
			addrs, err := res.LookupNetIP(ctx, "ip", host)
			results <- resolution{addrs, err}
		}()
	}
	conf, kept := r.read()
	if servers := nameServers(conf); kept && len(servers) > 0 {
		ask(r.inTurn(servers))
	} else {
		ask(r.dial)
	}
	pending := 1
	behind := dockerServers(conf)
	direct := func() {
		if len(behind) == 0 {
			return
		}
		ask(r.inTurn(behind))
		behind = nil
		pending++
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			direct()
		case res := <-results:
			if res.err == nil {
				return res.addrs, nil
			}
			direct()
			if pending--; pending == 0 {
				return nil, res.err
			}
		}
	}
}

// inTurn returns a function that asks these name servers, one after the other, in
// the place of those of resolv.conf.
func (r *resolver) inTurn(servers []netip.Addr) func(ctx context.Context, network, server string) (net.Conn, error) {
	var turn atomic.Uint32
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		server := servers[int(turn.Add(1)-1)%len(servers)]
		return r.dial(ctx, network, netip.AddrPortFrom(server, 53).String())
	}
}

// dial opens a marked socket to a name server.
func (r *resolver) dial(ctx context.Context, network, server string) (net.Conn, error) {
	addr, err := netip.ParseAddrPort(server)
	if err != nil {
		return nil, fmt.Errorf("name server %q: %w", server, err)
	}
	if r.out.nameServer != nil && !addr.Addr().IsLoopback() {
		r.out.nameServer(netip.AddrPortFrom(addr.Addr().Unmap().WithZone(""), addr.Port()))
	}
	return dialMarked(ctx, r.out.mark, network, server)
}

// read returns resolv.conf as it is without a sidecar: kept, while one has written
// its own.
func (r *resolver) read() (conf []byte, kept bool) {
	if r.out.kept != "" {
		if conf, err := os.ReadFile(r.out.kept); err == nil {
			return conf, true
		}
	}
	conf, _ = os.ReadFile(cmp.Or(r.conf, resolvConf)) // the resolver itself will say why not
	return conf, false
}

// dockerServers returns the name servers that Docker says it asks, in a
// resolv.conf whose only name servers are loopback addresses:
//
//	nameserver 127.0.0.11
//	# ExtServers: [192.0.2.53 host(127.0.0.53)]
//
// Those in host(…) are asked from the host, so that Docker's own works.
func dockerServers(conf []byte) []netip.Addr {
	var servers []netip.Addr
	for lines := bufio.NewScanner(bytes.NewReader(conf)); lines.Scan(); {
		line := lines.Text()
		if f := strings.Fields(line); len(f) > 1 && f[0] == "nameserver" {
			if a, err := netip.ParseAddr(f[1]); err != nil || !a.IsLoopback() {
				return nil
			}
		}
		list, ok := strings.CutPrefix(line, "# ExtServers: [")
		if !ok {
			continue
		}
		list, ok = strings.CutSuffix(strings.TrimSpace(list), "]")
		if !ok {
			continue
		}
		for _, f := range strings.Fields(list) {
			if a, err := netip.ParseAddr(f); err == nil && !a.IsLoopback() && a.IsValid() {
				servers = append(servers, a)
			}
		}
	}
	return servers
}
