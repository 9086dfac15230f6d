package packet

import (
	"sync/atomic"
	"time"
)

// A Limiter lets answers through at a rate, and a burst of them before: those
// who send ICMP errors must limit them (RFC 1812 section 4.3.2.8, RFC 4443
// section 2.4(f)). The zero value is ready; it is safe for concurrent use.
type Limiter struct {
	// next is when the answers so far will have used up the rate, in Unix
	// nanoseconds.
	next atomic.Int64
}

const (
	// AnswerInterval is the time for one answer at a Limiter's rate, AnswerBurst
	// the number that it lets through at once.
	AnswerInterval = 10 * time.Millisecond
	AnswerBurst    = 100
)

// Allow reports whether one more answer may go out at a time, and counts it.
func (l *Limiter) Allow(at time.Time) bool {
	now := at.UnixNano()
	for {
		next := l.next.Load()
		from := max(next, now)
		if from-now > int64(AnswerInterval)*(AnswerBurst-1) {
			return false
		}
		if l.next.CompareAndSwap(next, from+int64(AnswerInterval)) {
			return true
		}
	}
}
