package install

import (
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// sendAlgorithm has the methods of quic-go's
// named types. Both have the same method table; the layout check compares them.
type sendAlgorithm interface {
	TimeUntilSend(bytesInFlight int64) int64
	HasPacingBudget(now int64) bool
	OnPacketSent(sentTime, bytesInFlight, packetNumber, bytes int64, isRetransmittable bool)
	CanSend(bytesInFlight int64) bool
	MaybeExitSlowStart()
	OnPacketAcked(number, ackedBytes, priorInFlight, eventTime int64)
	OnCongestionEvent(number, lostBytes, priorInFlight int64)
	OnSpuriousLoss(number int64)
	OnRetransmissionTimeout(packetsRetransmitted bool)
	SetMaxDatagramSize(size int64)
	InSlowStart() bool
	InRecovery() bool
	GetCongestionWindow() int64
}

// An algorithm tells a Controller what quic-go tells its congestion control. What
// that interface does not say is inferred from the order of calls:
//
//   - The end of an ACK: for each ACK frame quic-go calls MaybeExitSlowStart (if
//     the largest number is new), OnCongestionEvent with no bytes (ECN-CE),
//     OnCongestionEvent for each lost packet, OnSpuriousLoss, and OnPacketAcked
//     for each packet in ascending order. Only the last knows the time. The batch
//     ends with any other call.
//   - Application limits: CanSend and HasPacingBudget said yes, and nothing was
//     sent until much later.
//
// All runs on the connection's run loop.
type algorithm struct {
	c     *congestion.Controller
	stats connStats
	news  *atomic.Pointer[Snapshot]

	delivered *atomic.Uint64 // bytes

	maxPTO   time.Duration
	ptoCount *uint32 // how often quic-go has doubled the timeout
	rtt      rttStats

	origin   int64           // quic-go's time at zero of ours, which may not be negative
	now      congestion.Time // latest that quic-go told
	inflight int64           // after the batch

	pending  []lostPacket // of the batch, until its time is known
	ce       bool         // likewise
	spurious int
	losses   bool // the batch told losses or marks
	acks     bool // the batch told acknowledged packets

	mayBeIdle bool            // was allowed to send at idleSince, and has not
	idleSince congestion.Time // while mayBeIdle
	published congestion.Time
}

type lostPacket struct{ pn, size int64 }

// connStats are the counters of quic.Conn.ConnectionStats that its congestion
// control keeps.
type connStats struct{ window, packetsLost, bytesLost *atomic.Uint64 }

// idleGap is how long the permission to send must lie unused before the flow
// counts as limited by the application: quic-go also interrupts its sending for
// a moment to look at packets that came in.
const idleGap = time.Millisecond

func (a *algorithm) TimeUntilSend(int64) int64 {
	a.end()
	if next := a.c.NextSend(); next > 0 {
		return a.origin + int64(next)
	}
	return 0 // at once
}

func (a *algorithm) CanSend(inflight int64) bool {
	a.end()
	a.inflight = inflight
	if a.c.CanSend(inflight) {
		return true
	}
	a.mayBeIdle = false
	return false
}

func (a *algorithm) HasPacingBudget(now int64) bool {
	a.end()
	a.at(a.time(now))
	if !a.c.HasPacingBudget(a.now) {
		a.mayBeIdle = false
		return false
	}
	if !a.mayBeIdle {
		a.mayBeIdle, a.idleSince = true, a.now
	}
	return true
}

func (a *algorithm) OnPacketSent(now, inflight, pn, size int64, ackEliciting bool) {
	a.end()
	a.at(a.time(now))
	a.c.OnSent(a.now, inflight, pn, size, ackEliciting)
	if ackEliciting {
		a.inflight = inflight
		a.mayBeIdle = false
		a.boundPTO()
	}
}

// boundPTO is called when a packet was sent: before quic-go sets the timer by it.
func (a *algorithm) boundPTO() {
	if n := *a.ptoCount; n > 1 && a.maxPTO > 0 && a.rtt.PTO(true)<<n > a.maxPTO {
		*a.ptoCount--
	}
}

// time converts quic-go's time. In virtual time that may be negative, and to the
// Controller zero means never.
func (a *algorithm) time(t int64) congestion.Time {
	if a.now == 0 {
		a.origin = t - int64(time.Second)
	}
	return congestion.Time(t - a.origin)
}

// at moves the time on, and notes that the application left a gap before.
func (a *algorithm) at(now congestion.Time) {
	a.now = max(a.now, now)
	if a.mayBeIdle && a.now.Sub(a.idleSince) > idleGap {
		a.c.OnAppLimited(a.inflight)
	}
}

func (a *algorithm) MaybeExitSlowStart() { a.end() }

func (a *algorithm) OnCongestionEvent(pn, size, prior int64) {
	if a.acks {
		a.end()
	}
	if !a.losses {
		a.losses, a.inflight = true, prior
	}
	if size == 0 {
		a.ce = true
		return
	}
	a.inflight -= size
	a.pending = append(a.pending, lostPacket{pn, size})
	a.stats.packetsLost.Add(1)
	a.stats.bytesLost.Add(uint64(size))
}

func (a *algorithm) OnSpuriousLoss(int64) {
	if a.acks {
		a.end()
	}
	a.spurious++
}

func (a *algorithm) OnPacketAcked(pn, size, prior, now int64) {
	t := a.time(now)
	if a.acks && t > a.now {
		a.end()
	}
	if !a.acks {
		if !a.losses {
			a.inflight = prior
		}
		a.at(t)
		a.tell()
		a.acks = true
	}
	a.inflight -= size
	a.delivered.Add(uint64(size))
	a.c.OnAck(a.now, pn, size)
}

// tell passes on what waited for the time.
func (a *algorithm) tell() {
	if a.ce {
		a.c.OnECN(a.now)
	}
	for _, l := range a.pending {
		a.c.OnLoss(a.now, l.pn, l.size)
	}
	for range a.spurious {
		a.c.OnSpuriousLoss(a.now)
	}
	a.pending, a.ce, a.spurious = a.pending[:0], false, 0
}

// end closes the batch.
func (a *algorithm) end() {
	if !a.acks && !a.losses && a.spurious == 0 {
		return
	}
	a.tell() // losses by a timer: the time is that of the last event
	a.losses, a.acks = false, false
	a.c.OnAckEnd(a.now, a.inflight)
	a.stats.window.Store(uint64(a.c.Window()))
	a.publish()
}

func (a *algorithm) OnRetransmissionTimeout(bool) {} // not called by quic-go

func (a *algorithm) SetMaxDatagramSize(size int64) { a.c.SetMaxDatagramSize(size) }

func (a *algorithm) InSlowStart() bool { return a.c.State() == congestion.Startup }

func (a *algorithm) InRecovery() bool { return false } // only its logs ask

func (a *algorithm) GetCongestionWindow() int64 {
	a.end()
	return a.c.Window()
}

const publishEvery = 100 * time.Millisecond

func (a *algorithm) publish() {
	if a.published != 0 && a.now.Sub(a.published) < publishEvery {
		return
	}
	a.published = a.now
	s := &Snapshot{State: a.c.State(), Bandwidth: a.c.Bandwidth(), PacingRate: a.c.PacingRate(), MinRTT: a.c.MinRTT(), Window: a.c.Window()}
	s.Path, s.PathKnown = a.c.Path()
	s.ResumeTried, s.ResumeFailed = a.c.Resumed()
	a.news.Store(s)
}
