package congestion

import (
	"math"
	"time"
)

// A Path is what one connection learned of a path and the next may start from
// (Careful Resume, "saved CC parameters"). Its owner keeps the address that it
// belongs to and when it was learned.
type Path struct {
	RTT       time.Duration // without queues
	Bandwidth float64       // bytes a second
}

// window is the saved congestion window, the bandwidth-delay product.
func (p Path) window() int64 { return int64(p.Bandwidth * p.RTT.Seconds()) }

// resumePhase is a phase of Careful Resume. The Normal phase is the zero value
// of no saved path as well.
type resumePhase uint8

const (
	reconnaissance resumePhase = iota
	unvalidated
	validating
	safeRetreat
	normal
)

// resume is Careful Resume for BBR (draft-ietf-tsvwg-careful-resume, "The Phases
// of CC using Careful Resume" and "Implementation Notes for using BBR").
type resume struct {
	saved   Path
	phase   resumePhase
	failed  bool    // the saved path must not be used again
	rate    float64 // probing rate in bytes a second, zero outside of the unvalidated phase
	window  int64   // at that rate, zero likewise
	first   int64   // packet number, zero until one was sent
	last    int64
	round   int64 // that the phase began in
	pipe    int64 // bytes that the path took
	retreat int64 // the most in flight during a safe retreat
}

const (
	maxRTTGrowth = 10
	// jump is how much of the saved rate is tried at most.
	jump = 2
)

// Resumed tells whether the saved path was tried, and whether it proved wrong:
// then it must be deleted.
func (c *Controller) Resumed() (tried, failed bool) {
	return c.resume.rate > 0 || c.resume.jumped(), c.resume.failed
}

func (r *resume) sent(pn, inflight int64) {
	if r.phase != unvalidated {
		return
	}
	if r.first == 0 {
		r.first = max(pn, 1)
	}
	r.last = pn
}

// updateResume moves through the phases on each ACK.
func (c *Controller) updateResume() {
	r := &c.resume
	switch r.phase {
	case reconnaissance:
		if r.saved.Bandwidth <= 0 || r.saved.RTT <= 0 || c.state != Startup {
			r.phase = normal
			return
		}
		c.tryResume()
	case unvalidated:
		r.pipe += c.rs.acked
		if r.first != 0 && c.rs.pn >= r.first || c.round.count > r.round+1 {
			c.validate()
		}
	case validating:
		r.pipe += c.rs.acked
		if c.rs.pn >= r.last {
			r.phase = normal
		}
	case safeRetreat:
		r.pipe += c.rs.acked
	}
}

// tryResume enters the unvalidated phase once the initial window has arrived and the
// round trip is that of the saved path, when the flow wants more than it may
// send.
func (c *Controller) tryResume() {
	r := &c.resume
	if c.rs.rtt == 0 || c.sampler.delivered < c.initialWindow*9/10 || c.sampler.appLimited != 0 {
		return
	}
	rtt := c.rs.rtt
	if c.minRTT.rtt > 0 {
		rtt = min(rtt, c.minRTT.rtt)
	}
	if rtt <= r.saved.RTT/2 || rtt > maxRTTGrowth*r.saved.RTT {
		r.phase = normal
		return
	}
	window := r.saved.window() / jump
	if window <= 2*c.cwnd {
		r.phase = normal // slow start is as fast
		return
	}
	r.phase = unvalidated
	c.startRound()
	r.round = c.round.count
	r.pipe = c.inflight
	r.rate = float64(window) / rtt.Seconds()
	r.window = window
}

// validate ends the unvalidated phase: the first of its packets has arrived, or a
// round trip has passed.
func (c *Controller) validate() {
	r := &c.resume
	r.phase = validating
	r.rate, r.window = 0, 0
	if r.first == 0 || c.inflight <= max(r.pipe, c.initialWindow) && c.sampler.appLimited != 0 {
		// The flow had less to send: what it did not use is not validated.
		r.phase = normal
		c.cwnd = max(c.initialWindow, r.pipe)
		c.pacer.setRate(max(startupPacingGain*c.bw(), startupPacingGain*initialRate), c.mss)
	}
}

// onLoss enters the safe retreat when unvalidated packets meet congestion. A
// draft for all controllers takes any loss for it; here it is what this
// controller takes for it everywhere else, more than the threshold.
func (r *resume) onLoss(c *Controller, p *packet) {
	if r.phase == reconnaissance {
		if r.saved.Bandwidth > 0 && c.short.lostInRound > 2*c.mss {
			r.phase = normal
		}
		return
	}
	if r.phase != unvalidated && r.phase != validating {
		return
	}
	if !c.tooMuchLoss(c.sampler.lostBytes-p.lost, p.txInflight) {
		return
	}
	r.phase, r.failed = safeRetreat, true
	r.rate, r.window = 0, 0
	r.retreat = max(r.pipe/2, c.minPipe())
	c.full.reached = true
	c.enterDrain()
	c.cwnd = min(c.cwnd, r.retreat)
}

// limit bounds the window while a jump is validated, and during a safe retreat.
// A path that is as it was then takes what it took; only after that is more
// tried.
func (r *resume) limit(initial int64) int64 {
	switch r.phase {
	case validating:
		return max(r.saved.window(), initial)
	case safeRetreat:
		return r.retreat
	}
	return infinite
}

// maxRate bounds the pacing rate likewise.
func (r *resume) maxRate() float64 {
	if r.phase == validating {
		return r.saved.Bandwidth
	}
	return math.Inf(1)
}

// jumped tells whether the window is larger than its growth alone made it.
func (r *resume) jumped() bool { return r.first != 0 }

// discards tells that delivery rates are tainted: the queue of a jump that was
// too far is still in the way.
func (r *resume) discards(s State) bool { return r.phase == safeRetreat && s == Drain }

func (r *resume) drained() {
	if r.phase == safeRetreat {
		r.phase = normal
	}
}

// stop ends Careful Resume.
func (r *resume) stop() {
	r.failed = r.failed || r.phase == unvalidated || r.phase == validating
	r.phase, r.rate, r.window = normal, 0, 0
}

// Path returns what is known of the path, for a later connection. It is not ok
// before the path's capacity was seen.
func (c *Controller) Path() (p Path, ok bool) {
	p = Path{RTT: c.minRTT.rtt, Bandwidth: c.maxBW.get()}
	ok = c.full.reached && c.resume.phase == normal && p.Bandwidth > 0 && p.RTT > 0
	return p, ok
}
