package sidecar

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	backoffFirst = 250 * time.Millisecond
	// backoffSoon is the longest pause of the first minutes. With its jitter it
	// stays below 4 s, so that a link that is back is used within 5.
	backoffSoon = 2500 * time.Millisecond
	// backoffLate is the longest pause; with its jitter 30 s.
	backoffLate = 20 * time.Second
	// backoffPatience is how long the pauses stay short.
	backoffPatience = 3 * time.Minute
)

// A backoff gives the pauses between the starts of attempts. The zero value is
// ready.
type backoff struct {
	began time.Time
	pause time.Duration
}

// next returns the pause after an attempt that starts now: doubling, give or
// take a half.
func (b *backoff) next(now time.Time) time.Duration {
	if b.began.IsZero() {
		b.began, b.pause = now, backoffFirst
	} else {
		most := backoffSoon
		if now.Sub(b.began) > backoffPatience {
			most = backoffLate
		}
		b.pause = min(2*b.pause, most)
	}
	return b.pause/2 + rand.N(b.pause)
}

// sleep waits, or returns early when ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// kick puts a value into a channel that holds one.
func kick(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
