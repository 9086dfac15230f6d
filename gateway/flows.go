package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/tunnel"
)

// Flows are connections that a client has the gateway open (CONNECT, CONNECT-UDP).
// They leave by sockets of the gateway's host. The rules are those of packets: the
// address that is dialled, after a name was resolved, is one that the client may
// reach by packets too (port.find).
//
//  1. A client asks (dialTCP, dialUDP); within its share it may.
//  2. A name is resolved by the name servers that answer clients' queries.
//  3. Addresses are tried in turns, IPv6 first (RFC 8305); each is checked.

const (
	// maxGatewayFlows is how many flows there may be at a time, where the process
	// may have twice as many sockets as they may open at once.
	maxGatewayFlows = 64 << 10
	// maxAddresses is how many addresses of a host are dialled, and how many sockets
	// a flow has at most while it is opened.
	maxAddresses = 4
	// dialLimit bounds the opening of a flow.
	dialLimit = 20 * time.Second
	// headStart is for how long the next address waits for the last one.
	headStart = 250 * time.Millisecond
	// udpIdle ends a flow of UDP in which nothing passes (RFC 4787, section 4.3).
	udpIdle = 5 * time.Minute
	// attachWait is how long a client that was granted a session may take to be known
	// to the router.
	attachWait = time.Second
)

// flows opens what clients' flows lead to.
type flows struct {
	router *router
	ns     *netNS
	names  *names // nil where the gateway resolves no names
	shares *shares
	log    *slog.Logger

	opened, refused, failed atomic.Uint64
}

func newFlows(r *router, ns *netNS, n *names, log *slog.Logger) *flows {
	return &flows{router: r, ns: ns, names: n, log: log,
		shares: newShares(int(min(maxGatewayFlows, max(descriptors()/2/maxAddresses, 1))))}
}

// counters returns what became of flows, those that are not zero.
func (f *flows) counters() map[string]uint64 {
	if f == nil {
		return nil
	}
	m := make(map[string]uint64)
	for name, c := range map[string]*atomic.Uint64{"opened": &f.opened, "refused": &f.refused, "failed": &f.failed} {
		if n := c.Load(); n > 0 {
			m[name] = n
		}
	}
	return m
}

// dialTCP is tunnel.ServerConfig.DialTCP.
func (f *flows) dialTCP(ctx context.Context, s *tunnel.Session, address string) (net.Conn, error) {
	conn, release, err := f.dial(ctx, s, "tcp", address)
	if err != nil {
		return nil, err
	}
	return &tcpFlow{conn.(*net.TCPConn), sync.OnceFunc(release)}, nil
}

// dialUDP is tunnel.ServerConfig.DialUDP.
func (f *flows) dialUDP(ctx context.Context, s *tunnel.Session, address string) (net.Conn, error) {
	conn, release, err := f.dial(ctx, s, "udp", address)
	if err != nil {
		return nil, err
	}
	return &udpFlow{Conn: conn, release: sync.OnceFunc(release)}, nil
}

// A tcpFlow gives its place back when it is closed.
type tcpFlow struct {
	*net.TCPConn
	release func()
}

func (c *tcpFlow) Close() error {
	c.release()
	return c.TCPConn.Close()
}

// A udpFlow does so, too, and ends when nothing passes.
type udpFlow struct {
	net.Conn
	release func()
	wrote   atomic.Int64 // when, in Unix nanoseconds
}

func (c *udpFlow) Close() error {
	c.release()
	return c.Conn.Close()
}

func (c *udpFlow) Write(b []byte) (int, error) {
	c.wrote.Store(time.Now().UnixNano())
	return c.Conn.Write(b)
}

func (c *udpFlow) Read(b []byte) (int, error) {
	since := time.Now()
	for {
		c.SetReadDeadline(since.Add(udpIdle))
		n, err := c.Conn.Read(b)
		if wrote := time.Unix(0, c.wrote.Load()); errors.Is(err, os.ErrDeadlineExceeded) && wrote.After(since) {
			since = wrote
			continue
		}
		return n, err
	}
}

