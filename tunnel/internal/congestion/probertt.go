package congestion

// checkProbeRTT is the draft's CheckProbeRTT ("ProbeRTT Logic").
func (c *Controller) checkProbeRTT() {
	if c.state != ProbeRTT && c.minRTT.expired && !c.idle {
		c.saveCwnd()
		c.state = ProbeRTT
		c.pacingGain, c.cwndGain = 1, probeRTTCwndGain
		c.probeRTTDone = 0
		c.cycle.phase = acksProbeStopping
		c.startRound()
	}
	if c.state == ProbeRTT {
		c.handleProbeRTT()
	}
	if c.rs.delivered > 0 {
		c.idle = false
	}
}

func (c *Controller) handleProbeRTT() {
	c.sampler.markAppLimited(c.inflight) // samples are low on purpose
	switch {
	case c.probeRTTDone == 0:
		if c.inflight <= c.probeRTTCwnd() {
			c.probeRTTDone = c.now.Add(probeRTTDuration)
			c.probeRTTFull = false
			c.startRound()
		}
	default:
		c.probeRTTFull = c.probeRTTFull || c.round.start
		if c.probeRTTFull {
			c.checkProbeRTTDone()
		}
	}
}

func (c *Controller) checkProbeRTTDone() {
	if c.probeRTTDone == 0 || c.now <= c.probeRTTDone {
		return
	}
	c.minRTT.probeStamp = c.now
	c.restoreCwnd()
	c.resetShortTerm()
	if !c.full.reached {
		c.enterStartup()
		return
	}
	c.startProbeBWDown()
	c.setProbeBW(ProbeBWCruise, 1, cwndGain)
}
