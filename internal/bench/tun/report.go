package main

import (
	"fmt"
	"io"
	"slices"

	"github.com/quicvpn/quicvpn/internal/bench/moved"
)

func count(flows int) string {
	if flows == 1 {
		return "1 flow"
	}
	return fmt.Sprintf("%d flows", flows)
}

// report prints the figures, and the ratios that are to be read.
func report(w io.Writer, rows []builder, samples map[cell][]moved.Sample) {
	measured := func(rig string) bool {
		return slices.ContainsFunc(rows, func(b builder) bool { return b.name == rig })
	}
	gbits := func(rig string, flows int) float64 {
		return moved.Median(samples[cell{rig, flows}], func(s moved.Sample) float64 { return s.Gbits })
	}
	fmt.Fprint(w, "| Gbit/s |")
	for _, n := range flowCounts {
		fmt.Fprintf(w, " %s |", count(n))
	}
	fmt.Fprint(w, " CPU of the copier, ns/KiB, 4 flows |\n| --- |")
	for range len(flowCounts) + 1 {
		fmt.Fprint(w, " --- |")
	}
	fmt.Fprintln(w)
	for _, b := range rows {
		fmt.Fprintf(w, "| %s |", b.name)
		for _, n := range flowCounts {
			fmt.Fprintf(w, " %.2f |", gbits(b.name, n))
		}
		if b.name == bridge {
			fmt.Fprintln(w, " |")
			continue
		}
		fmt.Fprintf(w, " %.0f |\n", moved.Median(samples[cell{b.name, 4}], func(s moved.Sample) float64 { return s.NsKB }))
	}
	fmt.Fprint(w, "\n| ratio |")
	for _, n := range flowCounts {
		fmt.Fprintf(w, " %s |", count(n))
	}
	fmt.Fprint(w, "\n| --- |")
	for range flowCounts {
		fmt.Fprint(w, " --- |")
	}
	fmt.Fprintln(w)
	for _, r := range [][2]string{
		{whole, plain}, {cut, plain}, {whole, wireguard}, {cut, wireguard}, {whole, bridge}, {hubbed, bridge}, {cut, bridge},
	} {
		if !measured(r[0]) || !measured(r[1]) {
			continue
		}
		fmt.Fprintf(w, "| %s / %s |", r[0], r[1])
		for _, n := range flowCounts {
			fmt.Fprintf(w, " %.2f |", gbits(r[0], n)/gbits(r[1], n))
		}
		fmt.Fprintln(w)
	}
}
