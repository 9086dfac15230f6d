package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestMedianAndQuantile(t *testing.T) {
	for _, tt := range []struct {
		sorted      []float64
		median, p99 float64
	}{
		{nil, 0, 0},
		{[]float64{7}, 7, 7},
		{[]float64{1, 2}, 1.5, 2},
		{[]float64{1, 2, 9}, 2, 9},
	} {
		if got := median(tt.sorted); got != tt.median {
			t.Errorf("median of %v is %v, want %v", tt.sorted, got, tt.median)
		}
		if got := quantile(tt.sorted, 0.99); got != tt.p99 {
			t.Errorf("99th percentile of %v is %v, want %v", tt.sorted, got, tt.p99)
		}
	}
	samples := []sample{{pings: []time.Duration{4e6, 1e6}}, {}, {pings: []time.Duration{2e6}}}
	if got := values(samples, pings); !slices.Equal(got, []float64{1, 2, 4}) {
		t.Errorf("pings %v ms, want 1, 2 and 4", got)
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
