// Package socks5 speaks SOCKS5 (RFC 1928, with user and password by RFC 1929) and
// the HTTP proxy protocol (CONNECT, RFC 9110 section 9.3.6, and forwarding of
// plain http requests, RFC 9112 section 3.2.2) to clients on one port. Where
// connections lead, and where names are resolved, it leaves to its user: it does
// not dial by itself.
//
// Of SOCKS5 it knows CONNECT and UDP ASSOCIATE. BIND and datagrams in fragments are
// refused, as by most servers.
//
// The path of a connection:
//
//  1. Serve accepts it, within the limits
//  2. its first byte tells the protocol
//  3. the handshake, within HandshakeTimeout, says who asks for what
//  4. Dial opens the other side, and the reply tells the outcome
//  5. relay passes both directions until both have ended
package socks5

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/relay"
)

// A Server is what all listeners of a proxy share. It must not be copied, nor its
// fields be changed, once Serve was called.
type Server struct {
	// Dial opens a connection to "host:port"; the network is always "tcp". The host
	// is an IP address, or a name as the client sent it. Required.
	//
	// ctx is for opening alone: it is done after DialTimeout, and when the client
	// has gone. An error decides the reply: see Reply.
	//
	// The reply to the client is sent when Dial returns. To send it early, return a
	// connection whose first Read or Write finds out: the client's first bytes then
	// follow the request without a round trip between them. An error of that Read
	// or Write resets the client.
	//
	// The connection should have the method CloseWrite() error, as *net.TCPConn has,
	// or the end of one direction ends both. It may have Reset() error, which aborts
	// instead of closing, and Context() context.Context, as a QUIC stream has: its
	// end tells, after Read has returned io.EOF, that the other direction is lost.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Associate opens a relay of datagrams for one client. ctx is for opening alone.
	// Where it is nil clients are told that UDP is not supported.
	Associate func(ctx context.Context) (PacketRelay, error)

	// ListenPacket opens the socket to which a client sends its datagrams; local is
	// the address that the client's TCP connection came to. The socket's LocalAddr is
	// what the client is told. Nil is a UDP socket on that address.
	ListenPacket func(local netip.Addr) (net.PacketConn, error)

	// Authenticate tells whether a user may pass. It must take the same time whatever
	// part of them is wrong; Credentials makes one that does. Nil lets everybody pass.
	Authenticate func(user, password string) bool

	// Name is how the proxy calls itself to HTTP clients and servers; a token, by
	// default "socks5".
	Name string

	// Log gets what a person should know; names and addresses of destinations appear
	// at debug level alone, credentials never. Nil discards.
	Log *slog.Logger

	// MaxConns bounds the connections at a time (8192), MaxConnsPerClient those of one
	// client address (half of MaxConns): further ones are reset.
	MaxConns, MaxConnsPerClient int

	// HandshakeTimeout bounds the time from accept to the whole request (10 s), and
	// that for the header of a further HTTP request.
	HandshakeTimeout time.Duration

	// DialTimeout bounds Dial and Associate (30 s).
	DialTimeout time.Duration

	// UDPIdle ends an association that had no datagram for so long (5 minutes, by
	// RFC 4787 section 4.3).
	UDPIdle time.Duration

	drops drops
	said  struct{ full, foreign, denied, accept occasion }

	mu    sync.Mutex
	conns map[netip.Addr]int // by client; guarded by mu
	total int                // guarded by mu
}

// Drops returns how many datagrams were dropped, by reason; those that are zero
// are left out.
func (s *Server) Drops() map[string]uint64 { return s.drops.snapshot() }

// Serve serves the clients of a listener until ctx is done, which resets all of
// them and returns nil, or until the listener fails. It closes the listener, whose
// connections may be other than TCP's and have the methods that Dial's may have.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	if s.Dial == nil {
		return errors.Join(errors.New("socks5: Server.Dial is not set"), closed(l))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	v := &service{Server: s, ctx: ctx}
	v.serveHTTP()
	err := v.accept(l)
	cancel()
	v.running.Wait()
	return errors.Join(err, closed(l))
}

// A service is one call of Serve.
type service struct {
	*Server
	ctx     context.Context
	http    *handoff
	running sync.WaitGroup
}

func (v *service) accept(l net.Listener) error {
	for {
		conn, err := l.Accept()
		switch {
		case err == nil:
			v.admit(conn)
		case v.ctx.Err() != nil:
			return nil
		case !passing(err):
			return fmt.Errorf("accept proxy clients on %v: %w", l.Addr(), err)
		default:
			if v.said.accept.due() {
				v.log().Warn("a proxy cannot accept clients; trying again in a second", "listener", l.Addr(), "error", err)
			}
			select {
			case <-v.ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// passing tells whether a listener's error goes by: descriptors or memory ran out,
// or a client gave up before it was accepted.
func passing(err error) bool {
	return is(err, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED)
}

// admit takes a connection, or resets it at once where there are too many, so that
// a client does not hang.
func (v *service) admit(conn net.Conn) {
	from := addrPort(conn.RemoteAddr()).Addr()
	if !v.take(from) {
		relay.Reset(conn)
		if v.said.full.due() {
			v.log().Warn("a proxy has too many connections; further ones are reset until some end",
				"client", from, "limit", v.maxConns(), "limit_per_client", v.maxConnsPerClient())
		}
		return
	}
	v.running.Add(1)
	stop := context.AfterFunc(v.ctx, func() { relay.Reset(conn) })
	c := &client{Conn: conn, release: func() {
		stop()
		v.give(from)
		v.running.Done()
	}}
	go v.handle(c)
}

// take counts a connection of a client in, if it is within the limits.
func (s *Server) take(from netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.total >= s.maxConns() || s.conns[from] >= s.maxConnsPerClient() {
		return false
	}
	if s.conns == nil {
		s.conns = make(map[netip.Addr]int)
	}
	s.conns[from]++
	s.total++
	return true
}

func (s *Server) give(from netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total--
	if s.conns[from]--; s.conns[from] == 0 {
		delete(s.conns, from)
	}
}

func (s *Server) maxConns() int                   { return or(s.MaxConns, 8192) }
func (s *Server) maxConnsPerClient() int          { return or(s.MaxConnsPerClient, (s.maxConns()+1)/2) }
func (s *Server) handshakeTimeout() time.Duration { return or(s.HandshakeTimeout, 10*time.Second) }
func (s *Server) dialTimeout() time.Duration      { return or(s.DialTimeout, 30*time.Second) }
func (s *Server) udpIdle() time.Duration          { return or(s.UDPIdle, 5*time.Minute) }
func (s *Server) name() string                    { return or(s.Name, "socks5") }

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

func or[T comparable](value, otherwise T) T {
	var zero T
	if value == zero {
		return otherwise
	}
	return value
}

// closed closes a listener and makes a further call no error.
func closed(l net.Listener) error {
	if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
