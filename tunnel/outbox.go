package tunnel

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

const (
	chunkSize = 256 << 10

	// What an outbox holds at most, whatever the rate of its stream. A round trip
	// of 400 ms at 200 Mbit/s fits.
	minOutbox = 256 << 10
	maxOutbox = 12 << 20
)

// An outbox holds the frames that wait for one stream.
type outbox struct {
	mu     sync.Mutex
	chunks []*chunk // the last one is being filled
	bytes  int
	limit  int // of bytes; 0 until the stream's rate is known
	wake   chan struct{}

	writing atomic.Bool // the stream is being written to
}

type chunk struct{ b []byte }

var chunkPool = sync.Pool{New: func() any { return &chunk{b: make([]byte, 0, chunkSize)} }}

// add frames a packet, and reports false if there is no room.
func (o *outbox) add(p *packet.Packet) bool {
	n := frameHeader + len(p.Data)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.bytes+n > max(o.limit, minOutbox) {
		return false
	}
	var c *chunk
	if len(o.chunks) > 0 {
		c = o.chunks[len(o.chunks)-1]
	}
	if c == nil || len(c.b)+n > cap(c.b) {
		c = chunkPool.Get().(*chunk)
		o.chunks = append(o.chunks, c)
	}
	var flags byte
	if p.Flags&packet.Partial != 0 {
		flags = flagPartial
	}
	c.b = binary.BigEndian.AppendUint16(c.b, uint16(len(p.Data)))
	c.b = binary.BigEndian.AppendUint16(c.b, p.Segment)
	c.b = append(append(c.b, flags), p.Data...)
	o.bytes += n
	return true
}

// flush wakes the writer if there is something to write.
func (o *outbox) flush() {
	o.mu.Lock()
	some := o.bytes > 0
	o.mu.Unlock()
	if some {
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

// take returns the first chunk, or nil.
func (o *outbox) take() *chunk {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.chunks) == 0 {
		return nil
	}
	c := o.chunks[0]
	o.chunks = append(o.chunks[:0], o.chunks[1:]...)
	o.bytes -= len(c.b)
	return c
}

// setRate bounds the outbox to what the stream drains in one round trip and a
// little, n bytes of it having taken so long: enough for the inner TCP to fill the
// path, and no more. A burst tells less than the rate that the path is known for,
// which in turn lags behind while it grows. The bound falls no faster than the
// outbox drains: a moment's pause, as when the congestion control looks for the
// shortest round trip, must not cost all that the inner TCP sends meanwhile.
func (o *outbox) setRate(n int, took, rtt time.Duration, known float64) {
	if n < chunkSize/4 { // short writes end in quic-go's buffer, not on the path
		return
	}
	rate := float64(n) / max(took.Seconds(), 1e-6)
	if known > 0 {
		rate = min(rate, 2*known)
	}
	limit := int(rate * (rtt + 25*time.Millisecond).Seconds())
	o.mu.Lock()
	o.limit = min(max(limit, o.limit-n, minOutbox), maxOutbox)
	o.mu.Unlock()
}
