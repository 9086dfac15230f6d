// Package install puts a congestion.Controller into a stock quic-go connection.
//
// quic-go has no setting for its congestion control. A connection holds it in a
// field of an interface type, and reads that field anew for each call; so another
// value in the field is another congestion control. The field is written on the
// connection's own run loop, from the qlog event of a packet that is about to be
// sent. That is done with the one version of quic-go that it was tested with, and
// after a check of all types that are relied on; otherwise the connection keeps
// its own control.
//
// A path switch (RFC 9000, section 9) makes quic-go start afresh with its own
// control. A function that quic-go calls when its acknowledgements were
// acknowledged looks after that, without a cost for each packet, and puts a
// controller for the new path in.
//
// quic-go makes qlog events whenever there is somebody to take them, at the cost
// of several allocations a packet. So, once the controller is in place, the
// connection is told that nobody listens, unless somebody else does: a tracer
// that was set beside ours gets all events, from first to last, but those of the
// stock control.
package install

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlog"
	"github.com/quic-go/quic-go/qlogwriter"

	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// ErrUnsupported says that the congestion control of this binary's quic-go cannot
// be replaced.
var ErrUnsupported = errors.New("the congestion control of quic-go cannot be replaced")

// Supported returns nil if this binary's quic-go is the one that this package
// knows. Else Tracer and Install do nothing.
func Supported() error {
	if v := linkedVersion(); v != quicVersion {
		return fmt.Errorf("%w: it is version %s, not %s", ErrUnsupported, v, quicVersion)
	}
	return nil
}

// A TracerFunc is a quic.Config's Tracer.
type TracerFunc = func(ctx context.Context, isClient bool, id quic.ConnectionID) qlogwriter.Trace

// Tracer returns the Tracer that a quic.Config needs for Install to work on its
// connections. It hands all events on to next, which may be nil. Until Install is
// called, a connection makes qlog events that nobody may want: call it always.
func Tracer(next TracerFunc) TracerFunc {
	if Supported() != nil {
		return next
	}
	return func(ctx context.Context, isClient bool, id quic.ConnectionID) qlogwriter.Trace {
		t := &trace{}
		if next != nil {
			t.next = next(ctx, isClient, id)
		}
		return t
	}
}

// Options say how controllers are made.
type Options struct {
	// RTT is how long the handshake took to answer. It counts only where quic-go
	// measured nothing, as on paths so long that it repeated its first packets.
	RTT time.Duration
	// Saved is what was learned of the path before; the zero Path is nothing.
	Saved congestion.Path
	// MaxPTO bounds the time between probes (RFC 9002, section 6.2), which quic-go
	// doubles up to a minute: in an outage they would tell late that it is over. The
	// window, which may be full of what was lost, does not hold them up. They are at
	// least two timeouts apart. Zero is quic-go's bound.
	MaxPTO time.Duration
	// Seed varies when bandwidth is probed.
	Seed uint64
}

// A Handle tells about a connection's controller.
type Handle struct {
	opts      Options
	installed atomic.Int32
	err       atomic.Pointer[error]
	news      atomic.Pointer[Snapshot]
	delivered atomic.Uint64
}

// A Snapshot is what the controller knew at most 100 ms before the latest ACK.
type Snapshot struct {
	State      congestion.State
	Bandwidth  float64 // bytes a second
	PacingRate float64 // bytes a second
	MinRTT     time.Duration
	Window     int64 // bytes

	// Path is what a later connection may start from, if PathKnown.
	Path      congestion.Path
	PathKnown bool
	// ResumeTried tells that Options.Saved was tried, ResumeFailed that it must
	// be deleted because it proved wrong.
	ResumeTried, ResumeFailed bool
}

// Installed returns how often a controller was put in: once, and once more for
// each path switch.
func (h *Handle) Installed() int { return int(h.installed.Load()) }

// Err returns why the connection keeps the stock control, or nil.
func (h *Handle) Err() error {
	if err := h.err.Load(); err != nil {
		return *err
	}
	return nil
}

// Snapshot returns what the controller knows, nil before the first ACK.
func (h *Handle) Snapshot() *Snapshot { return h.news.Load() }

// Delivered returns how many bytes of packets the peer has acknowledged.
func (h *Handle) Delivered() uint64 { return h.delivered.Load() }

