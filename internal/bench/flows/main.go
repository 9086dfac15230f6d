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
	"slices"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A sample is one run of iperf3.
type sample struct {
	gbits float64 // a second
	nsKB  float64 // CPU of this process for a KiB moved
}

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
		measureFar(ctx, tb, flag.Arg(0), 10*time.Second, quick)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-flows:", err)
		os.Exit(1)
	}
}

var flowCounts = []int{1, 4}

func measure(ctx context.Context, tb netlab.TB, rounds int, d time.Duration) map[cell][]sample {
	var rigs []*rig
	for _, b := range builders {
		rigs = append(rigs, b.build(ctx, tb, b.name))
	}
	samples := make(map[cell][]sample)
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
func (r *rig) run(ctx context.Context, c cell, d time.Duration) (sample, error) {
	before := cpuTime()
	res, err := r.client.Iperf(ctx, netlab.Iperf{
		Server: netip.AddrPortFrom(r.server, iperfPort), Flows: c.flows, Reverse: c.reverse, Duration: d,
	})
	if err != nil {
		return sample{}, err
	}
	cpu := cpuTime() - before
	return sample{gbits: res.Bits / 1e9, nsKB: float64(cpu.Nanoseconds()) / (res.Bytes / 1024)}, nil
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // it fails for bad arguments only
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func median(s []sample, get func(sample) float64) float64 {
	var v []float64
	for _, x := range s {
		v = append(v, get(x))
	}
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// report prints the figures, and the ratios that are to be read.
func report(samples map[cell][]sample) {
	gbits := func(s sample) float64 { return s.gbits }
	cost := func(s sample) float64 { return s.nsKB }
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
			fmt.Printf(" %.2f; %.0f |", median(samples[c], gbits), median(samples[c], cost))
		}
		fmt.Println()
	}
	fmt.Printf("| **%s / %s** |", ours, kernel)
	for _, c := range columns {
		a, b := c, c
		a.rig, b.rig = ours, kernel
		fmt.Printf(" %.2f |", median(samples[a], gbits)/median(samples[b], gbits))
	}
	fmt.Println()
}
