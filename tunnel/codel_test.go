package tunnel

import (
	"math"
	"testing"
	"time"
)

// queue is a link's queue in front of a rate, with a codel.
type queue struct {
	codel
	now  time.Time
	gap  time.Duration // between departures
	at   []time.Time
	wait []time.Duration // of what left
	lost int
}

func newQueue(gap time.Duration) *queue { return &queue{now: time.Unix(1000, 0), gap: gap} }

func (q *queue) put(n int) {
	for range n {
		q.at = append(q.at, q.now)
	}
}

// leave lets one packet go, after as many as are dropped.
func (q *queue) leave() {
	for len(q.at) > 0 {
		waited := q.now.Sub(q.at[0])
		q.at = q.at[1:]
		if !q.drops(waited, q.now, len(q.at) == 0) {
			q.wait = append(q.wait, waited)
			break
		}
		q.lost++
	}
	q.now = q.now.Add(q.gap)
}

func TestCodelSparesBursts(t *testing.T) {
	q := newQueue(time.Millisecond)
	for range 20 {
		q.put(80) // which are gone after 80 ms
		for range 100 {
			q.leave()
		}
	}
	if q.lost != 0 || len(q.wait) != 20*80 {
		t.Errorf("%d packets left, %d were dropped", len(q.wait), q.lost)
	}
}

// One that comes 1.25 times as fast as it goes and does not care is kept short
// all the same.
func TestCodelBoundsAFlood(t *testing.T) {
	q := newQueue(time.Millisecond)
	for i := range 8000 {
		q.put(1)
		if i%4 == 0 {
			q.put(1)
		}
		q.leave()
	}
	late := 0
	for i, w := range q.wait {
		if i > 400 && w > codelMost {
			late++
		}
	}
	if late > len(q.wait)/50 { // a queue that was short may grow for an interval
		t.Errorf("%d of %d packets waited longer than %v", late, len(q.wait), codelMost)
	}
	if share := float64(q.lost) / float64(8000*5/4); math.Abs(share-0.2) > 0.01 {
		t.Errorf("%.3f of them were dropped, want as many as did not fit: 0.2", share)
	}
}

// One that slows down is hardly touched, and does not wait.
func TestCodelTellsThoseWhoListen(t *testing.T) {
	q := newQueue(time.Millisecond)
	window, acks := 100.0, 0
	inFlight := 0
	for range 20000 { // packets come back at once: what is in flight waits here
		for inFlight < int(window) {
			q.put(1)
			inFlight++
		}
		before := q.lost
		q.leave()
		inFlight -= 1 + q.lost - before
		if q.lost > before {
			window = max(window/2, 2)
		} else if acks++; acks >= int(window) {
			window, acks = window+1, 0
		}
	}
	late := 0
	for i, w := range q.wait {
		if i > len(q.wait)/10 && w > codelMost {
			late++
		}
	}
	if share := float64(late) / float64(len(q.wait)); share > 0.05 || q.lost > len(q.wait)/20 {
		t.Errorf("of %d packets %d were dropped and %.3f late", len(q.wait), q.lost, share)
	}
	if len(q.wait) < 19000 {
		t.Errorf("only %d packets left in 20000 ms", len(q.wait))
	}
}

func TestCodelLastPacketGoes(t *testing.T) {
	q := newQueue(time.Second) // each packet takes longer than any bound
	for range 10 {
		q.put(1)
		q.leave()
	}
	if q.lost != 0 {
		t.Errorf("%d packets were dropped", q.lost)
	}
}
