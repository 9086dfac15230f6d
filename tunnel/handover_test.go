package tunnel

import (
	"testing"
	"time"

	"github.com/quic-go/quic-go"
)

func TestHandover(t *testing.T) {
	const rate = 1e6 // bytes a second: 5 ms are less than handoverLeast
	var h handover
	stats := quic.ConnectionStats{BytesSent: 1e6, PacketsSent: 1e3}
	if got := h.pause(stats, rate); got != 0 {
		t.Errorf("with nothing handed over it waits %v", got)
	}
	h.held = handoverLeast + 3000
	if got := h.pause(stats, rate); got != 3*time.Millisecond {
		t.Errorf("3000 bytes too many: it waits %v, want 3ms", got)
	}
	if got := h.pause(stats, 10*rate); got != 0 {
		t.Errorf("on a fast path it waits %v", got)
	}
	stats.BytesSent, stats.PacketsSent = stats.BytesSent+2*1224, stats.PacketsSent+2
	if h.pause(stats, rate); h.held != handoverLeast+600 {
		t.Errorf("%d bytes are held, want %d", h.held, handoverLeast+600)
	}
	if got := h.pause(stats, 0); got != 0 {
		t.Errorf("on an unknown path it waits %v", got)
	}
	stats.BytesSent += 1e6
	if h.pause(stats, rate); h.held != 0 {
		t.Errorf("%d bytes are held after all was sent", h.held)
	}
}
