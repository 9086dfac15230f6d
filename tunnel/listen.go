package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Join is a client's wish to join, authenticated by its TLS key.
type Join struct {
	// Client is the fingerprint of the key that the client proved to hold.
	Client Fingerprint
	// Secret is the token secret that it presented; empty if none.
	Secret string
	// Remote is where it comes from.
	Remote netip.AddrPort
}

// A ServerConfig says how a Server listens and who may join.
type ServerConfig struct {
	// Listen is the UDP address; an unspecified IP listens on IPv4 and IPv6.
	Listen netip.AddrPort
	// Key is the gateway's identity, which clients pin. The stateless reset key
	// and the address validation key are derived from it. Required.
	Key ed25519.PrivateKey
	// Authorize answers a join with a grant, or with a *RefusedError that is
	// sent to the client. Required.
	Authorize func(ctx context.Context, join Join) (Grant, error)
	// Serve owns a session that was granted, until it returns; the session is
	// then closed. Required.
	Serve func(ctx context.Context, s *Session)
	// Queues is the number of streams for super-packets; zero means one.
	Queues int
	// MTU caps the tunnels' MTU; zero leaves it to the path.
	MTU int
	// Drops counts what the sessions drop; nil counts nowhere.
	Drops *packet.Drops
	// Log is where the server speaks; nil discards.
	Log *slog.Logger
	// Now is the clock for certificates; nil is time.Now.
	Now func() time.Time
}

// A Server accepts sessions on one UDP socket.
type Server struct{}

// Listen binds the socket, so that a port in use is an error here.
func Listen(cfg ServerConfig) (*Server, error) { return nil, errors.ErrUnsupported }

// Addr returns the address that the server is bound to.
func (s *Server) Addr() netip.AddrPort { return netip.AddrPort{} }

// Run accepts sessions until ctx ends, then closes them all and returns nil.
func (s *Server) Run(ctx context.Context) error { return errors.ErrUnsupported }
