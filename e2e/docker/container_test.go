package docker

import (
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestContainer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --ipv6 --subnet 172.30.0.0/24 --subnet fd00:30::/64 net")
	h.must("run -d --name web --network net IMAGE serve")
	for url, want := range map[string]string{
		"http://" + netlab.ServerAddr4.String() + "/":   netlab.EgressAddr4.String(),
		"http://[" + netlab.ServerAddr6.String() + "]/": netlab.EgressAddr6.String(),
		"http://web/": "172.30.0.3",
	} {
		if page := h.must("run --rm --network net IMAGE get " + url); !strings.Contains(page, want) {
			t.Errorf("%s: %q, want %s in it", url, page, want)
		}
	}
	if problem := h.capture.Traffic().Problem(); problem != "" {
		t.Errorf("the uplink: %s", problem)
	}
}
