package tunnel

import (
	"time"

	"github.com/quic-go/quic-go"
)

// A handover tells how many bytes quic-go holds of the datagrams that it was given.
// It takes 32, which on a slow path are many times codelMost; and what it holds
// waits in front of everything that comes after, and cannot be dropped. Datagrams
// go before everything else that quic-go has to send.
type handover struct {
	held int
	sent int // by the connection, without headers, at the last look
}

const (
	// handoverTime is as much as quic-go is given ahead.
	handoverTime = 5 * time.Millisecond
	// handoverLeast keeps it busy while a timer fires late.
	handoverLeast = 4 * firstPacketSize
	// A packet's header and tag, and a datagram's, are at least this.
	handoverHeader = 24
)

// pause returns how long to wait before another look, at a connection that sends so
// many bytes a second; zero is not at all.
func (h *handover) pause(stats quic.ConnectionStats, rate float64) time.Duration {
	sent := int(stats.BytesSent) - handoverHeader*int(stats.PacketsSent)
	h.held = max(h.held-(sent-h.sent), 0)
	h.sent = sent
	over := float64(h.held) - max(rate*handoverTime.Seconds(), handoverLeast)
	if over <= 0 || rate == 0 {
		return 0
	}
	return max(time.Duration(over/rate*float64(time.Second)), time.Millisecond)
}

// wait waits until quic-go holds little. What quic-go discards is never sent, so
// that it counts as gone when nothing was sent for a round trip.
func (h *handover) wait(s *Session) {
	moved := time.Now()
	for {
		before := h.sent
		pause := h.pause(s.conn.ConnectionStats(), s.rate())
		if pause == 0 || s.conn.Context().Err() != nil {
			return
		}
		if now := time.Now(); h.sent != before {
			moved = now
		} else if now.Sub(moved) > s.RTT()+codelMost {
			h.held = 0
			return
		}
		time.Sleep(min(pause, codelMost))
	}
}
