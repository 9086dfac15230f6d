package main

import (
	"fmt"
	"io"
)

// printTable prints a Markdown table, a row for each workload.
func printTable(w io.Writer, samples map[cell][]sample) {
	const bare, wireguard, quicvpn = "bare veth", "wireguard-go", "quicvpn"
	gbits := func(s sample) []float64 { return []float64{s.gbits} }
	packets := func(s sample) []float64 { return []float64{s.packets / 1000} }
	cpu := func(s sample) []float64 { return []float64{s.cpu} }

	fmt.Fprintln(w, "| | bare veth | wireguard-go | quicvpn | to wireguard-go | CPU s/Gbit, both ends: wireguard-go | quicvpn | to wireguard-go |")
	fmt.Fprintln(w, "| --- | --- | --- | --- | --- | --- | --- | --- |")
	for _, load := range workloads {
		of := func(rig string, get func(sample) []float64) float64 {
			return median(values(samples[cell{rig, load.name}], get))
		}
		what, unit := gbits, "Gbit/s"
		if load.run.UDP > 0 {
			what, unit = packets, "k/s"
		}
		fmt.Fprintf(w, "| %s, %s | %.2f | %.2f | %.2f | **%.2f** | %.3f | %.3f | **%.2f** |\n", load.name, unit,
			of(bare, what), of(wireguard, what), of(quicvpn, what), of(quicvpn, what)/of(wireguard, what),
			of(wireguard, cpu), of(quicvpn, cpu), of(quicvpn, cpu)/of(wireguard, cpu))
	}
	fmt.Fprintln(w)
	fmt.Fprintln(w, "| ping under load, ms | bare veth | wireguard-go | quicvpn |")
	fmt.Fprintln(w, "| --- | --- | --- | --- |")
	for _, load := range workloads {
		if load.run.UDP > 0 {
			continue
		}
		fmt.Fprintf(w, "| %s: median / p99 |", load.name)
		for _, rig := range []string{bare, wireguard, quicvpn} {
			ms := values(samples[cell{rig, load.name}], pings)
			fmt.Fprintf(w, " %.2f / %.1f |", median(ms), quantile(ms, 0.99))
		}
		fmt.Fprintln(w)
	}
}

func pings(s sample) (ms []float64) {
	for _, p := range s.pings {
		ms = append(ms, p.Seconds()*1000)
	}
	return ms
}
