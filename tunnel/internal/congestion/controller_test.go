package congestion

import (
	"math/rand/v2"
	"testing"
	"time"
)

func TestFillsPath(t *testing.T) {
	tests := []struct {
		name  string
		mbps  float64
		rtt   time.Duration
		queue float64
		tune  func(p *pathSim)
		least float64 // of the link, once started
	}{
		{"near", 50, 20 * time.Millisecond, 1, nil, 0.95},
		{"far", 20, 200 * time.Millisecond, 1, nil, 0.95},
		{"shallow", 20, 100 * time.Millisecond, 0.1, nil, 0.85},
		{"one in a hundred lost", 20, 100 * time.Millisecond, 1, func(p *pathSim) {
			r := rand.New(rand.NewPCG(1, 1))
			p.lose = func(int64) bool { return r.Float64() < 0.01 }
		}, 0.92},
		{"jitter", 20, 50 * time.Millisecond, 1, func(p *pathSim) {
			r := rand.New(rand.NewPCG(1, 1))
			p.jitter = func(int64) time.Duration { return time.Duration(r.Int64N(int64(5 * time.Millisecond))) }
		}, 0.9},
		{"ACKs in clumps", 20, 20 * time.Millisecond, 1, func(p *pathSim) { p.clump = 10 * time.Millisecond }, 0.9},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newPath(New(Config{MaxDatagramSize: mss, RTT: tt.rtt, Seed: 7}), tt.mbps, tt.rtt, tt.queue)
			if tt.tune != nil {
				tt.tune(p)
			}
			p.run(3 * time.Second)
			if p.c.State() == Startup {
				t.Errorf("still in %v after 3 s", p.c.State())
			}
			between(t, "the share", p.share(10*time.Second), tt.least, 1.01)
			between(t, "the estimate", p.c.maxBW.get()/p.rate, 0.8, 1.3)
		})
	}
}

// TestFirstWindow sends no burst: what leaves before the first ACK is paced.
func TestFirstWindow(t *testing.T) {
	rtt := 200 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 1000, rtt, 1)
	p.run(time.Millisecond)
	if p.sent > 2*minBurst*mss {
		t.Errorf("%d bytes left in the first millisecond", p.sent)
	}
	p.run(rtt / 2)
	if p.sent < p.c.initialWindow {
		t.Errorf("%d bytes left in half a round trip, of %d", p.sent, p.c.initialWindow)
	}
	between(t, "the window", float64(p.c.initialWindow), 0.9*initialRate*rtt.Seconds(), 1.1*initialRate*rtt.Seconds())
}

// TestShortQueue leaves Startup before the queue has cost a second.
func TestShortQueue(t *testing.T) {
	rtt := 200 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 50, rtt, 4)
	p.run(4 * time.Second)
	if p.c.State() == Startup || p.worst > 2*rtt {
		t.Errorf("in %v, the queue was %v", p.c.State(), p.worst)
	}
	p.worst = 0
	p.run(10 * time.Second)
	if p.worst > rtt/2 {
		t.Errorf("later the queue was %v", p.worst)
	}
}

// TestGaps overflows a shallow queue on a long path: what is lost lies together,
// in fewer gaps than a receiver of streams bears, and Startup learns the rate from
// it.
func TestGaps(t *testing.T) {
	rtt := 400 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 200, rtt, 0.1)
	p.run(4 * time.Second)
	if p.dropped < 1000 || p.gaps > 600 {
		t.Errorf("%d packets were dropped, in %d gaps", p.dropped, p.gaps)
	}
	if p.c.State() == Startup {
		t.Error("still in startup")
	}
	between(t, "the estimate", p.c.Bandwidth()/p.rate, 0.9, 1.1)
}

func TestAppLimited(t *testing.T) {
	rtt := 50 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 50, rtt, 1)
	var last Time
	p.supply = func(now Time) bool { // a packet every 10 ms
		if now.Sub(last) < 10*time.Millisecond {
			return false
		}
		last = now
		return true
	}
	rate := p.c.PacingRate()
	p.run(5 * time.Second)
	if p.c.State() != Startup || p.c.PacingRate() < rate {
		t.Errorf("a trickle took the controller from startup to %v, %.0f to %.0f bytes/s", p.c.State(), rate, p.c.PacingRate())
	}
	if _, ok := p.c.Path(); ok {
		t.Error("a trickle tells what the path can do")
	}
	p.supply = nil
	p.run(2 * time.Second)
	bw := p.c.Bandwidth()
	p.supply = func(Time) bool { return false }
	p.run(20 * time.Second)
	if got := p.c.Bandwidth(); got < 0.9*bw {
		t.Errorf("silence took the estimate from %.0f to %.0f", bw, got)
	}
	p.supply = nil
	between(t, "the share after silence", p.share(time.Second), 0.85, 1.01)
	if len(p.c.sampler.ring) > 1<<12 {
		t.Errorf("the ring has %d packets", len(p.c.sampler.ring))
	}
}

