package congestion

import (
	"math"
	"time"
)

// rounds counts packet-timed round trips (draft, "BBR.round_count").
type rounds struct {
	count   int64
	start   bool  // the ACK at hand begins one
	endAt   int64 // delivered bytes that end the current one
	minRTT  time.Duration
	acks    int
	lastMin time.Duration // of the round before
	samples int           // likewise
}

// cwndLimited tells whether the window was full at some time in the last round.
type cwndLimited struct {
	now, last bool
	waits     bool // the window was full, and is not open wide enough yet
}

func (c *Controller) isCwndLimited() bool { return c.limited.now || c.limited.last }

func (c *Controller) startRound() { c.round.endAt = c.sampler.delivered }

// updateRound is the draft's UpdateRound.
func (c *Controller) updateRound() {
	r := &c.round
	r.start = c.rs.ok && c.rs.priorDelivered >= r.endAt
	if r.start {
		c.startRound()
		r.count++
		r.lastMin, r.samples, r.minRTT, r.acks = r.minRTT, r.acks, 0, 0
		c.cycle.roundsSinceUp++
		c.limited.last, c.limited.now = c.limited.now, false
	}
	if c.rs.rtt > 0 && (r.minRTT == 0 || c.rs.rtt < r.minRTT) {
		r.minRTT = c.rs.rtt
	}
	r.acks++
}

// maxBW is the bandwidth estimate over the current and the last cycle of probes
// (draft, "BBR.max_bw Max Filter").
type maxBW struct{ current, last float64 }

func (m *maxBW) get() float64 { return max(m.current, m.last) }
func (m *maxBW) advance()     { m.last, m.current = m.current, 0 }

func (c *Controller) updateMaxBW() {
	if r := c.rs.rate; r > 0 && !c.resume.discards(c.state) && (r >= c.maxBW.get() || !c.rs.appLimited) {
		c.maxBW.current = max(c.maxBW.current, r)
		c.cycle.upBW = max(c.cycle.upBW, r)
	}
}

// bw is the draft's BBR.bw ("BoundBWForModel").
func (c *Controller) bw() float64 { return min(c.maxBW.get(), c.short.bw) }

// minRTT estimates the round trip without queues, and when it is due to be
// measured anew (draft, "ProbeRTT Logic").
type minRTT struct {
	rtt    time.Duration // zero: unknown
	stamp  Time
	latest time.Duration // newest sample, or what the handshake measured

	probe      time.Duration // the least of the last probeRTTInterval
	probeStamp Time
	expired    bool
}

func (m *minRTT) init(handshake time.Duration) { m.latest = handshake }

// updateMinRTT is the draft's UpdateMinRTT, but a sample close to the minimum
// renews it as well: the queue was all but empty then, and a phase of ProbeRTT,
// which costs most on the longest paths, could teach no more.
func (c *Controller) updateMinRTT() {
	m, rtt := &c.minRTT, c.rs.rtt
	m.expired = m.probeStamp != 0 && c.now > m.probeStamp.Add(probeRTTInterval)
	if rtt == 0 {
		return
	}
	m.latest = rtt
	switch {
	case m.probe == 0 || rtt < m.probe || m.expired:
		m.probe, m.probeStamp = rtt, c.now
	case rtt <= m.probe+m.probe/32:
		m.probeStamp = c.now
	}
	switch {
	case m.rtt == 0 || m.probe < m.rtt || c.now > m.stamp.Add(minRTTWindow):
		m.rtt, m.stamp = m.probe, m.probeStamp
	case m.probe <= m.rtt+m.rtt/32:
		m.stamp = m.probeStamp
	}
}

// extraAcked estimates how much ACKs arrive in clumps (draft,
// "BBR.extra_acked").
type extraAcked struct {
	start     Time
	delivered int64
	slots     [extraAckedRounds]int64
	round     int64 // of the newest slot
}

func (c *Controller) updateExtraAcked() {
	e := &c.extra
	expected := int64(c.bw() * c.now.Sub(e.start).Seconds())
	if e.delivered <= expected {
		e.start, e.delivered, expected = c.now, 0, 0
	}
	e.delivered += c.rs.acked
	for ; e.round < c.round.count; e.round++ {
		e.slots[(e.round+1)%extraAckedRounds] = 0
	}
	slot := &e.slots[e.round%extraAckedRounds]
	*slot = max(*slot, min(e.delivered-expected, c.cwnd))
}

// get returns the most of the last rounds.
func (e *extraAcked) get() (most int64) {
	for _, v := range e.slots {
		most = max(most, v)
	}
	return most
}

// shortTerm bounds rate and window by what losses outside of probes tell (draft,
// "When not Probing for Bandwidth").
type shortTerm struct {
	bw       float64 // infinite: none
	inflight int64   // infinite: none

	bwLatest       float64
	inflightLatest int64

	lossInRound   bool
	lostInRound   int64
	ackedInRound  int64
	ceInRound     bool
	rangesInRound int
	lastLost      int64 // packet number
	roundEndAt    int64 // draft: loss_round_delivered
	roundStart    bool  // draft: loss_round_start
}

func (c *Controller) resetShortTerm() { c.short.bw, c.short.inflight = math.Inf(1), infinite }

