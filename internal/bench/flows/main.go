// Command flows measures TCP connections that a stack of our own ends beside a
// proxy of the kernel's, in rounds that alternate between them, and what an idle
// connection costs. It prints Markdown. Absolute figures are this machine's; the
// ratios are what is to be read. QUICK=1 in the environment does with short
// rounds, in under 50 seconds.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/bench/moved"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A cell names a figure of the table.
type cell struct {
	rig     string
	reverse bool
	flows   int
}

func main() {
	rounds, seconds, idle := 5, 3, 10_000
	quick := os.Getenv("QUICK") != ""
	if quick {
		rounds, seconds = 2, 1
	}
	flag.IntVar(&rounds, "rounds", rounds, "rounds to take the medians of")
	flag.IntVar(&seconds, "seconds", seconds, "how long a run takes")
	flag.IntVar(&idle, "idle", idle, "connections that do nothing")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: bench-flows [flags] QUICVPN")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := netlab.Main(ctx, "bench-flows", func(ctx context.Context, tb netlab.TB) {
		samples := measure(ctx, tb, rounds, time.Duration(seconds)*time.Second)
		report(samples)
		fmt.Printf("\nTCP, MTU %d, medians of %d rounds of %d s, interleaved.\n\n", mtu, rounds, seconds)
		measureIdle(tb, idle)
		fmt.Println()
		far := 10 * time.Second
		if quick {
			far = 5 * time.Second
		}
		measureFar(ctx, tb, flag.Arg(0), far, quick)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-flows:", err)
		os.Exit(1)
	}
}

var flowCounts = []int{1, 4}

func measure(ctx context.Context, tb netlab.TB, rounds int, d time.Duration) map[cell][]moved.Sample {
	var rigs []*rig
	for _, b := range builders {
		rigs = append(rigs, b.build(ctx, tb, b.name))
	}
	samples := make(map[cell][]moved.Sample)
	for round := range rounds {
		for _, flows := range flowCounts {
			for _, reverse := range []bool{false, true} {
				for i := range rigs {
					r := rigs[(i+round)%len(rigs)] // nobody is always first
					c := cell{r.name, reverse, flows}
					s, err := r.run(ctx, c, d)
					if err != nil {
						tb.Fatalf("%s: %v", r.name, err)
					}
					samples[c] = append(samples[c], s)
				}
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", round+1, rounds)
	}
	return samples
}

// run moves data between the rig's client and its server.
func (r *rig) run(ctx context.Context, c cell, d time.Duration) (moved.Sample, error) {
	return moved.By(ctx, r.client, netlab.Iperf{
		Server: netip.AddrPortFrom(r.server, iperfPort), Flows: c.flows, Reverse: c.reverse, Duration: d,
	})
}

// report prints the figures, and the ratios that are to be read.
func report(samples map[cell][]moved.Sample) {
	gbits := func(s moved.Sample) float64 { return s.Gbits }
	cost := func(s moved.Sample) float64 { return s.NsKB }
	fmt.Print("| Gbit/s; CPU, ns/KiB |")
	var columns []cell
	for _, flows := range flowCounts {
		for _, reverse := range []bool{false, true} {
			columns = append(columns, cell{"", reverse, flows})
			fmt.Printf(" %d %s |", flows, map[bool]string{false: "up", true: "down"}[reverse])
		}
	}
	fmt.Println("\n| --- | --- | --- | --- | --- |")
	for _, b := range builders {
		fmt.Printf("| %s |", b.name)
		for _, c := range columns {
			c.rig = b.name
			fmt.Printf(" %.2f; %.0f |", moved.Median(samples[c], gbits), moved.Median(samples[c], cost))
		}
		fmt.Println()
	}
	fmt.Printf("| **%s / %s** |", ours, kernel)
	for _, c := range columns {
		a, b := c, c
		a.rig, b.rig = ours, kernel
		fmt.Printf(" %.2f |", moved.Median(samples[a], gbits)/moved.Median(samples[b], gbits))
	}
	fmt.Println()
}
