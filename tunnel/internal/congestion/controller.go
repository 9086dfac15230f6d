// Package congestion decides how fast one connection sends: a model-based
// congestion controller after BBRv3 (draft-ietf-ccwg-bbr, "the draft" in
// comments; its section titles are quoted), with delivery-rate samples by packet
// number and Careful Resume (draft-ietf-tsvwg-careful-resume).
//
// It owns the model of the path, the window and the pacing rate. It has no
// clock, no goroutine and no lock: time comes in with events, and its owner
// calls it from one goroutine. It does not know QUIC; package install puts it
// into a quic-go connection.
//
// Where it departs from the draft a comment says so and why.
package congestion

import (
	"math"
	"math/rand/v2"
	"time"
)

// A Time is an instant of the caller's monotonic clock, in nanoseconds. Zero
// means never.
type Time int64

// Add returns t+d.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// Sub returns t-u.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t - u) }

// A State is where the state machine is (draft, "State Machine").
type State uint8

const (
	Startup State = iota
	Drain
	ProbeBWDown
	ProbeBWCruise
	ProbeBWRefill
	ProbeBWUp
	ProbeRTT
)

var stateNames = [...]string{"startup", "drain", "down", "cruise", "refill", "up", "probe-rtt"}

func (s State) String() string { return stateNames[s] }

// infinite stands for a bound that is not set.
const infinite = math.MaxInt64

// Constants of the draft, in the order of its section 2.
const (
	startupPacingGain = 2.77
	drainPacingGain   = 0.35 // 0.5 in the draft, which allows for less: the queue is gone sooner
	downPacingGain    = 0.9
	upPacingGain      = 1.25
	cwndGain          = 2.0
	upCwndGain        = 2.25
	pacingMargin      = 0.995 // paces below the estimate; 0.99 in the draft
	lossThreshold     = 0.02
	beta              = 0.7
	headroom          = 0.15
	sharedHeadroom    = 1 - beta // where others share the queue; not in the draft
	sharedYield       = 0.85     // likewise
	minPipePackets    = 4

	minRTTWindow      = 10 * time.Second
	probeRTTInterval  = 5 * time.Second
	probeRTTDuration  = 200 * time.Millisecond
	probeRTTCwndGain  = 0.5
	extraAckedRounds  = 10
	startupLossRanges = 6
)

// A Config says what is known of a path before anything is sent on it.
type Config struct {
	// MaxDatagramSize is the size of a full packet in bytes; zero means 1200.
	MaxDatagramSize int64
	// RTT is the round-trip time that the handshake measured; zero means that
	// it is not known yet.
	RTT time.Duration
	// Saved is what an earlier connection learned of the same path (Careful
	// Resume); the zero Path is none.
	Saved Path
	// Seed varies when bandwidth is probed, so that flows do not march in step.
	Seed uint64
}

// A Controller is the congestion controller of one connection on one path.
type Controller struct {
	mss           int64
	initialWindow int64
	rand          *rand.Rand
	now           Time // of the latest event

	sampler sampler
	rs      sample // of the ACK at hand
	pacer   pacer
	resume  resume

	state      State
	pacingGain float64
	cwndGain   float64
	cwnd       int64
	priorCwnd  int64 // before ProbeRTT or an outage
	inflight   int64
	idle       bool // draft: idle_restart

	round   rounds
	maxBW   maxBW
	short   shortTerm
	long    longTerm
	full    fullPipe
	minRTT  minRTT
	extra   extraAcked
	cycle   cycle
	undo    undo
	limited cwndLimited

	spans        spans // in Startup
	held         bool  // losses ended the growth of Startup
	drainStart   int64 // round
	probeRTTDone Time
	probeRTTFull bool // a round has passed at the low window
}

// New returns a controller in Startup.
func New(cfg Config) *Controller {
	c := &Controller{
		mss:  cfg.MaxDatagramSize,
		rand: rand.New(rand.NewPCG(cfg.Seed, 0)),
	}
	if c.mss == 0 {
		c.mss = 1200
	}
	c.minRTT.init(cfg.RTT)
	c.resume.saved = cfg.Saved
	c.long.inflight = infinite
	c.resetShortTerm()
	c.setInitialWindow(cfg.RTT)
	c.enterStartup()
	return c
}

const (
	// initialPackets is the first window where the round trip is short.
	initialPackets = 32
	// initialRate, in bytes a second, sizes it where the round trip is long: a
	// window is then small beside what the path holds, and each doubling takes a
	// round trip. Like any window it is paced.
	initialRate       = 5e6 / 8
	maxInitialPackets = 256
	// unknownRTT paces what is sent before the first sample.
	unknownRTT = 100 * time.Millisecond
)

// setInitialWindow sets the first window and its pacing (draft, "Pacing Rate").
func (c *Controller) setInitialWindow(rtt time.Duration) {
	if rtt <= 0 {
		rtt = unknownRTT
	}
	w := int64(initialRate * rtt.Seconds())
	c.initialWindow = min(max(w, initialPackets*c.mss), maxInitialPackets*c.mss)
	c.cwnd = max(c.cwnd, c.initialWindow)
	c.pacer.setRate(startupPacingGain*float64(c.initialWindow)/rtt.Seconds(), c.mss)
}

