package install

import (
	"math"
	"time"

	"github.com/quic-go/quic-go"
)

// cubicAlgorithm is CUBIC (RFC 9438) as a TCP would have it: no pacing, slow
// start to the first loss.
type cubicAlgorithm struct {
	mss                  int64
	window, threshold    float64 // packets
	max, k               float64
	epoch                int64
	reno                 float64
	largestSent, cutback int64
	srtt                 int64
	sent                 map[int64]int64
}

func installCubic(conn *quic.Conn) {
	g := &target{conn: conn, handle: &Handle{}}
	g.make = func(size int64) sendAlgorithm {
		return &cubicAlgorithm{mss: size, window: 10, threshold: math.Inf(1), cutback: -1, sent: map[int64]int64{}}
	}
	conn.QlogTrace().(*trace).target.Store(g)
}

func (c *cubicAlgorithm) OnPacketSent(now, _, pn, _ int64, eliciting bool) {
	if eliciting {
		c.largestSent = pn
		c.sent[pn] = now
	}
}

func (c *cubicAlgorithm) OnPacketAcked(pn, _, prior, now int64) {
	if t, ok := c.sent[pn]; ok {
		delete(c.sent, pn)
		if c.srtt == 0 {
			c.srtt = now - t
		}
		c.srtt += (now - t - c.srtt) / 8
	}
	if pn <= c.cutback || prior < c.GetCongestionWindow()*9/10 {
		return
	}
	if c.window < c.threshold {
		c.window++
		return
	}
	if c.epoch == 0 {
		c.epoch = now
		c.reno = c.window
		c.max = max(c.max, c.window)
		c.k = math.Cbrt((c.max - c.window) / 0.4)
	}
	t := time.Duration(now - c.epoch + c.srtt).Seconds()
	target := min(max(0.4*math.Pow(t-c.k, 3)+c.max, c.window), 1.5*c.window)
	c.window += (target - c.window) / c.window
	c.reno += 0.53 / c.reno
	c.window = max(c.window, c.reno)
}

func (c *cubicAlgorithm) OnCongestionEvent(pn, _, _ int64) {
	delete(c.sent, pn)
	if pn <= c.cutback {
		return
	}
	c.cutback = c.largestSent
	if c.window < c.max {
		c.max = c.window * 1.7 / 2 // fast convergence
	} else {
		c.max = c.window
	}
	c.window = max(c.window*0.7, 2)
	c.threshold = c.window
	c.epoch = 0
}

func (c *cubicAlgorithm) TimeUntilSend(int64) int64    { return 0 }
func (c *cubicAlgorithm) HasPacingBudget(int64) bool   { return true }
func (c *cubicAlgorithm) CanSend(inflight int64) bool  { return inflight < c.GetCongestionWindow() }
func (c *cubicAlgorithm) MaybeExitSlowStart()          {}
func (c *cubicAlgorithm) OnSpuriousLoss(int64)         {}
func (c *cubicAlgorithm) OnRetransmissionTimeout(bool) {}
func (c *cubicAlgorithm) SetMaxDatagramSize(s int64)   { c.mss = s }
func (c *cubicAlgorithm) InSlowStart() bool            { return c.window < c.threshold }
func (c *cubicAlgorithm) InRecovery() bool             { return false }
func (c *cubicAlgorithm) GetCongestionWindow() int64   { return int64(c.window) * c.mss }
