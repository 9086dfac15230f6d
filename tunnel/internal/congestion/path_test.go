package congestion

import (
	"testing"
	"time"
)

const mss = 1200

// A pathSim is a bottleneck with a drop-tail queue, a round trip and an ACK for
// every other packet, in virtual time. It drives a Controller as a transport
// would.
type pathSim struct {
	c *Controller

	rate   float64 // bytes a second
	rtt    time.Duration
	queue  int64                         // bytes
	lose   func(pn int64) bool           // packets that vanish; nil loses none
	ce     func(wait time.Duration) bool // queueing delays that are marked
	supply func(now Time) bool           // whether there is data; nil always
	jitter func(pn int64) time.Duration
	clump  time.Duration // ACKs wait for the next multiple

	now      Time
	free     Time // when the queue is empty
	next     int64
	inflight int64
	flying   []simPacket // in order of arrival
	sent     int64       // bytes
	acked    int64
	dropped  int64 // packets
	gaps     int   // runs of dropped packets
	dropping bool
	worst    time.Duration
}

type simPacket struct {
	pn   int64
	ack  Time // when its ACK comes; zero: lost
	sent Time
	ce   bool
}

func newPath(c *Controller, mbps float64, rtt time.Duration, bdps float64) *pathSim {
	p := &pathSim{c: c, rate: mbps * 1e6 / 8, rtt: rtt, now: Time(time.Second), next: 1}
	p.queue = int64(bdps * p.rate * rtt.Seconds())
	return p
}

// run lets d pass.
func (p *pathSim) run(d time.Duration) {
	const step = 200 * time.Microsecond
	for end := p.now.Add(d); p.now < end; p.now = p.now.Add(step) {
		p.receive()
		p.transmit()
	}
}

func (p *pathSim) transmit() {
	for p.c.CanSend(p.inflight) && p.c.HasPacingBudget(p.now) {
		if p.supply != nil && !p.supply(p.now) {
			p.c.OnAppLimited(p.inflight)
			return
		}
		p.send()
	}
}

func (p *pathSim) send() {
	pn := p.next
	p.next++
	p.inflight += mss
	p.sent += mss
	p.c.OnSent(p.now, p.inflight, pn, mss, true)
	wait := max(0, p.free.Sub(p.now))
	dropping := p.dropping
	p.dropping = false
	f := simPacket{pn: pn, sent: p.now, ce: p.ce != nil && p.ce(wait)}
	switch {
	case p.lose != nil && p.lose(pn):
	case int64(wait.Seconds()*p.rate)+mss > p.queue:
		p.dropped++
		p.dropping = true
		if !dropping {
			p.gaps++
		}
	default:
		p.free = max(p.free, p.now).Add(time.Duration(mss / p.rate * 1e9))
		f.ack = p.free.Add(p.rtt)
		p.worst = max(p.worst, wait)
		if p.jitter != nil {
			f.ack = f.ack.Add(p.jitter(pn))
		}
		if p.clump > 0 {
			f.ack = Time(int64(f.ack)/int64(p.clump)*int64(p.clump)) + Time(p.clump)
		}
	}
	p.flying = append(p.flying, f)
}

// receive tells of the ACKs that came by now, all in one if they came in one
// step. A packet is lost when one that was sent three later was acknowledged.
func (p *pathSim) receive() {
	var acks []simPacket
	rest := p.flying[:0]
	for _, f := range p.flying {
		if f.ack != 0 && f.ack <= p.now {
			acks = append(acks, f)
		} else {
			rest = append(rest, f)
		}
	}
	p.flying = rest
	if len(acks) == 0 {
		return
	}
	largest := acks[len(acks)-1].pn
	rest = p.flying[:0]
	for _, f := range p.flying {
		if f.ack == 0 && f.pn+3 <= largest {
			p.inflight -= mss
			p.c.OnLoss(p.now, f.pn, mss)
		} else {
			rest = append(rest, f)
		}
	}
	p.flying = rest
	for _, f := range acks {
		if f.ce {
			p.c.OnECN(p.now)
			break
		}
	}
	for _, f := range acks {
		p.inflight -= mss
		p.acked += mss
		p.c.OnAck(p.now, f.pn, mss)
	}
	p.c.OnAckEnd(p.now, p.inflight)
}

// share runs for d and returns what was acknowledged of what the path could carry.
func (p *pathSim) share(d time.Duration) float64 {
	before := p.acked
	p.run(d)
	return float64(p.acked-before) / (p.rate * d.Seconds())
}

func between(t *testing.T, what string, got, low, high float64) {
	t.Helper()
	if got < low || got > high {
		t.Errorf("%s is %.3f, not between %.3f and %.3f", what, got, low, high)
	}
}
