package tunnel

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/quicvpn/quicvpn/tunnel/internal/congestion/install"
)

// A Congestion says what decides how fast an end of a session sends. Each end
// decides for itself.
type Congestion string

const (
	// BBR is a model of the path (tunnel/internal/congestion). The empty Congestion
	// means it too.
	BBR Congestion = "bbr"
	// NewReno is what quic-go has (RFC 9002).
	NewReno Congestion = "newreno"
)

// Check returns an error that names what is possible, if c is not.
func (c Congestion) Check() error {
	switch c {
	case "", BBR, NewReno:
		return nil
	}
	return fmt.Errorf("%q: use %s or %s", string(c), BBR, NewReno)
}

// tracer is what connections need for steer.
func (c Congestion) tracer() install.TracerFunc {
	if c == NewReno {
		return nil
	}
	return install.Tracer(nil)
}

// steer gives a new connection its congestion control. It returns nil for that
// of quic-go, which is also what there is where ours cannot be put in.
func (c Congestion) steer(conn *quic.Conn, opts install.Options, log *slog.Logger) *install.Handle {
	if c == NewReno {
		return nil
	}
	opts.Seed = rand.Uint64()
	h, err := install.Install(conn, opts)
	if err != nil {
		stock.warn(log, err)
		return nil
	}
	return h
}

// A stockWarning tells that quic-go's congestion control is in use although
// nobody asked for it.
type stockWarning struct{ once sync.Once }

// stock is told of once, because it is the binary's fault.
var stock stockWarning

func (w *stockWarning) warn(log *slog.Logger, err error) {
	w.once.Do(func() {
		log.Warn("the congestion control is quic-go's NewReno, which is slow where paths are long or lose packets: "+
			"build quicvpn with the version of quic-go in its go.mod", "error", err)
	})
}

// rate returns how many bytes a second the path takes, as far as that is known.
func (s *Session) rate() float64 {
	if s.steering != nil {
		if known := s.steering.Snapshot(); known != nil {
			return known.Bandwidth
		}
	}
	stats := s.conn.ConnectionStats()
	return float64(stats.CongestionWindow) / max(stats.SmoothedRTT, time.Millisecond).Seconds()
}

// Congestion returns what decides how fast this end sends.
func (s *Session) Congestion() Congestion {
	if s.steering == nil || s.steering.Err() != nil {
		return NewReno
	}
	return BBR
}
