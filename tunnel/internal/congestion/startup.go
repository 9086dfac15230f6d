package congestion

import "time"

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
// them, are answered at once, for each round more may cost as much as the path
// holds. The first answer is to go on slowly: perhaps only the bursts of a
// growing window overflowed a buffer, and the pipe is not full yet.
func (c *Controller) checkStartupLoss() {
	s := &c.short
	total := s.lostInRound + s.ackedInRound
	high := s.rangesInRound >= startupLossRanges &&
		(float64(s.lostInRound) > 4*lossThreshold*float64(total) || s.roundStart && c.tooMuchLoss(s.lostInRound, total))
	switch {
	case !high && !(s.roundStart && s.ceInRound && c.queueStands()):
	case c.pacingGain > slowStartupGain:
		c.pacingGain = slowStartupGain
		c.slowSince = c.round.count
		c.pacer.setRate(slowStartupGain*c.bw(), c.mss)
		s.clearRound()
	case c.round.count > c.slowSince+1: // what was sent before is answered for
		c.undo.state, c.undo.has = Startup, true
		c.full.reached = true
		c.long.inflight = max(c.target(c.bw(), 1), s.inflightLatest)
	default:
		s.clearRound()
	}
}

// slowStartupGain still grows by fullGrowth in a round.
const slowStartupGain = 1.35

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
