package congestion

import (
	"math"
	"time"
)

// longTerm bounds the window by what probes found to be too much (draft,
// "Probing for Bandwidth In ProbeBW").
type longTerm struct {
	inflight int64 // infinite: none
}

// ackPhase is what the ACKs at hand tell about (draft, "ProbeBW State").
type ackPhase uint8

const (
	acksInit ackPhase = iota
	acksRefilling
	acksProbeStarting
	acksProbeFeedback
	acksProbeStopping
)

// cycle is one turn of DOWN, CRUISE, REFILL and UP (draft, "ProbeBW").
type cycle struct {
	phase         ackPhase
	stamp         Time
	phaseStart    Time // of the state at hand
	wait          time.Duration
	roundsSinceUp int64
	probeSample   bool // draft: is_bw_probe_sample

	upRounds      int
	upAcked       int64
	upAckedPerInc int64

	upBW float64 // best rate since UP began

	tooHigh       bool // draft: prev_probe_too_high
	precautionary bool // draft: prev_probe_precautionary
}

func (c *Controller) startProbeBWDown() {
	c.resetCongestionSignals()
	c.cycle.upAckedPerInc = infinite
	c.pickProbeWait()
	c.cycle.stamp = c.now
	c.cycle.phase = acksProbeStopping
	c.startRound()
	c.setProbeBW(ProbeBWDown, downPacingGain, cwndGain)
}

func (c *Controller) startProbeBWRefill() {
	c.resetShortTerm()
	c.cycle.upRounds, c.cycle.upAcked = 0, 0
	c.cycle.precautionary = false
	c.cycle.phase = acksRefilling
	c.startRound()
	c.setProbeBW(ProbeBWRefill, 1, cwndGain)
}

func (c *Controller) startProbeBWUp() {
	c.cycle.phase = acksProbeStarting
	c.startRound()
	c.full.reset(c.rs.rate)
	c.cycle.upBW = 0
	c.setProbeBW(ProbeBWUp, upPacingGain, upCwndGain)
	c.raiseLongTermSlope()
}

func (c *Controller) setProbeBW(s State, pacing, cwnd float64) {
	c.state, c.pacingGain, c.cwndGain = s, pacing, cwnd
	c.cycle.phaseStart = c.now
}

// updateProbeBW is the draft's UpdateProbeBWCyclePhase.
func (c *Controller) updateProbeBW() {
	if !c.full.reached || c.adaptLongTerm() {
		return
	}
	switch c.state {
	case ProbeBWDown:
		if !c.checkTimeToProbe() && c.timeToCruise() {
			c.setProbeBW(ProbeBWCruise, 1, cwndGain)
		}
	case ProbeBWCruise:
		c.checkTimeToProbe()
	case ProbeBWRefill:
		if c.round.start {
			c.cycle.probeSample = true
			c.startProbeBWUp()
		}
	case ProbeBWUp:
		if c.timeToGoDown() {
			c.cycle.tooHigh = false
			c.startProbeBWDown()
		}
	}
}

func (c *Controller) timeToCruise() bool {
	return c.inflight <= c.inflightWithHeadroom() && c.inflight <= c.target(c.maxBW.get(), 1)
}

// timeToGoDown is the draft's IsTimeToGoDown, with one condition more: the draft
// waits for three rounds without growth, in which a queue of up to a
// bandwidth-delay product forms. Here the probe also ends when it has filled a
// quarter of one for a round trip, as much as its pacing gain adds, and the
// bandwidth did not follow.
func (c *Controller) timeToGoDown() bool {
	if c.cycle.tooHigh && c.inflight >= c.long.inflight {
		c.cycle.precautionary = true
		return true
	}
	if c.isCwndLimited() && c.cwnd >= c.long.inflight {
		c.full.reset(c.rs.rate)
		return false
	}
	if c.full.now {
		return true
	}
	return c.full.count > 0 && c.now.Sub(c.cycle.phaseStart) > c.minRTT.rtt &&
		c.inflight >= c.target(c.maxBW.get(), upPacingGain)
}

// checkTimeToProbe is the draft's IsTimeToProbeBW ("Time Scale for Bandwidth
// Probing").
func (c *Controller) checkTimeToProbe() bool {
	if c.now <= c.cycle.stamp.Add(c.cycle.wait) && !c.renoProbeTime() {
		return false
	}
	c.startProbeBWRefill()
	return true
}

// pickProbeWait is the draft's PickProbeWait. After a probe that cost losses where
// others share the queue, it waits twice as long: a CUBIC flow with a round trip
// of tens of milliseconds takes about five seconds to regain what it yielded.
func (c *Controller) pickProbeWait() {
	c.cycle.roundsSinceUp = c.rand.Int64N(2)
	c.cycle.wait = 2*time.Second + time.Duration(c.rand.Int64N(int64(time.Second)))
	if c.cycle.tooHigh && c.queueStands() {
		c.cycle.wait *= 2
	}
}

