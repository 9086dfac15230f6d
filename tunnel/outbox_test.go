package tunnel

import (
	"testing"
	"time"
)

func TestOutboxFollowsThePath(t *testing.T) {
	const mbit = 1e6 / 8
	for name, tt := range map[string]struct {
		rate, known float64 // bytes a second
		rtt         time.Duration
		want        int
	}{
		"near":            {1000 * mbit, 0, time.Millisecond, 1000 * mbit * 26 / 1000},
		"far":             {200 * mbit, 200 * mbit, 400 * time.Millisecond, 200 * mbit * 425 / 1000},
		"slow":            {1 * mbit, 1 * mbit, 100 * time.Millisecond, minOutbox},
		"farther":         {1000 * mbit, 1000 * mbit, 600 * time.Millisecond, maxOutbox},
		"a burst":         {1000 * mbit, 100 * mbit, 100 * time.Millisecond, 200 * mbit * 125 / 1000},
		"a part of it":    {50 * mbit, 200 * mbit, 100 * time.Millisecond, 50 * mbit * 125 / 1000},
		"nothing in time": {0, 200 * mbit, 100 * time.Millisecond, minOutbox},
	} {
		var o outbox
		took := time.Hour
		if tt.rate > 0 {
			took = time.Duration(chunkSize / tt.rate * float64(time.Second))
		}
		o.setRate(chunkSize, took, tt.rtt, tt.known)
		if o.limit < tt.want*99/100 || o.limit > tt.want*101/100 {
			t.Errorf("%s: holds %d bytes, want %d", name, o.limit, tt.want)
		}
	}
}

// A pause takes from the bound no more than has left the outbox.
func TestOutboxLimitFallsSlowly(t *testing.T) {
	o := outbox{limit: 10 << 20}
	for i := 1; i <= 4; i++ {
		o.setRate(chunkSize, time.Minute, 400*time.Millisecond, 25e6)
		if want := 10<<20 - i*chunkSize; o.limit != want {
			t.Errorf("after %d slow chunks it holds %d bytes, want %d", i, o.limit, want)
		}
	}
	before := o.limit
	o.setRate(100, time.Microsecond, time.Second, 0) // says nothing
	if o.limit != before {
		t.Errorf("after a short write it holds %d bytes, want %d", o.limit, before)
	}
}