// Install gives conn, whose Config has a Tracer of this package, a controller as
// soon as it sends its next packet. Call it when Dial or Accept returned, before
// data is sent.
func Install(conn *quic.Conn, opts Options) (*Handle, error) {
	if err := Supported(); err != nil {
		return nil, err
	}
	t, ok := conn.QlogTrace().(*trace)
	if !ok {
		return nil, fmt.Errorf("%w: the connection's Config has another Tracer", ErrUnsupported)
	}
	h := &Handle{opts: opts}
	g := &target{conn: conn, handle: h}
	g.make = g.newAlgorithm
	if !t.target.CompareAndSwap(nil, g) {
		return nil, errors.New("the connection has a controller already")
	}
	return h, nil
}

// A trace is the qlog trace of one connection.
type trace struct {
	next   qlogwriter.Trace // nil: nobody else listens
	asked  atomic.Bool      // the connection has its recorder
	target atomic.Pointer[target]
}

// AddProducer is called by the connection itself, before anybody knows of it, and
// then by the layers above, whose events are none of ours.
func (t *trace) AddProducer() qlogwriter.Recorder {
	var next qlogwriter.Recorder
	if t.next != nil {
		next = t.next.AddProducer()
	}
	if t.asked.Swap(true) {
		return next
	}
	return &recorder{trace: t, next: next}
}

type recorder struct {
	trace *trace
	next  qlogwriter.Recorder // nil: nobody else listens
}

// RecordEvent looks at the field before each packet that the run loop sends. Of
// all events only this one is followed by no use of the recorder that was not
// checked for nil again, and none of its callers is another goroutine.
func (r *recorder) RecordEvent(e qlogwriter.Event) {
	if r.next != nil {
		r.next.RecordEvent(e)
	}
	if _, ok := e.(qlog.PacketSent); !ok {
		return
	}
	if t := r.trace.target.Load(); t != nil {
		t.look(r.next != nil)
	}
}

func (r *recorder) Close() error {
	if r.next != nil {
		return r.next.Close()
	}
	return nil
}

// A target is a connection and what was found in it. Only its run loop touches
// it.
type target struct {
	conn   *quic.Conn
	handle *Handle
	make   func(packetSize int64) sendAlgorithm
	slots  *slots        // nil: not looked for yet
	mine   sendAlgorithm // what was put in
	failed bool
}

// look puts a controller in if there is none of ours.
func (t *target) look(traced bool) {
	if t.failed {
		return
	}
	if t.slots == nil {
		s, err := findSafely(t.conn)
		if err != nil {
			t.fail(err)
			return
		}
		t.slots = &s
		t.watch()
		if !traced {
			*s.connLogger, *s.ackLogger = nil, nil
		}
	}
	t.replace()
}

func (t *target) fail(err error) {
	t.failed = true
	err = fmt.Errorf("%w: %w", ErrUnsupported, err)
	t.handle.err.Store(&err)
}

// findSafely turns what reflect panics about into an error.
func findSafely(conn any) (s slots, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("look into the connection: %v", r)
		}
	}()
	return find(conn)
}

// watch looks at the field whenever the peer acknowledges an acknowledgement:
// quic-go then forgets what it needs not acknowledge any more.
func (t *target) watch() {
	f := *t.slots.onAckOfAck
	*t.slots.onAckOfAck = func(pn qlog.PacketNumber) {
		t.replace()
		if f != nil {
			f(pn)
		}
	}
}

// replace writes the field, unless it holds ours. The control that goes may have
// packets in flight: the new one learns of them when they are acknowledged, and
// needs to know no more.
func (t *target) replace() {
	s := t.slots
	if t.failed || t.mine != nil && *s.algorithm == t.mine {
		return
	}
	size, err := stockPacketSize(s.field)
	if err != nil {
		t.fail(err)
		return
	}
	t.mine = t.make(size)
	*s.algorithm = t.mine
	s.stats.window.Store(uint64(t.mine.GetCongestionWindow()))
	t.handle.installed.Add(1)
}

// newAlgorithm makes a controller. What is known of the path is that of the first
// one.
func (t *target) newAlgorithm(size int64) sendAlgorithm {
	cfg := congestion.Config{MaxDatagramSize: size, Seed: t.handle.opts.Seed}
	if t.mine == nil {
		cfg.RTT, cfg.Saved = t.handle.opts.RTT, t.handle.opts.Saved
		if t.slots.rtt.HasMeasurement() {
			cfg.RTT = t.slots.rtt.SmoothedRTT()
		}
	}
	return &algorithm{c: congestion.New(cfg), stats: t.slots.stats, news: &t.handle.news, delivered: &t.handle.delivered, maxPTO: t.handle.opts.MaxPTO, ptoCount: t.slots.ptoCount, rtt: t.slots.rtt}
}
