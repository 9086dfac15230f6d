package netlab

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestIperf(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{Rate: 50e6})
	server := netip.AddrPortFrom(ServerAddr4, 5201)
	top.Internet.ServeIperf(ctx, server.Port())
	// What is below the limit is the machine's own affair; above it there is what
	// buffers hold.
	for _, tt := range []struct {
		run      Iperf
		min, max float64 // Mbit/s
	}{
		{Iperf{Flows: 2}, 5, 65},
		{Iperf{Reverse: true}, 5, 65},
		{Iperf{UDP: 1000, Rate: 10e6}, 5, 11},
	} {
		tt.run.Server, tt.run.Duration = server, time.Second
		r, err := top.Client.Iperf(ctx, tt.run)
		if err != nil {
			t.Errorf("%+v: %v", tt.run, err)
			continue
		}
		if got := r.Bits / 1e6; got < tt.min || got > tt.max {
			t.Errorf("%+v: %.1f Mbit/s, want %v to %v", tt.run, got, tt.min, tt.max)
		}
		if tt.run.UDP > 0 && (r.Packets < 600 || r.Packets > 1400) {
			t.Errorf("%.0f packets a second, want about 1250", r.Packets)
		}
		if len(r.Steps) < 5 {
			t.Errorf("steps %v, want about ten", r.Steps)
		}
	}
	_, err := top.Client.Iperf(ctx, Iperf{Server: netip.AddrPortFrom(ServerAddr4, 1), Duration: time.Second})
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("error %v, want what iperf3 says", err)
	}
}

func TestParseIperf(t *testing.T) {
	for _, tt := range []struct {
		out        string
		runErr     error
		wrong      bool
		notStarted bool
	}{
		{`{"intervals":[{"sum":{"bytes":5}}],"end":{"sum_received":{"bytes":5,"bits_per_second":40}}}`, nil, false, false},
		{`{"intervals":[],"error":"unable to receive control message: Connection reset by peer"}`, nil, true, true},
		{`{"intervals":[{"sum":{"bytes":5}}],"error":"the server has terminated"}`, nil, true, false},
		{`{"intervals":[]}`, errors.New("signal: killed"), true, false},
		{``, errors.New("exit status 1"), true, false},
	} {
		r, err := parseIperf([]byte(tt.out), tt.runErr)
		if (err != nil) != tt.wrong || errors.Is(err, errNotStarted) != tt.notStarted {
			t.Errorf("%s: %v, want an error %v, that it did not start %v", tt.out, err, tt.wrong, tt.notStarted)
		}
		if err == nil && (r.Bits != 40 || len(r.Steps) != 1) {
			t.Errorf("%s: %+v", tt.out, r)
		}
	}
}

func TestIperfArgs(t *testing.T) {
	args := Iperf{Server: netip.MustParseAddrPort("192.0.2.1:5"), UDP: 200, Warmup: time.Second}.Args()
	for _, want := range [][]string{{"--udp", "--length", "200"}, {"--bitrate", "0"}, {"--omit", "1"}, {"--parallel", "1"}} {
		i := slices.Index(args, want[0])
		if i < 0 || !slices.Equal(args[i:min(i+len(want), len(args))], want) {
			t.Errorf("arguments %q, want %q in them", args, want)
		}
	}
}
