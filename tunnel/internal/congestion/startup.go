package congestion

import (
	"slices"
	"time"
)

// fullPipe finds the bandwidth's plateau (draft, "Exiting Acceleration Based on
// Bandwidth Plateau").
type fullPipe struct {
	reached bool // ever
	now     bool
	bw      float64
	count   int
}

func (f *fullPipe) reset(bw float64) { f.now, f.count, f.bw = false, 0, bw }

const (
	fullGrowth = 1.25
	fullRounds = 3
)

func (c *Controller) enterStartup() {
	c.state = Startup
	c.held = false
	c.pacingGain, c.cwndGain = startupPacingGain, cwndGain
}

// checkFullPipe is the draft's CheckFullBWReached. The draft compares the sample
// that happened to begin the round; here it is the best of the round, which
// neither jitter nor clumped ACKs hide.
func (c *Controller) checkFullPipe() {
	f := &c.full
	c.checkQueueFull()
	best := max(c.short.bwLatest, c.rs.rate)
	if f.now || !c.round.start || c.rs.appLimited || best == 0 {
		return
	}
	if best >= f.bw*fullGrowth {
		f.reset(best)
		return
	}
	if f.count++; f.count >= fullRounds {
		f.now, f.reached = true, true
	}
}

// spans are the last stretches of Startup, each a quarter as long as the round
// trip without queues.
type spans struct {
	start     Time
	delivered int64
	minRTT    time.Duration
	acks      int

	rates  [4]float64 // newest last
	queued [2]bool    // no packet found the queue short; newest last
}

const (
	minSpanAcks = 4
	// halfRoundGrowth is fullGrowth in half a round.
	halfRoundGrowth = 1.12
)

// checkQueueFull finds the plateau sooner than three rounds without growth, each
// of which the queue makes twice as long while all who share the path wait: the
// pipe is full when every packet of half a round trip met a queue and no more was
// delivered than in the half before. Jitter and clumped ACKs spare some packet,
// and a queue that others make does not stop our growth.
func (c *Controller) checkQueueFull() {
	s := &c.spans
	if c.state != Startup || c.minRTT.rtt == 0 {
		return
	}
	s.acks++
	if c.rs.rtt > 0 && (s.minRTT == 0 || c.rs.rtt < s.minRTT) {
		s.minRTT = c.rs.rtt
	}
	age := c.now.Sub(s.start)
	if s.start != 0 && (age < c.minRTT.rtt/4 || s.acks < minSpanAcks) {
		return
	}
	if s.start != 0 {
		copy(s.rates[:], s.rates[1:])
		s.rates[3] = float64(c.sampler.delivered-s.delivered) / age.Seconds()
		s.queued = [2]bool{s.queued[1], c.queued(s.minRTT)}
		before, after := s.rates[0]+s.rates[1], s.rates[2]+s.rates[3]
		if s.queued == [2]bool{true, true} && s.rates[0] > 0 && after < halfRoundGrowth*before && c.sampler.appLimited == 0 {
			c.full.now, c.full.reached = true, true
		}
	}
	s.start, s.delivered, s.minRTT, s.acks = c.now, c.sampler.delivered, 0, 0
}

// queued tells whether a packet that took rtt waited in a queue that matters.
func (c *Controller) queued(rtt time.Duration) bool {
	return c.minRTT.rtt > 0 && rtt > c.minRTT.rtt+max(c.minRTT.rtt/4, 2*time.Millisecond)
}

// checkStartupDone is the draft's CheckStartupDone.
func (c *Controller) checkStartupDone() {
	if c.state != Startup {
		return
	}
	c.checkStartupLoss()
	if c.short.roundStart {
		c.short.clearRound()
	}
	if c.full.reached {
		c.enterDrain()
	}
}

// checkStartupLoss leaves Startup when losses say that the pipe is full (draft,
// "Exiting Startup Based on Packet Loss"). The draft waits for the end of a round
// of losses. Here losses of many times the threshold, as a shallow buffer gives
// them, are answered at once: what is in flight grows no more, for each round
// more may cost as much as the path holds, and each loss is a gap in a stream,
// of which a receiver bears only so many. A round later, when what was sent
// before is answered for, Startup ends.
func (c *Controller) checkStartupLoss() {
	s := &c.short
	total := s.lostInRound + s.ackedInRound
	high := s.rangesInRound >= startupLossRanges &&
		(float64(s.lostInRound) > 4*lossThreshold*float64(total) || s.roundStart && c.tooMuchLoss(s.lostInRound, total))
	switch {
	case c.held && s.roundStart:
		c.undo.state, c.undo.has = Startup, true
		c.full.reached = true
		c.maxBW.current = max(c.maxBW.current, c.spans.best(startupPacingGain*c.maxBW.get()))
		c.long.inflight = max(c.target(c.bw(), 1), s.inflightLatest)
	case c.held:
	case high || s.roundStart && s.ceInRound && c.queueStands():
		c.held = true
		c.pacingGain = 1
		c.pacer.setRate(c.bw(), c.mss)
		c.cwnd = min(c.cwnd, max(c.inflight, c.initialWindow))
		s.roundEndAt = c.sampler.delivered + c.inflight
		s.clearRound()
	}
}

// best returns the highest rate of the last round trip, but no more than most.
// While a buffer overflows that is what the path carries, and the window did not
// last for all of a round trip, as the rates of samples do.
func (s *spans) best(most float64) float64 { return min(slices.Max(s.rates[:]), most) }

func (c *Controller) enterDrain() {
	c.state = Drain
	c.pacingGain, c.cwndGain = drainPacingGain, cwndGain
	c.drainStart = c.round.count
}

// checkDrainDone is the draft's CheckDrainDone.
func (c *Controller) checkDrainDone() {
	if c.state != Drain {
		return
	}
	if c.inflight <= c.target(c.bw(), 1) || c.round.count > c.drainStart+3 {
		c.resume.drained()
		c.cwndGain = cwndGain
		c.startProbeBWDown()
	}
}
