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

// A Dialer opens sessions to one gateway.
type Dialer struct {
	// Key is the client's identity.
	Key ed25519.PrivateKey
	// Pin is the fingerprint of the gateway's key. Required.
	Pin Fingerprint
	// Secret is the join token's secret. It enrols Key at the first join and is
	// not looked at afterwards.
	Secret string
	// Mark is the SO_MARK of the UDP socket; zero sets none.
	Mark uint32
	// Queues is the number of streams for super-packets; zero means one.
	Queues int
	// MTU caps the tunnel's MTU; zero leaves it to the path.
	MTU int
	// Drops counts what the sessions drop; nil counts nowhere.
	Drops *packet.Drops
	// Log is where the session speaks; nil discards.
	Log *slog.Logger
	// Now is the clock for certificates; nil is time.Now.
	Now func() time.Time
}

// Dial opens a session and returns it with its grant.
func (d *Dialer) Dial(ctx context.Context, gateway netip.AddrPort) (*Session, error) {
	return nil, errors.ErrUnsupported
}
