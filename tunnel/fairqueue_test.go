package tunnel

import (
	"testing"
	"testing/synctest"
	"time"
)

func mark(flow, n byte, size int) *datagram {
	b := make([]byte, size)
	b[0], b[1] = flow, n
	return &datagram{at: time.Now(), b: b}
}

func nobody(*datagram) { panic("nothing is late") }

func TestFairQueueTakesTurns(t *testing.T) {
	q := newFairQueue()
	if q.pop(nobody) != nil {
		t.Error("it had something from the start")
	}
	for n := range byte(6) {
		q.push(1, mark(1, n, 1500))
	}
	for n := range byte(4) {
		q.push(2, mark(2, n, 750))
	}
	q.push(3, mark(3, 0, 100))
	<-q.wake
	var got []byte
	for d := q.pop(nobody); d != nil; d = q.pop(nobody) {
		got = append(got, d.b[0]*10+d.b[1])
		if len(got) == 5 {
			q.push(4, mark(4, 0, 1500)) // goes first
		}
	}
	want := []byte{10, 20, 21, 30, 11, 40, 22, 23, 12, 13, 14, 15}
	if string(got) != string(want) {
		t.Errorf("order %v, want %v", got, want)
	}
	if q.count != 0 || len(q.fresh)+len(q.old) != 0 {
		t.Errorf("%d datagrams and %d queues are left", q.count, len(q.fresh)+len(q.old))
	}
	for i := range q.queues {
		if f := &q.queues[i]; f.listed || f.count != 0 || f.head != nil {
			t.Errorf("queue %d is not empty: %+v", i, f)
		}
	}
}

func TestFairQueueIsBounded(t *testing.T) {
	q := newFairQueue()
	for n := range maxQueuedDatagrams {
		if out := q.push(1, mark(1, byte(n), 100)); out != nil {
			t.Fatalf("after %d there was no room", n)
		}
	}
	for n := range byte(10) {
		if out := q.push(2, mark(2, n, 100)); out == nil || out.b[0] != 1 || out.b[1] != n {
			t.Errorf("another flow's datagram %d put out %v, want the flood's oldest", n, out)
		}
	}
	if q.count != maxQueuedDatagrams {
		t.Errorf("holds %d, want %d", q.count, maxQueuedDatagrams)
	}
}

// Who sends little neither waits nor loses anything beside a flood.
func TestFairQueueSparesTheSparse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newFairQueue()
		late := map[byte]int{}
		left := map[byte]int{}
		var longest [3]time.Duration
		for i := range 10000 { // each goes in a millisecond
			q.push(1, mark(1, 0, 1200))
			if i%2 == 0 {
				q.push(1, mark(1, 0, 1200))
			}
			if i%20 == 0 {
				q.push(2, mark(2, 0, 100))
			}
			if d := q.pop(func(d *datagram) { late[d.b[0]]++ }); d != nil {
				left[d.b[0]]++
				if i > 1000 {
					longest[d.b[0]] = max(longest[d.b[0]], time.Since(d.at))
				}
			}
			time.Sleep(time.Millisecond)
		}
		if late[2] != 0 || left[2] != 500 || longest[2] > time.Millisecond {
			t.Errorf("of 500 sparse packets %d left, %d were late, the longest wait was %v", left[2], late[2], longest[2])
		}
		if late[1] < 5000 || left[1] < 9000 || longest[1] > 2*codelMost {
			t.Errorf("of the flood %d left, %d were late, the longest wait was %v", left[1], late[1], longest[1])
		}
	})
}
