//go:build !race

package docker

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
)

const raceEnabled = false

// A hundred containers are on one network.
func TestHundredContainers(t *testing.T) {
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/16 net")
	const many = 100
	for i := range many {
		h.must(fmt.Sprintf("run -d --name c%d --network net IMAGE serve", i))
	}
	for _, i := range []int{0, 50, 99} {
		h.get(fmt.Sprintf("c%d", i), "c1")
		h.reaches(fmt.Sprintf("c%d", i))
	}
	const most = 300 << 20
	if rss := h.resident(); rss > most {
		t.Errorf("the driver has %d MB resident with %d containers, want at most %d", rss>>20, many, most>>20)
	} else {
		t.Logf("the driver has %d MB resident with %d containers", rss>>20, many)
	}
	if s := h.state(); s.endpoints() != many || len(s.Devices) != 0 {
		t.Errorf("with %d containers: %+v", many, s)
	}
	ids := strings.Fields(h.must("ps --all --quiet"))
	h.Docker(w.ctx, append([]string{"rm", "--force"}, ids...)...)
	h.waitEmpty()
}

// resident is the driver's memory in bytes.
func (h *host) resident() (n int) {
	h.w.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.driver.Process.Pid))
	if err != nil {
		h.w.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	if _, err := fmt.Sscanf(rest, "%d kB", &n); err != nil {
		h.w.t.Fatalf("the driver's memory: %v", err)
	}
	return n << 10
}
