package linksim

import (
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

const mbit = 1e6 / 8

// offer sends packets of 1,000 bytes at a rate for a while, and returns how many
// arrived, when the first did, and the longest pause between two.
func offer(t *testing.T, cfg Config, rate float64, d time.Duration) (sent, arrived int, first, pause time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		there, back := New(cfg), New(Config{Rate: cfg.Rate, Queue: 1 << 20})
		a, b := Connect(there, back, 1)
		begin := time.Now()
		done := make(chan struct{})
		go func() {
			defer close(done)
			last := time.Now()
			for {
				n, from, err := b.ReadFrom(make([]byte, 2000))
				if err != nil {
					return
				}
				if n != 1000 || from.String() != a.LocalAddr().String() {
					t.Errorf("%d bytes from %v", n, from)
				}
				if arrived == 0 {
					first = time.Since(begin)
				} else {
					pause = max(pause, time.Since(last))
				}
				last = time.Now()
				arrived++
			}
		}()
		for time.Since(begin) < d {
			a.WriteTo(make([]byte, 1000), nil)
			sent++
			time.Sleep(time.Duration(1000 / rate * 1e9))
		}
		there.Close()
		back.Close()
		a.Close()
		b.Close()
		<-done
	})
	return sent, arrived, first, pause
}

func TestLink(t *testing.T) {
	plain := Config{Rate: 8 * mbit, Delay: 50 * time.Millisecond, Queue: 20_000}
	with := func(change func(*Config)) Config {
		c := plain
		change(&c)
		return c
	}
	for name, tt := range map[string]struct {
		cfg         Config
		rate        float64 // offered
		least, most float64 // share of the link's rate that arrives
		first       time.Duration
	}{
		"half of it":    {plain, 4 * mbit, 0.499, 0.501, 51 * time.Millisecond},
		"twice as much": {plain, 16 * mbit, 0.99, 1.01, 51 * time.Millisecond},
		"losses":        {with(func(c *Config) { c.Loss = 0.1 }), 4 * mbit, 0.44, 0.46, 0},
		"bursts":        {with(func(c *Config) { c.Burst = Burst{Begin: 0.01, End: 0.19, Loss: 1} }), 4 * mbit, 0.46, 0.49, 0},
		"jitter":        {with(func(c *Config) { c.Jitter = 5 * time.Millisecond }), 4 * mbit, 0.499, 0.501, 0},
		"policer":       {with(func(c *Config) { c.Police = 10_000 }), 16 * mbit, 0.99, 1.02, 50 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			const d = 20 * time.Second
			_, arrived, first, _ := offer(t, tt.cfg, tt.rate, d)
			share := float64(arrived) * 1000 / (tt.cfg.Rate * d.Seconds())
			if share < tt.least || share > tt.most {
				t.Errorf("%.3f of the rate arrives, want %.3f to %.3f", share, tt.least, tt.most)
			}
			if tt.first != 0 && first != tt.first {
				t.Errorf("the first packet arrives after %v, want %v", first, tt.first)
			}
		})
	}
}

func TestClump(t *testing.T) {
	_, _, _, pause := offer(t, Config{Rate: 8 * mbit, Queue: 1 << 20, Clump: 10 * time.Millisecond}, 8*mbit, time.Second)
	if pause != 10*time.Millisecond {
		t.Errorf("the longest pause is %v, want that of a clump", pause)
	}
}

func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, back := New(Config{Rate: 1e6, Queue: 10_000}), New(Config{Rate: 1e6, Queue: 10_000})
		a, b := Connect(l, back, 1)
		for range 20 {
			a.WriteTo(make([]byte, 1000), nil)
		}
		if sent, dropped := l.Packets(); sent != 20 || dropped != 10 {
			t.Errorf("%d of %d packets were dropped, want 10 of 20", dropped, sent)
		}
		if wait := l.Wait(); wait != 10*time.Millisecond {
			t.Errorf("the queue is %v long, want 10 ms", wait)
		}
		l.SetRate(0.5e6)
		time.Sleep(5 * time.Millisecond)
		a.WriteTo(make([]byte, 1000), nil)
		if wait := l.Wait(); wait != 7*time.Millisecond {
			t.Errorf("the queue is %v long at the new rate, want 7 ms", wait)
		}
		l.Close()
		back.Close()
		for { // what has arrived
			b.SetReadDeadline(time.Now().Add(time.Millisecond))
			if _, _, err := b.ReadFrom(make([]byte, 1000)); errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		b.Close()
		if _, _, err := b.ReadFrom(nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("read %v after Close", err)
		}
		if _, err := b.WriteTo(nil, nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("write %v after Close", err)
		}
		a.Close()
	})
}
