// Command docker measures two containers of one host on a quicvpn network beside
// the same two on a bridge network, and how long a container takes to start on
// each, in rounds that alternate between them. The engine is one of its own. It
// prints a Markdown table; the ratios are what is to be read.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

const iperfPort = 5201

// options are the command line.
type options struct {
	quicvpn  string // the binary
	quick    bool
	rounds   int
	duration time.Duration
	starts   int
}

func main() {
	o := options{rounds: 5, duration: 3 * time.Second, starts: 20}
	flag.BoolVar(&o.quick, "quick", false, "two short rounds, under 50 seconds in all")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: docker [flags] PATH-OF-QUICVPN")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := func() (err error) {
		if flag.NArg() != 1 {
			flag.Usage()
			return errors.New("it takes the binary to measure")
		}
		if o.quick {
			o.rounds, o.duration, o.starts = 2, time.Second, 6
		}
		if o.quicvpn, err = filepath.Abs(flag.Arg(0)); err != nil {
			return err
		}
		return netlab.Main(ctx, "bench-docker", func(ctx context.Context, tb netlab.TB) { measure(ctx, tb, o) })
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-docker:", err)
		os.Exit(1)
	}
}

// The two networks, by their names.
var networks = []string{"bridge", "quicvpn"}

var flowCounts = []int{1, 4}

// A pair is two containers of one network.
type pair struct {
	client func(args ...string) *netlab.Cmd // iperf3 in one
	server netip.AddrPort                   // in the other
}

// measure is the whole of it, in order.
func measure(ctx context.Context, tb netlab.TB, o options) {
	top := netlab.NewTopology(tb, netlab.LinkConfig{})
	e := dockerlab.Start(tb, top.Client, dockerlab.Config{})
	setUp(ctx, tb, top, e, o.quicvpn)
	pairs := make(map[string]pair)
	for _, network := range networks {
		pairs[network] = newPair(ctx, tb, e, network)
	}
	gbits := make(map[string]map[int][]float64)
	starts := make(map[string][]float64)
	for _, network := range networks {
		gbits[network] = make(map[int][]float64)
	}
	for round := range o.rounds {
		for _, flows := range flowCounts {
			for i := range networks {
				network := networks[(i+round)%len(networks)] // nobody is always first
				p := pairs[network]
				r, err := netlab.Iperf{Server: p.server, Flows: flows, Duration: o.duration}.By(ctx, p.client)
				if err != nil {
					tb.Fatalf("%d flows on %s: %v", flows, network, err)
				}
				gbits[network][flows] = append(gbits[network][flows], r.Bits/1e9)
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", round+1, o.rounds)
	}
	for i := range o.starts * len(networks) {
		network := networks[i%len(networks)]
		started := time.Now()
		e.Docker(ctx, "run", "--rm", "--network", network, e.ScratchImage(ctx), "resolve", "localhost")
		starts[network] = append(starts[network], time.Since(started).Seconds())
	}
	report(o, gbits, starts)
}

// setUp starts a gateway and the driver, and makes the networks.
func setUp(ctx context.Context, tb netlab.TB, top *netlab.Topology, e *dockerlab.Engine, quicvpn string) {
	dir := tb.TempDir()
	gateway := filepath.Join(dir, "gateway")
	token, err := top.Gateway.Command(ctx, quicvpn, "gateway", "init", "--state-dir", gateway,
		"--address", netip.AddrPortFrom(netlab.GatewayAddr4, 443).String()).Output()
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "token"), token, 0o600)
	}
	if err != nil {
		tb.Fatalf("make a gateway: %v", err)
	}
	top.Gateway.Start(ctx, quicvpn, "gateway", "run", "--state-dir", gateway)
	driver := e.Start(ctx, quicvpn, "driver", "--token-file", filepath.Join(dir, "token"), "--state-dir", filepath.Join(dir, "driver"))
	if err := driver.WaitLog(ctx, "the driver is up"); err != nil {
		tb.Fatalf("start the driver: %v", err)
	}
	for _, network := range networks {
		if network != "bridge" { // which every engine has
			e.Docker(ctx, "network", "create", "--driver", network, network)
		}
	}
}

// newPair starts two containers of a network, in one of which iperf3 serves. It
// is the machine's own, in their network namespaces.
func newPair(ctx context.Context, tb netlab.TB, e *dockerlab.Engine, network string) pair {
	iperf := func(role string) func(args ...string) *netlab.Cmd {
		name := network + "-" + role
		e.Docker(ctx, "run", "--detach", "--name", name, "--network", network, e.ScratchImage(ctx), "sleep")
		sandbox := e.Docker(ctx, "inspect", "--format", "{{.NetworkSettings.SandboxKey}}", name)
		return func(args ...string) *netlab.Cmd {
			return e.Command(ctx, "nsenter", append([]string{"--net=" + sandbox, "iperf3"}, args...)...)
		}
	}
	client, server := iperf("client"), iperf("server")
	address, err := netip.ParseAddr(e.Docker(ctx, "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", network+"-server"))
	if err != nil {
		tb.Fatalf("the address on %s: %v", network, err)
	}
	c := server("--server", "--forceflush", "--port", strconv.Itoa(iperfPort))
	if err = c.Start(); err == nil {
		err = c.WaitLog(ctx, "Server listening")
	}
	if err != nil {
		tb.Fatalf("start iperf3 on %s: %v", network, err)
	}
	return pair{client, netip.AddrPortFrom(address, iperfPort)}
}

// report prints the medians and their ratios.
func report(o options, gbits map[string]map[int][]float64, starts map[string][]float64) {
	fmt.Print("| | bridge | quicvpn | ratio |\n| --- | --- | --- | --- |\n")
	row := func(name, format string, of func(network string) float64) {
		bridge, ours := of("bridge"), of("quicvpn")
		fmt.Printf("| %s | "+format+" | "+format+" | %.2f |\n", name, bridge, ours, ours/bridge)
	}
	for _, flows := range flowCounts {
		row(fmt.Sprintf("container to container, TCP flows: %d, Gbit/s", flows), "%.1f",
			func(network string) float64 { return median(gbits[network][flows]) })
	}
	row("start and end of a container, s", "%.2f", func(network string) float64 { return median(starts[network]) })
	fmt.Printf("\nMedians of %d rounds of %v and of %d starts, interleaved.\n", o.rounds, o.duration, o.starts)
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