// dial opens a connection for a client, with what gives its place back.
func (f *flows) dial(ctx context.Context, s *tunnel.Session, network, address string) (conn net.Conn, release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	p := f.router.portOf(ctx, s)
	if p == nil {
		return nil, nil, &tunnel.DialError{Status: http.StatusServiceUnavailable, Code: "destination_unavailable", Text: "the session is not ready: try again"}
	}
	release, ok := f.shares.take(p.client.ID, netip.Addr{}) // a flow has no address of the client's
	if !ok {
		f.refused.Add(1)
		return nil, nil, &tunnel.DialError{Status: http.StatusServiceUnavailable, Code: "connection_limit_reached",
			Text: "the client has as many flows as the gateway has room for: end some"}
	}
	conn, err = f.connect(ctx, p, network, address)
	if err != nil {
		release()
		if errors.Is(err, syscall.EACCES) {
			f.refused.Add(1)
		} else {
			f.failed.Add(1)
		}
		f.log.Debug("a flow cannot be opened", "client", p.client.Name, "to", address, "error", err)
		return nil, nil, err
	}
	f.opened.Add(1)
	return conn, release, nil
}

// portOf returns the port of a session, or nil if it has none. A session that was
// granted just now is given a moment.
func (r *router) portOf(ctx context.Context, s *tunnel.Session) *port {
	for late := time.Now().Add(attachWait); ; {
		r.mu.Lock()
		p := r.ports[s.Peer()]
		r.mu.Unlock()
		if p != nil && p.session == session(s) {
			return p
		}
		if time.Now().After(late) || s.Context().Err() != nil || ctx.Err() != nil {
			return nil
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// connect dials the addresses that a client may reach of those that an address
// stands for.
func (f *flows) connect(ctx context.Context, p *port, network, address string) (net.Conn, error) {
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	number, err := strconv.ParseUint(service, 10, 16)
	if err != nil {
		return nil, err
	}
	addrs, err := f.resolve(ctx, host)
	if err != nil {
		return nil, err
	}
	var open []netip.AddrPort
	for _, a := range addrs {
		if e := p.mayDial(a); e != nil {
			err = e
		} else {
			open = append(open, netip.AddrPortFrom(a, uint16(number)))
		}
	}
	if len(open) == 0 {
		return nil, err
	}
	return f.race(ctx, network, open)
}

// mayDial reports why a client may not reach an address by a flow.
func (p *port) mayDial(a netip.Addr) error {
	switch w := p.find(a); w.kind {
	case wayOut:
		return nil
	case wayUnrouted:
		return syscall.ENETUNREACH
	case wayPeer, wayNobody, wayOwn:
		return &tunnel.DialError{Status: http.StatusForbidden, Code: "destination_ip_prohibited",
			Text: "an address of the network is reached by packets alone"}
	}
	return syscall.EACCES
}

// resolve returns the addresses of a host, of the two IP versions in turns.
func (f *flows) resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		if a.Zone() != "" {
			return nil, syscall.EACCES // a link of the gateway's
		}
		return []netip.Addr{a}, nil // what maps IPv4 into IPv6 is judged as it is
	}
	if f.names == nil {
		return nil, &tunnel.DialError{Status: http.StatusBadGateway, Code: "dns_error", Text: "this gateway resolves no names: it runs with --dns off"}
	}
	six, four, err := f.names.lookup(ctx, host)
	if err != nil {
		return nil, err
	}
	var turns []netip.Addr
	for i := range max(len(six), len(four)) {
		if i < len(six) {
			turns = append(turns, six[i])
		}
		if i < len(four) {
			turns = append(turns, four[i])
		}
	}
	return turns[:min(len(turns), maxAddresses)], nil
}

// race dials one address after the other, each with a head start, and returns the
// first connection.
func (f *flows) race(ctx context.Context, network string, addrs []netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type outcome struct {
		conn net.Conn
		err  error
	}
	outcomes := make(chan outcome, len(addrs))
	next := time.NewTimer(0)
	defer next.Stop()
	var failed error
	started, pending := 0, 0
	defer func() {
		cancel()
		go func() {
			for range pending {
				if o := <-outcomes; o.conn != nil {
					o.conn.Close()
				}
			}
		}()
	}()
	for started < len(addrs) || pending > 0 {
		select {
		case <-next.C:
			if started == len(addrs) {
				continue
			}
			to := addrs[started]
			started++
			pending++
			go func() {
				conn, err := f.ns.dial(ctx, network, to.String())
				outcomes <- outcome{conn, err}
			}()
			next.Reset(headStart)
		case o := <-outcomes:
			pending--
			if o.err == nil {
				return o.conn, nil
			}
			if failed == nil || errors.Is(failed, unix.ENETUNREACH) { // of a host without the IP version
				failed = o.err
			}
			next.Reset(0)
		}
	}
	return nil, fmt.Errorf("dial: %w", failed)
}
