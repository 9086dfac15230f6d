package main

import (
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestJudge(t *testing.T) {
	for _, tt := range []struct {
		traffic netlab.Traffic
		want    string // a part of the error
	}{
		{netlab.Traffic{Tunnel: 1, DNS: 1}, ""},
		{netlab.Traffic{}, "no packet of the tunnel"},
		{netlab.Traffic{Tunnel: 1, Clear: 2, Samples: []string{"one", "two"}}, "2 packets to the server in clear: one, two"},
		{netlab.Traffic{Tunnel: 1, Lost: 3}, "3 packets were lost"},
	} {
		err := judge(tt.traffic)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q in it", tt.traffic, err, tt.want)
		}
	}
}
