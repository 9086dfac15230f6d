// Command tun measures packets that go from one TUN device to another through
// this program, ours beside what else there is, in rounds that alternate between
// them. It prints a Markdown table. Absolute figures are this machine's; the
// ratios are what is to be read. QUICK=1 in the environment does with two short
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
	"strings"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/bench/moved"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

const (
	mtu       = 1400
	iperfPort = 5201
)

// flowCounts are the columns.
var flowCounts = []int{1, 4, 16}

// A cell names a figure of the table.
type cell struct {
	rig   string
	flows int
}

func main() {
	quick := os.Getenv("QUICK") != ""
	rounds, seconds := 5, 3
	if quick {
		rounds, seconds = 2, 1
	}
	flag.IntVar(&rounds, "rounds", rounds, "rounds to take the medians of")
	flag.IntVar(&seconds, "seconds", seconds, "how long a run takes")
	only := flag.String("only", "", "measure only what has one of these words, separated by commas, in its name")
	flag.Parse()
	rows := choose(*only)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := netlab.Main(ctx, "bench-tun", func(ctx context.Context, tb netlab.TB) {
		samples := measure(ctx, tb, rows, rounds, time.Duration(seconds)*time.Second)
		report(os.Stdout, rows, samples)
		fmt.Printf("\nTCP, MTU %d, medians of %d rounds of %d s, interleaved.\n", mtu, rounds, seconds)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-tun:", err)
		os.Exit(1)
	}
}

// choose returns the builders with one of the words in their names, all if there
// is none.
func choose(words string) (rows []builder) {
	for _, b := range builders {
		if slices.ContainsFunc(strings.Split(words, ","), func(w string) bool { return strings.Contains(b.name, w) }) {
			rows = append(rows, b)
		}
	}
	return rows
}

func measure(ctx context.Context, tb netlab.TB, rows []builder, rounds int, d time.Duration) map[cell][]moved.Sample {
	var rigs []*rig
	for _, r := range rows {
		rigs = append(rigs, r.build(ctx, tb, r.name))
	}
	samples := make(map[cell][]moved.Sample)
	for round := range rounds {
		for _, flows := range flowCounts {
			for i := range rigs {
				r := rigs[(i+round)%len(rigs)] // nobody is always first
				s, err := r.run(ctx, flows, d)
				if err != nil {
					tb.Fatalf("%s, %d flows: %v", r.name, flows, err)
				}
				c := cell{r.name, flows}
				samples[c] = append(samples[c], s)
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", round+1, rounds)
	}
	return samples
}

// run moves data from the rig's client to its server.
func (r *rig) run(ctx context.Context, flows int, d time.Duration) (moved.Sample, error) {
	return moved.By(ctx, r.client, netlab.Iperf{
		Server: netip.AddrPortFrom(serverAddr, iperfPort), Flows: flows, Duration: d,
	})
}