func (c *Controller) resetCongestionSignals() {
	c.short.clearRound()
	c.short.bwLatest, c.short.inflightLatest = 0, 0
}

func (s *shortTerm) clearRound() {
	s.lossInRound, s.ceInRound = false, false
	s.lostInRound, s.ackedInRound, s.rangesInRound = 0, 0, 0
}

func (c *Controller) updateLatestDeliverySignals() {
	s := &c.short
	s.roundStart = false
	if !c.resume.discards(c.state) {
		s.bwLatest = max(s.bwLatest, c.rs.rate)
	}
	s.inflightLatest = max(s.inflightLatest, c.rs.delivered)
	s.ackedInRound += c.rs.acked
	if c.rs.ok && c.rs.priorDelivered >= s.roundEndAt {
		s.roundEndAt = c.sampler.delivered
		s.roundStart = true
	}
}

func (c *Controller) advanceLatestDeliverySignals() {
	if c.short.roundStart {
		c.short.bwLatest, c.short.inflightLatest = c.rs.rate, c.rs.delivered
	}
}

func (c *Controller) updateCongestionSignals() {
	c.updateMaxBW()
	s := &c.short
	if !s.roundStart {
		return
	}
	if !c.probingBW() && (s.lossInRound || s.ceInRound) {
		c.adaptShortTerm()
	}
	if c.state != Startup { // which looks at the round before it ends it
		s.clearRound()
	}
}

// adaptShortTerm is the draft's AdaptLowerBoundsFromCongestion. The draft slows
// down for any loss. Here a loss without a queue, at a rate that probes tolerate
// too, is taken for noise: at 1 % of random loss a flow would otherwise lose 2 %
// of its rate in every round until it probes again.
func (c *Controller) adaptShortTerm() {
	s := &c.short
	if !s.ceInRound && !c.tooMuchLoss(s.lostInRound, s.lostInRound+s.ackedInRound) && !c.queueStands() {
		return
	}
	if math.IsInf(s.bw, 1) {
		s.bw = c.maxBW.get()
	}
	if s.inflight == infinite {
		s.inflight = c.cwnd
	}
	s.bw = max(s.bwLatest, beta*s.bw)
	s.inflight = max(s.inflightLatest, int64(beta*float64(s.inflight)))
}

// queueStands tells whether no packet of the last whole round found the queue
// short.
func (c *Controller) queueStands() bool {
	return c.round.samples >= minSpanAcks && c.queued(c.round.lastMin)
}

// noteLoss is the draft's NoteLoss, for the loss that was counted last.
func (c *Controller) noteLoss() {
	s := &c.short
	if !s.lossInRound {
		s.roundEndAt = c.sampler.delivered
		c.saveState()
	}
	s.lossInRound = true
	c.undo.lost++
	if n := len(c.rs.lostRuns); n > 0 {
		if pn := c.rs.lostRuns[n-1].pn; pn != s.lastLost {
			if pn != s.lastLost+1 {
				s.rangesInRound++
			}
			s.lastLost = pn
		}
	}
}

// undo is what to return to when losses turn out to be none (draft, "Undo
// State").
type undo struct {
	lost         int // packets since the state was saved, less those that were not lost after all
	state        State
	has          bool // a state was left for the losses
	bw           float64
	inflight     int64
	inflightLong int64
}

func (c *Controller) saveState() {
	c.saveCwnd()
	c.undo = undo{bw: c.short.bw, inflight: c.short.inflight, inflightLong: c.long.inflight}
}

func (c *Controller) saveCwnd() {
	if c.state == ProbeRTT {
		c.priorCwnd = max(c.priorCwnd, c.cwnd)
	} else {
		c.priorCwnd = c.cwnd
	}
}

func (c *Controller) restoreCwnd() { c.cwnd = max(c.cwnd, c.priorCwnd) }

// OnSpuriousLoss tells that a packet that was declared lost has arrived. When
// that is so for all of a round the answer to them is taken back (draft,
// "Handling a Spurious Loss Recovery").
func (c *Controller) OnSpuriousLoss(now Time) {
	c.now = max(c.now, now)
	u := &c.undo
	if u.lost == 0 {
		return
	}
	if u.lost--; u.lost > 0 {
		return
	}
	c.restoreCwnd()
	c.short.clearRound()
	c.full.reset(0)
	c.short.bw = max(c.short.bw, u.bw)
	c.short.inflight = max(c.short.inflight, u.inflight)
	c.long.inflight = max(c.long.inflight, u.inflightLong)
	if u.has && c.state != ProbeRTT && c.state != u.state {
		switch u.state {
		case Startup:
			c.full.reached = false
			c.enterStartup()
		case ProbeBWUp:
			c.startProbeBWRefill()
		}
	}
	u.has = false
}

// OnECN tells that the ACK at hand reports more marks of congestion (ECN-CE). It
// comes before the packets of the ACK. The draft asks only that marks count as
// congestion ("ECN"): here as a loss of more than the threshold.
func (c *Controller) OnECN(now Time) {
	c.now = max(c.now, now)
	c.rs.ce = true
	s := &c.short
	if !s.lossInRound && !s.ceInRound {
		s.roundEndAt = c.sampler.delivered
		c.saveState()
	}
	s.ceInRound = true
	c.undo.lost += 1 << 20 // a mark is never spurious
}
