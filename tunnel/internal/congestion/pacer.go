package congestion

import (
	"math"
	"time"
)

// A pacer spreads packets over time (draft, "Pacing Rate" and "Send Quantum"). It
// is a token bucket: timers fire late, and what was missed is made up for.
type pacer struct {
	rate    float64 // bytes a second
	mss     int64
	budget  float64 // at the time below; below zero is debt
	updated Time
	waits   bool          // the budget was used up, and is no quantum yet
	least   time.Duration // of sending that a quantum holds, whatever its size
}

const (
	quantumTime = time.Millisecond
	maxQuantum  = 64 << 10
	// catchUp is how much late timers may leave to make up for.
	catchUp = 2 * time.Millisecond
	// minBurst is the least that may leave at once after silence: as many packets
	// as RFC 9002, section 7.7, allows.
	minBurst = 10
)

// quantum is how much leaves at once.
func (p *pacer) quantum() float64 {
	return max(min(max(p.rate*quantumTime.Seconds(), float64(p.mss)), maxQuantum), p.rate*p.least.Seconds())
}

func (p *pacer) burst() float64 {
	return max(2*p.quantum(), p.rate*catchUp.Seconds(), float64(minBurst*p.mss))
}

func (p *pacer) setRate(rate float64, mss int64) {
	p.rate, p.mss = max(rate, float64(mss)), mss // never slower than a packet a second
}

func (p *pacer) refill(now Time) {
	if p.updated == 0 {
		p.budget = p.burst()
	} else if d := now.Sub(p.updated); d > 0 {
		p.budget = min(p.budget+p.rate*d.Seconds(), p.burst())
	}
	p.updated = max(p.updated, now)
}

func (p *pacer) sent(now Time, size int64) {
	p.refill(now)
	p.budget -= float64(size)
}

// has tells whether a packet may leave. What may leave does so by the quantum: the
// ACKs that wake the sender would else break it up into single packets. That
// costs the sender less, and when a queue overflows, what it drops lies together:
// a gap for each quantum and not for each packet.
func (p *pacer) has(now Time) bool {
	p.refill(now)
	if p.waits && p.budget < p.quantum() {
		return false
	}
	p.waits = p.budget < float64(p.mss)
	return !p.waits
}

// next returns when a quantum may leave, zero if at once. It rounds up, so that
// has agrees then.
func (p *pacer) next() Time {
	if p.updated == 0 || !p.waits && p.budget >= float64(p.mss) || p.budget >= p.quantum() {
		return 0
	}
	wait := (p.quantum() - p.budget) / p.rate
	return p.updated.Add(time.Duration(math.Ceil(wait*1e9)) + 1)
}
