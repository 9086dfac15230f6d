// Package moved measures what iperf3 moves through a rig of a benchmark, and what
// that costs the benchmark's own process.
package moved

import (
	"context"
	"slices"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A Sample is one run of iperf3.
type Sample struct {
	Gbits float64 // a second
	NsKB  float64 // CPU of this process for a KiB moved
}

// By runs iperf3 in a namespace.
func By(ctx context.Context, client *netlab.NS, run netlab.Iperf) (Sample, error) {
	before := cpuTime()
	res, err := client.Iperf(ctx, run)
	if err != nil {
		return Sample{}, err
	}
	cpu := cpuTime() - before
	return Sample{Gbits: res.Bits / 1e9, NsKB: float64(cpu.Nanoseconds()) / (res.Bytes / 1024)}, nil
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // it fails for bad arguments only
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Median returns the median of a figure of samples.
func Median(samples []Sample, figure func(Sample) float64) float64 {
	var v []float64
	for _, s := range samples {
		v = append(v, figure(s))
	}
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
