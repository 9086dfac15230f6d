//go:build bench

package install

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quicvpn/quicvpn/internal/linksim"
	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// benchSeeds are not those of the other tests, with which the controller was tuned.
var benchSeeds = []uint64{9001, 9002, 9003}

// A benchRow is one link and what it carries. Shares are of the link's rate.
type benchRow struct {
	Table    string  `json:"table"`
	Link     string  `json:"link"`
	Mbps     float64 `json:"mbps"`
	OneWayMS float64 `json:"one_way_ms"`
	Loss     float64 `json:"loss"`
	Seconds  float64 `json:"seconds"`
	Seeds    int     `json:"seeds"`
	Raw      float64 `json:"raw"` // a UDP sender at the link's rate

	Fresh   benchFlow `json:"fresh"`
	Resumed benchFlow `json:"resumed"`
	NewReno benchFlow `json:"newreno"`

	scenario  scenario
	datagrams bool
}

// A benchFlow is the median over the seeds of each figure.
type benchFlow struct {
	Share   float64 `json:"share"`
	Late    float64 `json:"share_last_third"`
	Lost    float64 `json:"lost"`            // of the packets sent, the link's own losses too
	Startup float64 `json:"startup_dropped"` // packets that the queue dropped in the first three seconds
	Ping50  float64 `json:"ping_p50_ms"`     // through the loaded connection
	Ping95  float64 `json:"ping_p95_ms"`
	Ping99  float64 `json:"ping_p99_ms"`
}

// A benchPair is two flows in one bottleneck.
type benchPair struct {
	Flows    string    `json:"flows"`
	Mbps     float64   `json:"mbps"`
	OneWayMS float64   `json:"one_way_ms"`
	Queue    float64   `json:"queue_bdp"`
	Late     []float64 `json:"share_last_third"`
}

