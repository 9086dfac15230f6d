package main

import (
	"strings"
	"testing"
	"time"
)

func TestQuantiles(t *testing.T) {
	samples := []sample{{gbits: 3}, {gbits: 1}, {gbits: 2, pings: []time.Duration{4e6, 1e6}}, {}, {gbits: 9}}
	if got := median(samples, func(s sample) float64 { return s.gbits }); got != 2 {
		t.Errorf("median %v, want 2", got)
	}
	if got := quantile(samples, 0.99, pings); got != 4 {
		t.Errorf("99th percentile of the pings %v ms, want 4", got)
	}
	if got := quantile(nil, 0.5, pings); got != 0 {
		t.Errorf("median of nothing %v, want 0", got)
	}
}

func TestTableShowsRatios(t *testing.T) {
	samples := make(map[cell][]sample)
	for _, w := range workloads {
		samples[cell{"bare veth", w.name}] = []sample{{gbits: 20, packets: 300e3}}
		samples[cell{"wireguard-go", w.name}] = []sample{{gbits: 4, packets: 40e3, cpu: 0.4}}
		samples[cell{"quicvpn", w.name}] = []sample{{gbits: 5, packets: 80e3, cpu: 0.3, pings: []time.Duration{1500 * time.Microsecond}}}
	}
	var out strings.Builder
	printTable(&out, samples)
	for _, want := range []string{
		"| TCP up, 1 flow, Gbit/s | 20.00 | 4.00 | 5.00 | **1.25** | 0.400 | 0.300 | **0.75** |",
		"| UDP up, 200 bytes, k/s | 300.00 | 40.00 | 80.00 | **2.00** | 0.400 | 0.300 | **0.75** |",
		"| TCP down, 4 flows: median / p99 | 0.00 / 0.0 | 0.00 / 0.0 | 1.50 / 1.5 |",
	} {
		if !strings.Contains(out.String(), want+"\n") {
			t.Errorf("the table lacks %q:\n%s", want, &out)
		}
	}
}
