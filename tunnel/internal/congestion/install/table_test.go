//go:build !race

// The race detector makes minutes of these, and finds no more than in one
// connection (install_test.go).

package install

import (
	"fmt"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// TestTable prints what telling links carry, for people, and asserts ranges. The
// queue holds a bandwidth-delay product and drops at its tail. Run with -v.
func TestTable(t *testing.T) {
	tests := []struct {
		mbps, ms, loss float64
		saved          bool
		least          float64 // of the link, over all of the run
	}{
		{200, 200, 0, false, 0.82},
		{200, 200, 0, true, 0.87},
		{200, 200, 0.001, false, 0.80},
		{200, 200, 0.01, false, 0.76},
		{10, 100, 0, false, 0.92},
		{10, 100, 0.01, false, 0.90},
		{50, 300, 0, false, 0.77},
		{50, 300, 0.01, false, 0.73},
		{200, 1, 0, false, 0.95},
		{200, 1, 0.01, false, 0.93},
	}
	t.Log("| Mbit/s | ms one way | loss % | resumed | share % | last third % | NewReno % | lost by the queue in start-up | queue p95 ms |")
	for _, tt := range tests {
		s := scenario{forward: path(tt.mbps, tt.ms, 1, tt.loss), duration: 12 * time.Second, seed: 42}
		f := flow{control: model}
		if tt.saved {
			f.saved = congestion.Path{RTT: 2 * s.forward.Delay, Bandwidth: s.forward.Rate}
		}
		s.flows = []flow{f}
		r := simulate(t, s)[0]
		s.flows = []flow{{control: stock}}
		reno := simulate(t, s)[0]
		row := fmt.Sprintf("| %.0f | %.0f | %.1f | %v | %.1f | %.1f | %.1f | %d | %d |", tt.mbps, tt.ms, 100*tt.loss, tt.saved,
			100*r.share, 100*r.late, 100*reno.share, r.startup, r.p95().Milliseconds())
		t.Log(row)
		if r.share < tt.least {
			t.Errorf("less than %.0f %%: %s", 100*tt.least, row)
		}
		if r.share < reno.share-0.02 {
			t.Errorf("less than NewReno: %s", row)
		}
	}
}

// TestFairness shares a bottleneck, whose queue holds a bandwidth-delay product
// or more, between two flows. Chance is large: the ranges only find starvation.
func TestFairness(t *testing.T) {
	tests := []struct {
		name            string
		mbps, ms, queue float64
		flows           []flow
		least           float64 // of the last third, for the weaker
	}{
		{"two of ours", 20, 50, 1, []flow{{control: model}, {control: model}}, 0.3},
		{"two of ours", 100, 10, 1, []flow{{control: model}, {control: model}}, 0.3},
		{"two of ours", 50, 25, 4, []flow{{control: model}, {control: model}}, 0.3},
		{"one 5 s later", 50, 25, 1, []flow{{control: model}, {control: model, start: 5 * time.Second}}, 0.2},
		{"and CUBIC", 100, 10, 1, []flow{{control: model}, {control: cubic}}, 0.25},
		{"and CUBIC", 20, 50, 1, []flow{{control: model}, {control: cubic}}, 0.12},
		{"and CUBIC", 50, 25, 1, []flow{{control: model}, {control: cubic}}, 0.12},
		{"and CUBIC", 50, 25, 4, []flow{{control: model}, {control: cubic}}, 0.2},
		{"after CUBIC", 50, 25, 1, []flow{{control: cubic}, {control: model, start: 5 * time.Second}}, 0.2},
	}
	t.Log("| flows | Mbit/s | ms one way | queue, BDP | first % | second % | last third: first % | second % | queue p95 ms |")
	for _, tt := range tests {
		s := scenario{forward: path(tt.mbps, tt.ms, tt.queue, 0), flows: tt.flows, duration: 30 * time.Second, seed: 42}
		r := simulate(t, s)
		row := fmt.Sprintf("| %s | %.0f | %.0f | %.0f | %.1f | %.1f | %.1f | %.1f | %d |", tt.name, tt.mbps, tt.ms, tt.queue,
			100*r[0].share, 100*r[1].share, 100*r[0].late, 100*r[1].late, r[0].p95().Milliseconds())
		t.Log(row)
		if min(r[0].late, r[1].late) < tt.least {
			t.Errorf("one is starved: %s", row)
		}
		if r[0].late+r[1].late < 0.9 {
			t.Errorf("the link is not full: %s", row)
		}
	}
}

// TestHarder has what real links have: jitter, clumped ACKs, a shallow buffer, a
// rate that changes.
func TestHarder(t *testing.T) {
	tests := []struct {
		name            string
		mbps, ms, queue float64
		tune            func(s *scenario)
		least           float64
	}{
		{"5 ms of jitter", 50, 10, 1, func(s *scenario) { s.forward.Jitter = 5 * time.Millisecond }, 0.9},
		{"ACKs in clumps of 10 ms", 50, 10, 1, func(s *scenario) { s.back.Clump = 10 * time.Millisecond }, 0.9},
		{"a tenth of the BDP", 50, 25, 0.1, nil, 0.85},
		{"a tenth of the BDP", 20, 100, 0.1, nil, 0.82},
		{"half the rate in between", 50, 50, 1, func(s *scenario) {
			s.change = map[time.Duration]float64{7 * time.Second: s.forward.Rate / 2, 14 * time.Second: s.forward.Rate}
		}, 0.6},
	}
	t.Log("| link | Mbit/s | ms one way | share % | NewReno % | lost by the queue | queue p95 ms |")
	for _, tt := range tests {
		s := scenario{forward: path(tt.mbps, tt.ms, tt.queue, 0), flows: []flow{{control: model}}, duration: 20 * time.Second, seed: 42}
		if tt.tune != nil {
			tt.tune(&s)
		}
		r := simulate(t, s)[0]
		s.flows = []flow{{control: stock}}
		reno := simulate(t, s)[0]
		row := fmt.Sprintf("| %s | %.0f | %.0f | %.1f | %.1f | %d | %d |", tt.name, tt.mbps, tt.ms, 100*r.share, 100*reno.share, r.dropped, r.p95().Milliseconds())
		t.Log(row)
		if r.share < tt.least {
			t.Errorf("less than %.0f %%: %s", 100*tt.least, row)
		}
	}
}

// TestOvershoot starts on long links with shallow buffers. What start-up sends too
// much there must not open more gaps in a stream than quic-go's receiver keeps,
// which is 1,000: it ends the connection.
func TestOvershoot(t *testing.T) {
	t.Log("| Mbit/s | ms one way | queue, BDP | share % | lost % | start-up | queue p95 ms |")
	tests := []struct {
		mbps, ms, queue float64
		seed            uint64
	}{
		{500, 200, 0.1, 40}, // more than that needs more packets in flight than quic-go keeps
		{200, 200, 0.1, 40},
		{200, 200, 0.1, 41},
		{300, 100, 0.05, 40},
	}
	for _, tt := range tests {
		s := scenario{forward: path(tt.mbps, tt.ms, tt.queue, 0), flows: []flow{{control: model}}, duration: 10 * time.Second, seed: tt.seed}
		r := simulate(t, s)[0]
		row := fmt.Sprintf("| %.0f | %.0f | %.2f | %.1f | %.2f | %d | %d |", tt.mbps, tt.ms, tt.queue,
			100*r.share, 100*float64(r.lost)/float64(r.sent), r.startup, r.p95().Milliseconds())
		t.Log(row)
		if r.err != nil {
			t.Errorf("%v: %s", r.err, row)
		}
	}
}