// TestBenchLinks is `make bench-links`. QUICK=1 takes four telling rows.
func TestBenchLinks(t *testing.T) {
	quick := os.Getenv("QUICK") != ""
	rows, duration := benchRows(), 30*time.Second
	if quick {
		rows, duration = quickRows(), 6*time.Second
	}
	var report struct {
		Rows  []*benchRow  `json:"rows"`
		Pairs []*benchPair `json:"pairs"`
	}
	table := ""
	for _, r := range rows {
		t.Run(fmt.Sprintf("%s/%s/%g-%g-%g", r.Table, r.Link, r.Mbps, r.OneWayMS, 100*r.Loss), func(t *testing.T) {
			if table != r.Table {
				table = r.Table
				fmt.Printf("\n%s, %v each\n\n%s", table, duration, rowHead)
			}
			r.measure(t, duration, quick)
			fmt.Print(r)
			report.Rows = append(report.Rows, r)
		})
	}
	if !quick {
		t.Run("fairness", func(t *testing.T) { report.Pairs = benchFairness(t) })
		t.Run("picture", func(t *testing.T) { drawFarLink(t, "docs/far-link.svg") })
	}
	b, err := json.MarshalIndent(report, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("bin/bench-links.json", b, 0o644); err != nil {
		t.Fatal(err)
	}
}

const rowHead = "| Mbit/s | ms one way | loss % | link | raw UDP % | fresh % | resumed % | NewReno % | lost %: fresh, resumed, NewReno | queue's drops in start-up: fresh, resumed, NewReno | ping p50, p95, p99 ms: fresh | NewReno |\n" +
	"| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"

func (r *benchRow) String() string {
	f, s, n := r.Fresh, r.Resumed, r.NewReno
	return fmt.Sprintf("| %.0f | %.0f | %.1f | %s | %.1f | %.1f | %.1f | %.1f | %.1f, %.1f, %.1f | %.0f, %.0f, %.0f | %.0f, %.0f, %.0f | %.0f, %.0f, %.0f |\n",
		r.Mbps, r.OneWayMS, 100*r.Loss, r.Link, 100*r.Raw, 100*f.Share, 100*s.Share, 100*n.Share, 100*f.Lost, 100*s.Lost, 100*n.Lost,
		f.Startup, s.Startup, n.Startup, f.Ping50, f.Ping95, f.Ping99, n.Ping50, n.Ping95, n.Ping99)
}

// measure fills in the row. Chance is in losses and jitter only: elsewhere one seed
// is enough.
func (r *benchRow) measure(t *testing.T, duration time.Duration, quick bool) {
	seeds := benchSeeds
	in := r.scenario.forward
	if quick || in.Loss == 0 && in.Jitter == 0 && in.Burst == (linksim.Burst{}) {
		seeds = seeds[:1]
	}
	r.Seconds, r.Seeds = duration.Seconds(), len(seeds)
	var raw []float64
	for _, seed := range seeds {
		raw = append(raw, rawShare(t, r.scenario, duration, seed))
	}
	r.Raw = median(raw)
	saved := congestion.Path{RTT: 2 * in.Delay, Bandwidth: in.Rate}
	for into, f := range map[*benchFlow]flow{
		&r.Fresh: {control: model}, &r.Resumed: {control: model, saved: saved}, &r.NewReno: {control: stock},
	} {
		f.ping, f.datagrams = true, r.datagrams
		var all []*result
		for _, seed := range seeds {
			s := r.scenario
			s.seed, s.duration, s.flows = seed, duration, []flow{f}
			all = append(all, simulate(t, s)[0])
		}
		*into = summary(t, all)
	}
}

func summary(t *testing.T, all []*result) benchFlow {
	of := func(figure func(*result) float64) float64 {
		var v []float64
		for _, r := range all {
			v = append(v, figure(r))
		}
		return median(v)
	}
	quantile := func(share float64) float64 {
		return of(func(r *result) float64 {
			if len(r.pings) == 0 {
				t.Error("no ping came back")
				return 0
			}
			sorted := slices.Sorted(slices.Values(r.pings))
			return float64(sorted[int(float64(len(sorted))*share)].Microseconds()) / 1000
		})
	}
	return benchFlow{
		Share:   of(func(r *result) float64 { return r.share }),
		Late:    of(func(r *result) float64 { return r.late }),
		Lost:    of(func(r *result) float64 { return float64(r.lost) / float64(max(r.sent, 1)) }),
		Startup: of(func(r *result) float64 { return float64(r.startup) }),
		Ping50:  quantile(0.5), Ping95: quantile(0.95), Ping99: quantile(0.99),
	}
}

func median[T cmp.Ordered](v []T) T { return slices.Sorted(slices.Values(v))[len(v)/2] }

// rawShare is what arrives of packets that are sent at the rate of the link.
func rawShare(t *testing.T, s scenario, duration time.Duration, seed uint64) (share float64) {
	synctest.Test(t, func(t *testing.T) {
		s.forward.Seed = seed
		there, back := linksim.New(s.forward), linksim.New(linksim.Config{Rate: 1, Queue: 1})
		a, b := linksim.Connect(there, back, 1)
		received := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			b.SetReadDeadline(time.Now().Add(duration))
			for buf := make([]byte, 2000); ; {
				n, _, err := b.ReadFrom(buf)
				if err != nil {
					return
				}
				received += n
			}
		}()
		packet, rate := make([]byte, config.InitialPacketSize), s.forward.Rate
		for begin := time.Now(); time.Since(begin) < duration; {
			for at, changed := range s.change {
				if time.Since(begin) >= at && time.Since(begin) < at+10*time.Millisecond {
					rate = changed
					there.SetRate(rate)
				}
			}
			a.WriteTo(packet, nil)
			time.Sleep(time.Duration(float64(len(packet)) / rate * 1e9))
		}
		<-done
		b.Close()
		a.Close()
		there.Close()
		back.Close()
		share = float64(received) / (s.forward.Rate * duration.Seconds())
	})
	return share
}
