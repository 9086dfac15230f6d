package congestion

import "time"

// setPacingRate is the draft's SetPacingRateWithGain ("Pacing Rate").
func (c *Controller) setPacingRate(gain float64) {
	c.pacer.least = c.minRTT.rtt / roundQuanta
	rate := max(gain*c.bw()*pacingMargin, c.resume.rate)
	if c.slowStart() {
		rate = max(rate, c.growth()*float64(c.cwnd)/c.minRTT.rtt.Seconds())
	}
	rate = min(rate, c.resume.maxRate())
	if c.full.reached || rate > c.pacer.rate {
		c.pacer.setRate(rate, c.mss)
	}
}

// roundQuanta is how many quanta a round trip has at most. When they overflow a
// queue, each leaves about one gap in what arrives, and a receiver bears only so
// many: quic-go's ends the connection at 1,000 in one stream.
const roundQuanta = 256

// room returns how far a window that was full must open before more leaves: a
// quantum, so that not each ACK lets a few packets go.
func (c *Controller) room() int64 { return max(min(int64(c.pacer.quantum()), c.cwnd/8), 1) }

// bdp returns the bandwidth-delay product times gain (draft, "BDPMultiple").
func (c *Controller) bdp(bw, gain float64) int64 {
	if c.minRTT.rtt == 0 {
		return c.initialWindow
	}
	return int64(gain * bw * c.minRTT.rtt.Seconds())
}

// quantize is the draft's QuantizationBudget.
func (c *Controller) quantize(inflight int64) int64 {
	inflight = max(inflight, int64(c.pacer.quantum()), 2*c.mss, c.minPipe())
	if c.state == ProbeBWUp {
		inflight += 2 * c.mss
	}
	return inflight
}

// target is the draft's Inflight(gain).
func (c *Controller) target(bw, gain float64) int64 { return c.quantize(c.bdp(bw, gain)) }

// maxInflight is the draft's UpdateMaxInflight, but Startup gets nothing extra for
// clumped ACKs: while the rate doubles each round all ACKs seem to come early, and
// what that adds overflows a buffer that just holds the rest.
func (c *Controller) maxInflight() int64 {
	inflight := c.bdp(c.bw(), c.cwndGain)
	inflight = max(inflight, c.resume.window)
	if c.full.reached {
		inflight += c.extra.get()
	}
	return c.quantize(inflight)
}

// setCwnd is the draft's SetCwnd ("cwnd Adjustment Mechanism").
func (c *Controller) setCwnd() {
	most := c.maxInflight()
	switch {
	case c.full.reached:
		c.cwnd = min(c.cwnd+c.rs.acked, most)
	case c.held:
	case c.cwnd < c.resume.window:
		c.cwnd = c.resume.window
	case c.slowStart() && c.isCwndLimited():
		c.cwnd += int64((c.growth() - 1) * float64(c.rs.acked))
	case c.cwnd < most || c.sampler.delivered < c.initialWindow:
		c.cwnd += c.rs.acked
	}
	c.boundCwnd()
}

// slowStart tells whether Startup may grow faster than the draft has it: the ACK
// at hand met no queue. The draft bounds the window by a bandwidth that is
// measured over the last round trip, and so lags; over the first rounds, which
// count most on long paths, by two and a half of them. But a window that was
// paced startupPacingGain times as fast as it lasts, and met no queue, shows that
// the path holds as many such windows: so the window may grow by that factor, and
// still is no larger than what the path holds.
func (c *Controller) slowStart() bool {
	return c.state == Startup && c.pacingGain == startupPacingGain && c.rs.rtt > 0 && c.minRTT.rtt > 0 && c.full.count == 0 &&
		c.rs.rtt <= c.minRTT.rtt+max(c.minRTT.rtt/16, time.Millisecond)
}

// growth is the factor of a round in slow start. After a jump the window was paced
// over the whole round trip, and shows no more than slow start assumes.
func (c *Controller) growth() float64 {
	if c.resume.jumped() {
		return cwndGain
	}
	return startupPacingGain
}

// boundCwnd is the draft's BoundCwndForProbeRTT and BoundCwndForModel.
func (c *Controller) boundCwnd() {
	limit := c.short.inflight
	switch {
	case c.state == ProbeRTT:
		limit = min(limit, c.probeRTTCwnd(), c.inflightWithHeadroom())
	case c.state == ProbeBWCruise:
		limit = min(limit, c.inflightWithHeadroom())
	case c.inProbeBW():
		limit = min(limit, c.long.inflight)
	}
	limit = min(limit, c.resume.limit(c.initialWindow))
	c.cwnd = max(min(c.cwnd, limit), c.minPipe())
}

func (c *Controller) probeRTTCwnd() int64 {
	return max(c.bdp(c.bw(), probeRTTCwndGain), c.minPipe())
}

// inflightWithHeadroom is the draft's InflightWithHeadroom. Where a queue stands
// that draining ours did not empty, others are there, and as they yield by half
// as much again or more when packets are lost, so does this flow.
func (c *Controller) inflightWithHeadroom() int64 {
	if c.long.inflight == infinite {
		return infinite
	}
	share := headroom
	if c.queueStands() {
		share = sharedHeadroom
	}
	room := max(c.mss, int64(share*float64(c.long.inflight)))
	return max(c.long.inflight-room, c.minPipe())
}
