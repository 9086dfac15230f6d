package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A workload is one kind of traffic.
type workload struct {
	name string
	run  netlab.Iperf
}

var workloads = []workload{
	{"TCP up, 1 flow", netlab.Iperf{}},
	{"TCP down, 1 flow", netlab.Iperf{Reverse: true}},
	{"TCP up, 4 flows", netlab.Iperf{Flows: 4}},
	{"TCP down, 4 flows", netlab.Iperf{Flows: 4, Reverse: true}},
	{"UDP up, 200 bytes", netlab.Iperf{UDP: 200}},
}

// A cell is a place in the table.
type cell struct{ rig, workload string }

// A sample is what one run of a workload gave.
type sample struct {
	gbits   float64 // Gbit/s of payload that arrived
	packets float64 // datagrams a second that arrived
	cpu     float64 // seconds of both tunnel processes for a Gbit
	pings   []time.Duration
}

// run runs a workload, with a ping every 20 ms beside TCP.
func (r *rig) run(ctx context.Context, w workload, duration time.Duration) (s sample, err error) {
	w.run.Server, w.run.Duration = iperfEnd, duration
	// Of UDP, iperf3 counts the losses of the warm-up and not the packets.
	if duration > 2*time.Second && w.run.UDP == 0 {
		w.run.Warmup = time.Second
	}
	before, err := r.cpu()
	if err != nil {
		return s, err
	}
	pinged := make(chan error, 1)
	go func() {
		if w.run.UDP > 0 {
			pinged <- nil // a flood without a congestion control fills any queue
			return
		}
		const interval = 20 * time.Millisecond
		var err error
		s.pings, err = r.top.Client.Ping(ctx, netlab.Ping{
			To: iperfEnd.Addr(), Interval: interval, Count: int(duration / interval), Wait: 300 * time.Millisecond,
		})
		pinged <- err
	}()
	result, err := r.top.Client.Iperf(ctx, w.run)
	if perr := <-pinged; err == nil {
		err = perr
	}
	if err != nil {
		return s, err
	}
	after, err := r.cpu()
	if err != nil {
		return s, err
	}
	s.gbits, s.packets = result.Bits/1e9, result.Packets
	// The time before what iperf3 counts is paid for as well.
	counted := duration.Seconds() / (duration + w.run.Warmup).Seconds()
	s.cpu = (after - before).Seconds() * counted / (result.Bytes * 8 / 1e9)
	return s, nil
}

// cpu returns the time that the tunnel's processes have used.
func (r *rig) cpu() (total time.Duration, err error) {
	for _, c := range r.tunnels {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.Process.Pid))
		if err != nil {
			return 0, fmt.Errorf("the tunnel's process is gone: %w; it printed:\n%s", err, c.Log())
		}
		// The name, in parentheses, may hold anything; utime and stime are the
		// 12th and 13th field after it (proc(5)), in hundredths of a second.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		for _, f := range fields[11:13] {
			ticks, err := strconv.ParseInt(f, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read the time of process %d: %w", c.Process.Pid, err)
			}
			total += time.Duration(ticks) * 10 * time.Millisecond
		}
	}
	return total, nil
}

// memory returns a process' resident memory in MB.
func memory(tb netlab.TB, c *netlab.Cmd) float64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Process.Pid))
	if err != nil {
		tb.Fatalf("read the memory of %s: %v; it printed:\n%s", c.Args[0], err, c.Log())
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			var kb float64
			if _, err := fmt.Sscan(value, &kb); err == nil {
				return kb * 1024 / 1e6
			}
		}
	}
	tb.Fatalf("no VmRSS in the status of %s", c.Args[0])
	return 0
}

// values returns what get finds in the samples, in ascending order.
func values(samples []sample, get func(sample) []float64) (all []float64) {
	for _, s := range samples {
		all = append(all, get(s)...)
	}
	slices.Sort(all)
	return all
}

// median returns the middle of sorted values, or of the two in the middle; zero
// if there are none.
func median(sorted []float64) float64 {
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// quantile returns the q-quantile of sorted values; zero if there are none.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
