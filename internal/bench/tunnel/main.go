// Command tunnel measures quicvpn beside wireguard-go and the bare network, all
// three between the same namespaces, in rounds that alternate between them. It
// prints a Markdown table. Absolute figures are this machine's; the ratios are
// what is to be read.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// options are the command line.
type options struct {
	quicvpn, wireguard string // binaries
	quick              bool
	rounds             int
	duration           time.Duration
	sessions           int
}

func main() {
	var o options
	var client string
	flag.BoolVar(&o.quick, "quick", false, "two short rounds, under 50 seconds in all")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds to take the medians of")
	flag.DurationVar(&o.duration, "duration", 3*time.Second, "how long each run is counted, in whole seconds")
	flag.IntVar(&o.sessions, "sessions", 1000, "idle sessions whose memory in the gateway is measured; 0 for none")
	flag.StringVar(&client, "idle-client", "", "for itself: open the sessions with the token in this file, and wait")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: tunnel [flags] PATH-OF-QUICVPN PATH-OF-WIREGUARD-GO")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	err := func() error {
		if client != "" {
			return openSessions(ctx, client, o.sessions)
		}
		if flag.NArg() != 2 {
			flag.Usage()
			return errors.New("it takes two binaries to compare")
		}
		if o.quick {
			o.rounds, o.duration = 2, time.Second
		}
		var err error
		if o.quicvpn, err = filepath.Abs(flag.Arg(0)); err != nil {
			return err
		}
		if o.wireguard, err = filepath.Abs(flag.Arg(1)); err != nil {
			return err
		}
		return netlab.Main(ctx, "quicvpn-bench", func(ctx context.Context, tb netlab.TB) { measure(ctx, tb, o) })
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-tunnel:", err)
		os.Exit(1)
	}
}

// measure is the whole of it, in order.
func measure(ctx context.Context, tb netlab.TB, o options) {
	bare, wireguard, quicvpn := bareRig(ctx, tb), wireguardRig(ctx, tb, o.wireguard), quicvpnRig(ctx, tb, o.quicvpn)
	rigs := []*rig{bare, wireguard, quicvpn}
	idle := memory(tb, quicvpn.tunnels[0])
	samples := make(map[cell][]sample)
	for round := range o.rounds {
		for _, w := range workloads {
			for i := range rigs {
				r := rigs[(i+round)%len(rigs)] // nobody is always first
				if r == bare && o.quick && round > 0 {
					continue
				}
				s, err := r.run(ctx, w, o.duration)
				if err != nil {
					tb.Fatalf("%s, %s: %v", r.name, w.name, err)
				}
				samples[cell{r.name, w.name}] = append(samples[cell{r.name, w.name}], s)
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", round+1, o.rounds)
	}
	printTable(os.Stdout, samples)
	fmt.Printf("\nMedians of %d rounds of %v, interleaved.\n", o.rounds, o.duration)
	fmt.Printf("Resident memory of the sidecar: %.1f MB idle, %.1f MB after the load.\n", idle, memory(tb, quicvpn.tunnels[0]))
	for _, r := range rigs {
		r.stop()
	}
	if o.sessions > 0 {
		none, all := idleSessions(ctx, tb, o.quicvpn, o.sessions)
		fmt.Printf("Resident memory of the gateway: %.1f MB without a session, %.1f MB with %d idle ones (%.1f KB each).\n",
			none, all, o.sessions, (all-none)*1000/float64(o.sessions))
	}
}
