package tunnel

import (
	"math"
	"time"
)

const (
	// A queue that is never shorter than codelTarget for codelInterval does not
	// swallow a burst: it stands (RFC 8289, section 4).
	codelTarget   = 5 * time.Millisecond
	codelInterval = 100 * time.Millisecond
	// codelMost is the longest that anything waits in a queue that stands.
	codelMost = 20 * time.Millisecond
)

// A codel keeps the wait in a queue short by dropping from its head, as CoDel does
// (RFC 8289, section 5): seldom at first, so that senders who listen slow down.
// Others do not: unlike there, whatever waited for longer than codelMost goes too.
type codel struct {
	full     time.Time // when the queue will have stood for an interval; zero while it does not
	dropping bool
	next     time.Time // drop, while dropping
	count    int       // drops since dropping began
	last     int       // count when it began
}

// drops reports whether a packet that leaves the queue's head is dropped. alone
// says that none is behind it.
func (c *codel) drops(waited time.Duration, now time.Time, alone bool) bool {
	switch {
	case waited < codelTarget || alone:
		c.full, c.dropping = time.Time{}, false
		return false
	case c.full.IsZero():
		c.full = now.Add(codelInterval)
		return false
	case now.Before(c.full):
		return false
	case !c.dropping:
		c.dropping = true
		// A queue that stands again soon needs what was right before.
		before := c.count - c.last
		c.count = 1
		if before > 1 && now.Sub(c.next) < 16*codelInterval {
			c.count = before
		}
		c.last = c.count
		c.next = c.after(now)
		return true
	case waited > codelMost:
		return true
	case now.Before(c.next):
		return false
	}
	c.count++
	c.next = c.after(c.next)
	return true
}

// after is the control law of RFC 8289, section 5.1.
func (c *codel) after(t time.Time) time.Time {
	return t.Add(time.Duration(float64(codelInterval) / math.Sqrt(float64(c.count))))
}
