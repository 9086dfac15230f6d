package congestion

import (
	"testing"
	"time"
)

// start returns the share of the first second, and the path.
func start(saved Path, mbps float64, rtt time.Duration, queue float64) (float64, *pathSim) {
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt, Saved: saved}), mbps, rtt, queue)
	return p.share(8 * rtt), p
}

func TestResume(t *testing.T) {
	rtt := 200 * time.Millisecond
	bw := 100e6 / 8
	fresh, _ := start(Path{}, 100, rtt, 1)
	tests := []struct {
		name   string
		saved  Path
		tried  bool
		failed bool
		faster bool
	}{
		{"the same path", Path{rtt, bw}, true, false, true},
		{"a slower path then", Path{rtt, bw / 3}, false, false, false},
		{"a shorter path then", Path{rtt / 20, bw}, false, false, false},
		{"a longer path then", Path{3 * rtt, bw}, false, false, false},
		{"a path ten times as fast then", Path{rtt, 10 * bw}, true, true, false},
		{"nonsense", Path{rtt, -1}, false, false, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			share, p := start(tt.saved, 100, rtt, 1)
			if tried, failed := p.c.Resumed(); tried != tt.tried || failed != tt.failed {
				t.Errorf("tried %v, failed %v", tried, failed)
			}
			if tt.faster && share < fresh+0.05 {
				t.Errorf("a share of %.2f, afresh %.2f", share, fresh)
			}
			if !tt.failed && share < fresh-0.05 {
				t.Errorf("a share of %.2f, afresh %.2f", share, fresh)
			}
			p.run(2 * time.Second)
			between(t, "the share later", p.share(2*time.Second), 0.9, 1.01)
			learned, ok := p.c.Path()
			if !ok || learned.RTT != p.c.MinRTT() {
				t.Fatalf("learned %+v, %v", learned, ok)
			}
			between(t, "the learned bandwidth", learned.Bandwidth/bw, 0.9, 1.1)
		})
	}
}

// TestResumeWaits does not jump while the flow has little to send, nor keeps what
// it did not use.
func TestResumeWaits(t *testing.T) {
	rtt := 100 * time.Millisecond
	p := newPath(New(Config{MaxDatagramSize: mss, RTT: rtt, Saved: Path{rtt, 100e6 / 8}}), 100, rtt, 1)
	var last Time
	p.supply = func(now Time) bool {
		if now.Sub(last) < 20*time.Millisecond {
			return false
		}
		last = now
		return true
	}
	p.run(2 * time.Second)
	if tried, _ := p.c.Resumed(); tried || p.c.Window() > 2*p.c.initialWindow {
		t.Errorf("tried %v, a window of %d", tried, p.c.Window())
	}
}
