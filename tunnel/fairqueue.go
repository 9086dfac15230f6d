package tunnel

import (
	"sync"
	"time"
)

const (
	// maxQueuedDatagrams holds what goes within codelMost at half a gigabit a second.
	maxQueuedDatagrams = 1024
	// fairQueues take turns; flows that share one by chance share its fate.
	fairQueues = 32
	// fairQuantum is how many bytes a queue may send in its turn.
	fairQuantum = 1500
)

// A fairQueue holds datagrams until quic-go takes them. Each flow has a queue of its
// own by a hash, and the queues take turns (FQ-CoDel, RFC 8290): a flood delays and
// loses its own packets, and not the pings and queries for names beside it. A queue
// that was empty is served first.
type fairQueue struct {
	wake chan struct{} // receives a value when there is something to pop

	mu     sync.Mutex // guards what follows
	queues [fairQueues]flowQueue
	fresh  []*flowQueue // that were empty when their turn before ended
	old    []*flowQueue // the next turn first
	count  int          // of datagrams
}

// A flowQueue is the queue of a hash value. It is in one of the lists, or in none.
type flowQueue struct {
	head, tail *datagram
	count      int
	credit     int // bytes that it may send
	listed     bool
	aqm        codel
}

type datagram struct {
	at   time.Time
	b    []byte
	next *datagram
}

func newFairQueue() *fairQueue { return &fairQueue{wake: make(chan struct{}, 1)} }

// push adds a datagram. Where there is no room it returns the one that makes way,
// the oldest of the longest queue.
func (q *fairQueue) push(flow uint32, d *datagram) (out *datagram) {
	q.mu.Lock()
	defer q.mu.Unlock()
	f := &q.queues[flow%fairQueues]
	if f.head == nil {
		f.head = d
	} else {
		f.tail.next = d
	}
	f.tail = d
	f.count++
	if !f.listed {
		f.listed, f.credit = true, fairQuantum
		q.fresh = append(q.fresh, f)
	}
	if q.count++; q.count > maxQueuedDatagrams {
		longest := f
		for i := range q.queues {
			if q.queues[i].count > longest.count {
				longest = &q.queues[i]
			}
		}
		out = q.takeLocked(longest)
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
	return out
}

// pop returns the datagram whose turn it is, nil if there is none. What has waited
// for too long it hands to late.
func (q *fairQueue) pop(late func(*datagram)) *datagram {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	for {
		list := &q.fresh
		if len(*list) == 0 {
			list = &q.old
		}
		if len(*list) == 0 {
			return nil
		}
		f := (*list)[0]
		if f.credit > 0 {
			for d := q.takeLocked(f); d != nil; d = q.takeLocked(f) {
				if !f.aqm.drops(now.Sub(d.at), now, f.head == nil) {
					f.credit -= len(d.b)
					return d
				}
				late(d)
			}
		}
		*list = append((*list)[:0], (*list)[1:]...)
		switch {
		case f.head != nil:
			f.credit += fairQuantum
			q.old = append(q.old, f)
		case list == &q.fresh:
			q.old = append(q.old, f) // so that nobody is always fresh
		default:
			f.listed = false
		}
	}
}

// takeLocked takes the oldest datagram of a queue, or nil.
func (q *fairQueue) takeLocked(f *flowQueue) *datagram {
	d := f.head
	if d != nil {
		f.head, d.next = d.next, nil
		f.count--
		q.count--
	}
	return d
}
