package packet

import (
	"testing"
	"time"
)

func TestLimiter(t *testing.T) {
	var l Limiter
	now := time.Unix(1000, 0)
	passed := func(n int) (ok int) {
		for range n {
			if l.Allow(now) {
				ok++
			}
		}
		return ok
	}
	if n := passed(AnswerBurst + 50); n != AnswerBurst {
		t.Errorf("%d at once, want %d", n, AnswerBurst)
	}
	now = now.Add(10 * AnswerInterval)
	if n := passed(50); n != 10 {
		t.Errorf("%d after the time for 10", n)
	}
	now = now.Add(time.Hour)
	if n := passed(AnswerBurst + 50); n != AnswerBurst {
		t.Errorf("%d after a long silence, want %d", n, AnswerBurst)
	}
}
