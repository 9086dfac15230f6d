package sidecar

import (
	"context"
	"errors"
	"time"
)

// A silentSession is one that owes an answer for too long.
type silentSession struct {
	*running
	heard time.Time // of it, at last
}

// speaks reports whether it has been heard of since.
func (s *silentSession) speaks() bool {
	at, _ := s.LastReceived()
	return !at.Equal(s.heard)
}

// quiet measures for how long an answer has been owed. What LastReceived says
// of the time before the question does not count.
type quiet struct {
	heard time.Time
	since time.Time // zero where no answer is owed
}

func (q *quiet) after(now, heard time.Time, waiting bool) time.Duration {
	if !waiting || !heard.Equal(q.heard) {
		q.heard, q.since = heard, time.Time{}
	}
	if waiting && q.since.IsZero() {
		q.since = now
	}
	if q.since.IsZero() {
		return 0
	}
	return now.Sub(q.since)
}

// replace connects beside a silent session. It returns nil when the session has
// something to say again, or when it has ended.
func (c *connector) replace(ctx context.Context, s *running, heard time.Time) session {
	old := &silentSession{s, heard}
	c.silent.Store(old)
	defer c.silent.Store(nil)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	won := make(chan session, 1)
	go func() { won <- c.connect(ctx) }()
	tick := time.NewTicker(glance)
	defer tick.Stop()
	ended := s.ended
	for {
		select {
		case next := <-won:
			return next
		case <-ended:
			// It has lost its place now; the search goes on.
			c.drop(s.session)
			ended = nil
		case <-tick.C:
			if ended == nil {
				continue
			}
			if old.speaks() {
				c.fail(nil)
				c.log.Info("the gateway answers again")
				cancel()
				// One that was quicker than that is the one that the gateway knows.
				return <-won
			}
		}
	}
}

// giveWay lets a silent session speak first where the gateway has been reached
// again: the gateway would end it for the new one, and its flows with it. It returns
// an error when the session has spoken.
func (c *connector) giveWay(ctx context.Context) error {
	old := c.silent.Load()
	if old == nil {
		return nil
	}
	limit := time.After(3*glance + 2*old.RTT()) // it asks every glance
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-old.ended:
			return nil
		case <-limit:
			return nil
		case <-tick.C:
			if old.speaks() {
				return errAnswers
			}
		}
	}
}

// errSilent is what is wrong with a session that is owed an answer for too long.
var errSilent = errors.New("the gateway does not answer")

// errAnswers is why a session is not asked for.
var errAnswers = errors.New("the old session answers again")
