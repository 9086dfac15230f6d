//go:build bench

package install

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/linksim"
	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// benchLinks are Mbit/s and one-way milliseconds. They are alike in both directions,
// so up and down do not differ.
var benchLinks = [][2]float64{
	{200, 1}, {200, 200}, {100, 1}, {100, 200}, {10, 1}, {10, 10}, {10, 100}, {10, 200}, {10, 300},
	{50, 1}, {50, 10}, {50, 100}, {50, 200}, {50, 300}, {20, 25}, {30, 40},
}

func newRow(table, link string, mbps, ms, queue, loss float64) *benchRow {
	return &benchRow{Table: table, Link: link, Mbps: mbps, OneWayMS: ms, Loss: loss,
		scenario: scenario{forward: path(mbps, ms, queue, loss)}, datagrams: table == "datagrams"}
}

func benchRows() (rows []*benchRow) {
	for _, table := range []string{"streams", "datagrams"} {
		for _, loss := range []float64{0, 0.001, 0.01} {
			for _, l := range benchLinks {
				rows = append(rows, newRow(table, "plain", l[0], l[1], 1, loss))
			}
		}
	}
	further := func(link string, mbps, ms, queue float64, change func(s *scenario)) {
		r := newRow("further", link, mbps, ms, queue, 0)
		change(&r.scenario)
		rows = append(rows, r)
	}
	for _, l := range [][2]float64{{50, 10}, {50, 100}} {
		further("5 ms of jitter", l[0], l[1], 1, func(s *scenario) { s.forward.Jitter = 5 * time.Millisecond })
		further("ACKs in clumps of 10 ms", l[0], l[1], 1, func(s *scenario) { s.back.Clump = 10 * time.Millisecond })
		further("a tenth of the BDP", l[0], l[1], 0.1, func(*scenario) {})
		further("policer", l[0], l[1], 1, func(s *scenario) { s.forward.Police = max(s.forward.Queue/4, 30_000) })
		further("half the rate from 10 s to 20 s", l[0], l[1], 1, func(s *scenario) {
			s.change = map[time.Duration]float64{10 * time.Second: s.forward.Rate / 2, 20 * time.Second: s.forward.Rate}
		})
		further("bursts of losses", l[0], l[1], 1, func(s *scenario) {
			s.forward.Burst = linksim.Burst{Begin: 0.001, End: 0.1, Loss: 0.5}
		})
	}
	return rows
}

func quickRows() []*benchRow {
	return []*benchRow{
		newRow("streams", "plain", 50, 10, 1, 0),
		newRow("streams", "plain", 100, 200, 1, 0),
		newRow("streams", "plain", 50, 100, 1, 0.01),
		newRow("datagrams", "plain", 20, 25, 1, 0),
	}
}

func benchFairness(t *testing.T) (pairs []*benchPair) {
	fmt.Print("\n| flows | Mbit/s | ms one way | queue, BDP | last third: first % | second % |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, second := range []control{model, cubic} {
		name := map[control]string{model: "two of ours", cubic: "ours and CUBIC"}[second]
		for _, p := range [][3]float64{{100, 10, 1}, {20, 50, 1}, {50, 25, 1}, {50, 25, 4}} {
			s := scenario{forward: path(p[0], p[1], p[2], 0), flows: []flow{{control: model}, {control: second}}, duration: 30 * time.Second, seed: benchSeeds[0]}
			r := simulate(t, s)
			pairs = append(pairs, &benchPair{name, p[0], p[1], p[2], []float64{r[0].late, r[1].late}})
			fmt.Printf("| %s | %.0f | %.0f | %.0f | %.1f | %.1f |\n", name, p[0], p[1], p[2], 100*r[0].late, 100*r[1].late)
		}
	}
	return pairs
}

// drawFarLink writes a picture of the throughput over time of a link of 200 Mbit/s
// with 200 ms one way.
func drawFarLink(t *testing.T, file string) {
	const seconds, width, height, top = 12, 720, 300, 200.0
	in := path(200, 200, 1, 0)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width+60, height+60)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width+60, height+60)
	for mbps := 0; mbps <= top; mbps += 50 {
		y := 20 + height - height*mbps/top
		fmt.Fprintf(&b, `<path d="M40 %dH%d" stroke="#ddd"/><text x="8" y="%d">%d</text>`+"\n", y, width+40, y+4, mbps)
	}
	for s := 0; s <= seconds; s += 2 {
		fmt.Fprintf(&b, `<text x="%d" y="%d">%d s</text>`+"\n", 36+width*s/seconds, height+38, s)
	}
	for i, f := range []struct {
		name, color string
		flow        flow
	}{
		{"fresh", "#1f77b4", flow{control: model}},
		{"resumed", "#2ca02c", flow{control: model, saved: congestion.Path{RTT: 2 * in.Delay, Bandwidth: in.Rate}}},
		{"NewReno", "#d62728", flow{control: stock}},
	} {
		var line strings.Builder
		var before int64
		const step = 200 * time.Millisecond
		simulate(t, scenario{forward: in, flows: []flow{f.flow}, duration: seconds * time.Second, seed: benchSeeds[0],
			trace: func(at time.Duration, flows []*result) {
				if at%step != 0 {
					return
				}
				n := flows[0].received.Load()
				mbps := min(float64(n-before)*8/1e6/step.Seconds(), top)
				before = n
				fmt.Fprintf(&line, "%.1f,%.1f ", 40+width*at.Seconds()/seconds, 20+height-height*mbps/top)
			}})
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.TrimSpace(line.String()), f.color)
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", 60+100*i, height+56, f.color, f.name)
	}
	fmt.Fprintf(&b, `<text x="%d" y="14">Mbit/s that arrive, on a link of 200 Mbit/s, 200 ms one way</text>`+"\n</svg>\n", 40)
	if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
