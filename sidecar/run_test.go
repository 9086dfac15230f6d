package sidecar

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestStopLeavesNothing(t *testing.T) {
	l := newLab(t)
	before := l.Client.Snapshot()
	cmd := l.start(childSettings{})
	l.ping(toyRemote4, toyRemote6, toyPeer4, toyPeer6)
	l.stop(cmd)
	if diff := cmp.Diff(before, l.Client.Snapshot()); diff != "" {
		t.Errorf("the namespace is not as it was:\n%s", diff)
	}
	t.Log(cmd.Log())
	for _, want := range []string{"interface=quicvpn0", "kill_switch=on", "10.88.0.5", "fd88::5", "mtu=1400", "queues=", "offloads="} {
		if !strings.Contains(cmd.Log(), want) {
			t.Errorf("the log lacks %q:\n%s", want, cmd.Log())
		}
	}
	_ = time.Second
	_ = netlab.Page
}