// renoProbeTime is the draft's IsRenoCoexistenceProbeTime.
func (c *Controller) renoProbeTime() bool {
	bound := int64(63)
	if c.cycle.tooHigh && c.queueStands() {
		bound *= 2
	}
	return c.cycle.roundsSinceUp >= min(c.targetInflight()/c.mss, bound)
}

func (c *Controller) targetInflight() int64 { return min(c.bdp(c.bw(), 1), c.cwnd) }

func (c *Controller) raiseLongTermSlope() {
	growth := int64(1) << c.cycle.upRounds
	c.cycle.upRounds = min(c.cycle.upRounds+1, 30)
	c.cycle.upAckedPerInc = max(c.cwnd/growth, c.mss)
}

// probeLongTermUpward is the draft's ProbeInflightLongtermUpward.
func (c *Controller) probeLongTermUpward() {
	if !c.isCwndLimited() || c.cwnd < c.long.inflight {
		return
	}
	y := &c.cycle
	y.upAcked += c.rs.acked
	if y.upAcked >= y.upAckedPerInc {
		n := y.upAcked / y.upAckedPerInc
		y.upAcked -= n * y.upAckedPerInc
		c.long.inflight += n * c.mss
	}
	if c.round.start {
		c.raiseLongTermSlope()
	}
}

// adaptLongTerm is the draft's AdaptLongTermModel. It tells whether it changed
// the state.
func (c *Controller) adaptLongTerm() bool {
	y := &c.cycle
	if y.phase == acksProbeStarting && c.round.start {
		y.phase = acksProbeFeedback
	}
	if y.phase == acksProbeStopping && c.round.start {
		y.probeSample = false
		y.phase = acksInit
		if c.inProbeBW() {
			if !c.rs.appLimited {
				c.advanceMaxBW()
			}
			if y.precautionary && !y.tooHigh {
				c.startProbeBWRefill()
				return true
			}
		}
	}
	if c.rs.ce && y.probeSample {
		before := c.state
		c.handleInflightTooHigh()
		return c.state != before
	}
	if c.tooMuchLoss(c.rs.lostSince, c.rs.txInflight) || c.long.inflight == infinite {
		return false
	}
	c.long.inflight = max(c.long.inflight, c.rs.txInflight)
	if c.state == ProbeBWUp {
		c.probeLongTermUpward()
	}
	return false
}

// advanceMaxBW is the draft's AdvanceMaxBwFilter. But when the probe met more loss
// than it may, what it delivered refutes a higher estimate at once: the draft
// would hold on to that for another cycle, and fill the queue meanwhile. And
// where others share the queue the flow yields, as they did.
func (c *Controller) advanceMaxBW() {
	if c.cycle.tooHigh && c.cycle.upBW > 0 {
		c.maxBW = maxBW{last: c.cycle.upBW}
		if c.queueStands() {
			c.maxBW.last *= sharedYield
		}
		return
	}
	c.maxBW.advance()
}

// tooMuchLoss tells whether lost of total bytes are more than lossThreshold, and
// more than chance makes of it where few packets are the threshold: random loss
// of half of it must not look like congestion on a path that holds 100 packets.
// The bound is that of two standard deviations.
func (c *Controller) tooMuchLoss(lost, total int64) bool {
	expected := lossThreshold * float64(total) / float64(c.mss)
	return float64(lost)/float64(c.mss) > expected+2*math.Sqrt(expected)
}

// handleLostPacket is the draft's HandleLostPacket.
func (c *Controller) handleLostPacket(p *packet) {
	c.short.lostInRound += int64(p.size)
	c.resume.onLoss(c, p)
	if !c.cycle.probeSample {
		return
	}
	lostSince := c.sampler.lostBytes - p.lost
	if !c.tooMuchLoss(lostSince, p.txInflight) {
		return
	}
	c.rs.txInflight = inflightAtLoss(p, lostSince)
	c.rs.appLimited = p.appLimited
	c.handleInflightTooHigh()
}

// inflightAtLoss returns what was in flight when the losses crossed the
// threshold.
func inflightAtLoss(p *packet, lostSince int64) int64 {
	before := float64(p.txInflight - int64(p.size))
	lostBefore := float64(lostSince - int64(p.size))
	return int64(before + (lossThreshold*before-lostBefore)/(1-lossThreshold))
}

func (c *Controller) handleInflightTooHigh() {
	c.cycle.tooHigh = true
	c.cycle.probeSample = false
	if !c.rs.appLimited {
		c.long.inflight = max(c.rs.txInflight, int64(beta*float64(c.targetInflight())))
	}
	if c.state == ProbeBWUp {
		c.undo.state, c.undo.has = ProbeBWUp, true
		c.startProbeBWDown()
	}
}