func TestRateDrops(t *testing.T) {
	rtt := 50 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 40, rtt, 1)
	p.run(5 * time.Second)
	p.rate /= 4
	p.run(15 * time.Second)
	between(t, "the share", p.share(5*time.Second), 0.85, 1.01)
	between(t, "the estimate", p.c.Bandwidth()/p.rate, 0.7, 1.3)
	p.rate *= 4
	p.run(8 * time.Second)
	between(t, "the share of the old rate", p.share(5*time.Second), 0.85, 1.01)
}

func TestOutage(t *testing.T) {
	rtt := 50 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 20, rtt, 1)
	p.run(3 * time.Second)
	p.lose = func(int64) bool { return true }
	p.run(2 * time.Second) // fills the window, then nothing moves
	// Probes: a packet now and then.
	for range 4 {
		p.send()
		p.run(500 * time.Millisecond)
	}
	p.lose = nil
	for range 4 { // the first that gets through shows that all others are lost
		p.send()
	}
	p.run(rtt + 10*time.Millisecond)
	if p.c.Window() > 12*mss {
		t.Errorf("the window is %d bytes after an outage", p.c.Window())
	}
	p.run(3 * time.Second)
	between(t, "the share afterwards", p.share(3*time.Second), 0.85, 1.01)
}

func TestECN(t *testing.T) {
	rtt := 50 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 20, rtt, 4)
	p.ce = func(wait time.Duration) bool { return wait > 5*time.Millisecond }
	p.run(5 * time.Second)
	if p.c.State() == Startup || p.c.long.inflight == infinite {
		t.Errorf("marks had no effect: %v", p.c.State())
	}
	p.worst = 0
	between(t, "the share", p.share(10*time.Second), 0.85, 1.01)
	if p.worst > 20*time.Millisecond || p.dropped > 0 {
		t.Errorf("the queue was %v, %d packets dropped", p.worst, p.dropped)
	}
}

func TestSpuriousLoss(t *testing.T) {
	c := New(Config{MaxDatagramSize: mss})
	c.full.reached = true
	c.startProbeBWDown()
	c.cwnd = 100 * mss
	now := Time(time.Second)
	for pn := range int64(10) {
		c.OnSent(now, (pn+1)*mss, pn+1, mss, true)
	}
	c.short.bw, c.short.inflight = 1e6, 50*mss
	c.OnLoss(now, 1, mss)
	c.OnLoss(now, 2, mss)
	c.short.bw, c.short.inflight, c.cwnd = 5e5, 20*mss, 20*mss
	c.OnSpuriousLoss(now)
	if c.short.bw != 5e5 {
		t.Error("one of two was enough")
	}
	c.OnSpuriousLoss(now)
	if c.short.bw != 1e6 || c.short.inflight != 50*mss || c.cwnd != 100*mss {
		t.Errorf("not restored: %v %v %v", c.short.bw, c.short.inflight, c.cwnd)
	}
}

func TestProbeRTT(t *testing.T) {
	rtt := 50 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt}), 20, rtt, 4)
	p.run(3 * time.Second)
	p.rtt = 80 * time.Millisecond // another route: no sample is as low as before
	seen := false
	for range 3000 {
		p.run(5 * time.Millisecond)
		seen = seen || p.c.State() == ProbeRTT
	}
	if !seen {
		t.Error("the minimum was never measured anew")
	}
	between(t, "the round trip", p.c.MinRTT().Seconds(), 0.08, 0.09)
	between(t, "the share", p.share(5*time.Second), 0.85, 1.01)
}

// BenchmarkPacket is what a packet costs, from the question whether it may leave
// to its acknowledgement, where 1,000 are in flight and an ACK tells of two.
func BenchmarkPacket(b *testing.B) {
	b.ReportAllocs()
	c := New(Config{MaxDatagramSize: mss, RTT: 10 * time.Millisecond})
	const flying = 1000
	now := Time(time.Second)
	for pn := range int64(b.N) {
		now = now.Add(10 * time.Microsecond)
		inflight := min(pn+1, flying) * mss
		c.CanSend(inflight)
		c.HasPacingBudget(now)
		c.OnSent(now, inflight, pn, mss, true)
		if pn >= flying && pn%2 == 0 {
			c.OnAck(now, pn-flying, mss)
			c.OnAck(now, pn-flying+1, mss)
			c.OnAckEnd(now, inflight-2*mss)
		}
	}
}