// OnSent tells of a packet: inflight counts it in if it elicits an ACK. Those
// that do not are neither paced nor part of the model.
func (c *Controller) OnSent(now Time, inflight, pn, size int64, ackEliciting bool) {
	if !ackEliciting {
		return
	}
	c.now = max(c.now, now)
	if inflight <= size {
		c.restartFromIdle()
	}
	c.inflight = inflight
	c.pacer.sent(c.now, size)
	c.sampler.sent(c.now, pn, size, inflight)
	c.resume.sent(pn, inflight)
}

// restartFromIdle is the draft's HandleRestartFromIdle ("Restarting From Idle").
func (c *Controller) restartFromIdle() {
	if c.sampler.appLimited == 0 {
		return
	}
	c.idle = true
	c.extra.start, c.extra.delivered = c.now, 0
	switch {
	case c.inProbeBW():
		c.setPacingRate(1)
	case c.state == ProbeRTT:
		c.checkProbeRTTDone()
	}
}

// OnAppLimited tells that the window and the pacer would have let more be sent,
// and that there was nothing to send: samples until all in flight is delivered
// do not tell what the path can do.
func (c *Controller) OnAppLimited(inflight int64) {
	c.sampler.markAppLimited(inflight)
}

// OnAck tells of one acknowledged packet. OnAckEnd follows when all packets of
// the same ACK were told.
func (c *Controller) OnAck(now Time, pn, size int64) {
	c.now = max(c.now, now)
	c.sampler.acked(c.now, pn, size, &c.rs)
}

// OnLoss tells of one packet that was declared lost, before the packets that the
// same ACK acknowledged.
func (c *Controller) OnLoss(now Time, pn, size int64) {
	c.now = max(c.now, now)
	p := c.sampler.lost(pn, size, &c.rs)
	c.noteLoss()
	if p != nil {
		c.handleLostPacket(p)
	}
}

// OnAckEnd closes an ACK or an expired loss timer, with what is in flight after
// it. It runs the draft's "Per-ACK Steps".
func (c *Controller) OnAckEnd(now Time, inflight int64) {
	c.now = max(c.now, now)
	c.inflight = inflight
	rs := &c.rs
	c.sampler.generate(c.minRTT.rtt, rs)
	if c.sampler.persistent(rs, c.minRTT.latest) {
		c.onPersistentCongestion()
	}
	if rs.acked > 0 {
		c.updateModelAndState()
		c.setPacingRate(c.pacingGain)
		c.setCwnd()
	} else {
		c.boundCwnd()
	}
	c.sampler.forget(c.now, c.minRTT.latest)
	*rs = sample{lostRuns: rs.lostRuns[:0]}
}

func (c *Controller) updateModelAndState() {
	c.updateRound()
	if c.state == Startup && c.rs.rtt > 0 && c.minRTT.rtt == 0 {
		c.setInitialWindow(c.rs.rtt)
	}
	c.updateResume()
	c.updateLatestDeliverySignals()
	c.updateCongestionSignals()
	c.updateExtraAcked()
	c.checkFullPipe()
	c.checkStartupDone()
	c.checkDrainDone()
	c.updateProbeBW()
	c.updateMinRTT()
	c.checkProbeRTT()
	c.advanceLatestDeliverySignals()
}

// CanSend tells whether the window has room beside what is in flight.
func (c *Controller) CanSend(inflight int64) bool {
	c.inflight = inflight
	room := int64(1)
	if c.limited.waits {
		room = c.room()
	}
	c.limited.waits = inflight+room > c.cwnd
	c.limited.now = c.limited.now || c.limited.waits
	return !c.limited.waits
}

// Window returns the congestion window in bytes.
func (c *Controller) Window() int64 { return c.cwnd }

// HasPacingBudget tells whether a full packet may leave now.
func (c *Controller) HasPacingBudget(now Time) bool {
	c.now = max(c.now, now)
	return c.pacer.has(c.now)
}

// NextSend returns when HasPacingBudget turns true.
func (c *Controller) NextSend() Time { return c.pacer.next() }

// SetMaxDatagramSize tells that full packets have another size now.
func (c *Controller) SetMaxDatagramSize(size int64) {
	c.mss = size
	c.pacer.setRate(c.pacer.rate, size)
	c.cwnd = max(c.cwnd, c.minPipe())
}

// State returns where the state machine is.
func (c *Controller) State() State { return c.state }

// Bandwidth returns the estimate that pacing starts from, in bytes a second.
func (c *Controller) Bandwidth() float64 { return c.bw() }

// PacingRate returns the rate at which packets leave, in bytes a second.
func (c *Controller) PacingRate() float64 { return c.pacer.rate }

// MinRTT returns the estimate of the path's round-trip time without queues; zero
// is unknown.
func (c *Controller) MinRTT() time.Duration { return c.minRTT.rtt }

func (c *Controller) inProbeBW() bool { return c.state >= ProbeBWDown && c.state <= ProbeBWUp }

// probingBW is the draft's IsProbingBW.
func (c *Controller) probingBW() bool {
	return c.state == Startup || c.state == ProbeBWRefill || c.state == ProbeBWUp
}

func (c *Controller) minPipe() int64 { return minPipePackets * c.mss }

// onPersistentCongestion answers losses that lasted (RFC 9002, section 7.6) as
// the draft answers a retransmission timeout ("Modulating cwnd in Loss
// Recovery"): one packet, and from there by what is acknowledged.
func (c *Controller) onPersistentCongestion() {
	c.saveCwnd()
	c.saveState()
	c.cwnd = c.inflight + c.mss
	c.resume.stop()
}
