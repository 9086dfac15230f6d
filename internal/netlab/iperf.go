package netlab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"
)

// An Iperf is one run of iperf3 against a ServeIperf.
type Iperf struct {
	Server netip.AddrPort
	// Reverse lets the server send.
	Reverse bool
	// Flows in parallel; zero means one.
	Flows int
	// UDP is the payload of the datagrams to send, as fast as it goes or as Rate
	// says; zero means TCP.
	UDP int
	// Rate in bits a second; zero means unlimited.
	Rate uint64
	// Congestion is TCP's congestion control at the sender; empty is the kernel's
	// default.
	Congestion string
	// Duration of what is counted, in whole seconds.
	Duration time.Duration
	// Warmup comes before it and is not counted, in whole seconds.
	Warmup time.Duration
}

// An IperfResult is what arrived.
type IperfResult struct {
	Bits    float64 // payload bits a second that the receiver got
	Bytes   float64 // payload bytes that the receiver got
	Packets float64 // UDP only: datagrams a second that the receiver got
	Lost    float64 // UDP only: the part that was lost, 0 to 1
	// Steps are the bytes moved in each tenth of a second, as the client saw it:
	// with Reverse, what it received.
	Steps []float64
}

// ServeIperf runs an iperf3 server on the port and returns once it listens. It
// serves one run at a time.
func (n *NS) ServeIperf(ctx context.Context, port uint16) *Cmd {
	n.lab.tb.Helper()
	c := n.Start(ctx, "iperf3", "--server", "--forceflush", "--port", strconv.Itoa(int(port)))
	if err := c.WaitLog(ctx, "Server listening"); err != nil {
		n.lab.tb.Fatalf("%v", err)
	}
	return c
}

// Args returns the arguments of iperf3 for the run.
func (i Iperf) Args() []string {
	args := []string{"--json", "--interval", "0.1",
		"--client", i.Server.Addr().String(), "--port", strconv.Itoa(int(i.Server.Port())),
		"--time", strconv.FormatFloat(i.Duration.Seconds(), 'f', 0, 64),
		"--omit", strconv.FormatFloat(i.Warmup.Seconds(), 'f', 0, 64),
		"--parallel", strconv.Itoa(max(i.Flows, 1)),
	}
	if i.Reverse {
		args = append(args, "--reverse")
	}
	if i.Congestion != "" {
		args = append(args, "--congestion", i.Congestion)
	}
	if i.UDP > 0 {
		args = append(args, "--udp", "--length", strconv.Itoa(i.UDP))
	}
	if i.UDP > 0 || i.Rate > 0 {
		args = append(args, "--bitrate", strconv.FormatUint(i.Rate, 10))
	}
	return args
}

// errNotStarted says that the server turned a run down before anything was sent.
var errNotStarted = errors.New("the run did not start")

// Iperf runs iperf3 in the namespace.
func (n *NS) Iperf(ctx context.Context, run Iperf) (IperfResult, error) {
	return run.By(ctx, func(args ...string) *Cmd { return n.Command(ctx, "iperf3", args...) })
}

// By runs iperf3 by commands made of its arguments. Between two runs a server
// closes its socket and opens another, and resets who has connected in between:
// By tries again for a second.
func (i Iperf) By(ctx context.Context, command func(args ...string) *Cmd) (IperfResult, error) {
	start := time.Now()
	for {
		out, err := command(i.Args()...).Output()
		r, err := parseIperf(out, err)
		if !errors.Is(err, errNotStarted) || time.Since(start) > time.Second || sleep(ctx, 5*retry) != nil {
			return r, err
		}
	}
}

// parseIperf reads iperf3's JSON, which also says why a run failed.
func parseIperf(out []byte, runErr error) (r IperfResult, err error) {
	type sum struct {
		Bytes   float64 `json:"bytes"`
		Bits    float64 `json:"bits_per_second"`
		Seconds float64 `json:"seconds"`
		Packets float64 `json:"packets"`
		Lost    float64 `json:"lost_packets"`
		Omitted bool    `json:"omitted"`
	}
	var report struct {
		Error string `json:"error"`
		Start struct {
			Test struct {
				Protocol string `json:"protocol"`
			} `json:"test_start"`
		} `json:"start"`
		Intervals []struct {
			Sum sum `json:"sum"`
		} `json:"intervals"`
		End struct {
			Sum      sum `json:"sum"`
			Received sum `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return r, fmt.Errorf("iperf3: %w (%v): %.200s", err, runErr, out)
	}
	if report.Error != "" && len(report.Intervals) == 0 {
		return r, fmt.Errorf("iperf3: %w: %s", errNotStarted, report.Error)
	}
	if report.Error != "" || runErr != nil {
		return r, fmt.Errorf("iperf3: %s (%v)", report.Error, runErr)
	}
	r.Bits, r.Bytes = report.End.Received.Bits, report.End.Received.Bytes
	if report.Start.Test.Protocol == "UDP" {
		end := report.End.Sum
		if end.Packets > 0 && end.Seconds > 0 {
			r.Lost = end.Lost / end.Packets
			r.Packets = (end.Packets - end.Lost) / end.Seconds
			size := end.Bytes / end.Packets
			r.Bytes = size * (end.Packets - end.Lost)
			r.Bits = size * 8 * r.Packets
		}
	}
	for _, i := range report.Intervals {
		if !i.Sum.Omitted {
			r.Steps = append(r.Steps, i.Sum.Bytes)
		}
	}
	return r, nil
}
