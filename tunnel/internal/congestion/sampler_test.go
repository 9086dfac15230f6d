package congestion

import (
	"testing"
	"time"
)

func TestSampler(t *testing.T) {
	var s sampler
	at := func(ms int) Time { return Time(time.Second).Add(time.Duration(ms) * time.Millisecond) }
	// Ten packets, one each millisecond; ACKs 50 ms later, two at a time.
	for i := range 10 {
		s.sent(at(i), int64(i+5), 1000, int64(i+1)*1000)
	}
	var rs sample
	for i := 0; i < 10; i += 2 {
		rs = sample{}
		s.acked(at(51+i), int64(i+5), 1000, &rs)
		s.acked(at(51+i), int64(i+6), 1000, &rs)
		s.generate(0, &rs)
	}
	if rs.rtt != 50*time.Millisecond || rs.delivered != 10000 || rs.acked != 2000 {
		t.Errorf("sample %+v", rs)
	}
	// The first flight is measured from its first packet on.
	if got, want := rs.rate, 10000/0.059; got < want*0.99 || got > want*1.01 {
		t.Errorf("rate %.0f, not %.0f", got, want)
	}
	if s.find(5) != nil {
		t.Error("a delivered packet is still in flight")
	}
}

func TestSamplerNumbers(t *testing.T) {
	var s sampler
	now := Time(time.Second)
	s.sent(now, 1000, 100, 100)
	s.sent(now, 1003, 100, 200) // skipped numbers
	if s.find(1001) != nil || s.find(1003) == nil || s.find(999) != nil || s.find(1004) != nil {
		t.Error("found what was not sent, or lost what was")
	}
	for pn := int64(1004); pn < 1004+3*maxRing; pn++ { // nothing is ever acknowledged
		s.sent(now, pn, 100, 100*pn)
	}
	if len(s.ring) != maxRing || s.find(1003) != nil {
		t.Errorf("a ring of %d", len(s.ring))
	}
	s.sent(now, 1<<40, 100, 100)
	if s.find(1<<40) == nil || s.find(1004+3*maxRing-1) != nil {
		t.Error("a jump in the numbers keeps what is old")
	}
	var rs sample
	s.acked(now, 12345, 100, &rs) // unknown
	s.generate(0, &rs)
	if rs.ok || rs.rate != 0 || rs.acked != 100 {
		t.Errorf("sample of an unknown packet %+v", rs)
	}
}

func TestSamplerForgets(t *testing.T) {
	var s sampler
	now := Time(time.Second)
	for pn := range int64(5000) {
		s.sent(now, pn, 100, 100*(pn+1))
	}
	var rs sample
	later := now.Add(10 * time.Second)
	s.sent(later, 5000, 100, 100)
	s.acked(later.Add(time.Millisecond), 5000, 100, &rs)
	s.generate(0, &rs)
	s.forget(later.Add(time.Millisecond), 50*time.Millisecond)
	if s.base != s.next || s.ring != nil {
		t.Errorf("%d packets and a ring of %d are left", s.next-s.base, len(s.ring))
	}
}

func TestPersistent(t *testing.T) {
	rtt := 50 * time.Millisecond
	tests := []struct {
		name  string
		gap   time.Duration
		acked bool // one in the middle
		want  bool
	}{
		{"long", 300 * time.Millisecond, false, true},
		{"long, with one delivered", 300 * time.Millisecond, true, false},
		{"short", 50 * time.Millisecond, false, false},
	}
	for _, tt := range tests {
		var s sampler
		now := Time(time.Second)
		for pn := range int64(3) {
			s.sent(now.Add(time.Duration(pn)*tt.gap), pn, 100, 100*(pn+1))
		}
		var rs sample
		s.lost(0, 100, &rs)
		if tt.acked {
			s.acked(now.Add(time.Second), 1, 100, &rs)
		} else {
			s.lost(1, 100, &rs)
		}
		s.lost(2, 100, &rs)
		if got := s.persistent(&rs, rtt); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

func TestPacer(t *testing.T) {
	for _, rate := range []float64{1e4, 1e6, 1e9} {
		p := pacer{}
		p.setRate(rate, 1200)
		now := Time(time.Second)
		var sent, first int64
		for end := now.Add(time.Second); now < end; {
			for p.has(now) {
				p.sent(now, 1200)
				sent += 1200
			}
			if first == 0 {
				first = sent
			}
			next := p.next()
			if next <= now {
				t.Fatalf("at %v: the next packet leaves at %v", now, next)
			}
			now = next
			if !p.has(now) {
				t.Fatalf("at %v: no budget when it was told", now)
			}
		}
		if f := float64(sent-first) / rate; f < 0.85 || f > 1.02 {
			t.Errorf("%.0f bytes/s: %.3f of it left", rate, f)
		}
	}
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Fuzz(func(t *testing.T, data []byte) {
		c := New(Config{MaxDatagramSize: 1200})
		now, pn, inflight := Time(1), int64(0), int64(0)
		for i, b := range data {
			now = now.Add(time.Duration(b) * time.Millisecond)
			switch b % 8 {
			case 0, 1, 2:
				pn += int64(b%3) + 1
				inflight += 1200
				c.OnSent(now, inflight, pn, 1200, true)
			case 3, 4:
				c.OnAck(now, pn-int64(i%5), 1200)
				inflight = max(0, inflight-1200)
				c.OnAckEnd(now, inflight)
			case 5:
				c.OnLoss(now, pn-int64(i%7), 1200)
				inflight = max(0, inflight-1200)
				c.OnAckEnd(now, inflight)
			case 6:
				c.OnECN(now)
				c.OnSpuriousLoss(now)
			case 7:
				c.OnAppLimited(inflight)
				c.SetMaxDatagramSize(1200 + int64(b))
			}
			c.CanSend(inflight)
			if !c.HasPacingBudget(now) && c.NextSend() <= now {
				t.Fatal("paced without a time")
			}
			if c.Window() < c.minPipe() {
				t.Fatalf("a window of %d", c.Window())
			}
		}
	})
}
