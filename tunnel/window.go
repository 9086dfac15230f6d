package tunnel

import (
	"context"
	"sync/atomic"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlogwriter"
	"golang.org/x/sys/unix"
)

// Receive windows say how much a peer may send that has not been read yet.
// quic-go doubles those that are used up within two round trips, so that they
// follow the path, up to a maximum.
const (
	// firstStreamWindow is what a flow may cost that nobody reads.
	firstStreamWindow = 1 << 20
	// The connection's is first so wide that some such flows do not hold up the
	// others.
	wideConnectionWindow  = 24 << 20
	smallConnectionWindow = firstStreamWindow * 3 / 2
	maxStreamWindow       = 64 << 20
	maxConnectionWindow   = 128 << 20
)

// A windowBudget bounds the windows of all connections together. What a connection
// got it keeps until it ends, so none gets more than a quarter of what is left at
// once: latecomers find room, if less of it.
type windowBudget struct {
	limit int64 // bytes
	used  atomic.Int64
}

// windows is for the memory of the process.
var windows = windowBudget{limit: windowLimit()}

// windowLimit is a quarter of the machine's memory.
func windowLimit() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 256 << 20
	}
	return int64(uint64(info.Totalram) * uint64(info.Unit) / 4)
}

// admit sets the first windows of a connection that somebody opens to us. Anybody
// can: they get wide ones while half of the budget is free.
func (b *windowBudget) admit(conf *quic.Config, known Path) {
	const more = wideConnectionWindow - smallConnectionWindow
	if !b.take(more, b.limit/2) {
		conf.InitialConnectionReceiveWindow = smallConnectionWindow
		return
	}
	conf.InitialStreamReceiveWindow = known.streamWindow()
	next := conf.Tracer
	conf.Tracer = func(ctx context.Context, isClient bool, id quic.ConnectionID) qlogwriter.Trace {
		b.giveBack(ctx, more) // a server's connection ends with ctx
		if next == nil {
			return nil
		}
		return next(ctx, isClient, id)
	}
}

// allow is a quic.Config's AllowConnectionWindowIncrease. It must not call methods
// that lock the connection, which Context does not.
func (b *windowBudget) allow(conn *quic.Conn, delta uint64) bool {
	ok := b.take(int64(delta), b.limit)
	if ok {
		b.giveBack(conn.Context(), int64(delta))
	}
	return ok
}

// take takes n bytes, if they are at most a quarter of what of the limit is left.
func (b *windowBudget) take(n, limit int64) bool {
	for {
		used := b.used.Load()
		if n > (limit-used)/4 {
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// giveBack gives n bytes back when ctx ends.
func (b *windowBudget) giveBack(ctx context.Context, n int64) {
	context.AfterFunc(ctx, func() { b.used.Add(-n) })
}
