//go:build !race

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

const raceEnabled = false

// TestIdleMemory measures the resident memory of a sidecar that has nothing to
// do. The race detector's own memory is many times as much.
func TestIdleMemory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.join(w.token)
	c.checkPages()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.sidecar.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	var kb int
	if _, err := fmt.Sscan(rest, &kb); err != nil {
		t.Fatal(err)
	}
	if kb == 0 || kb >= 40_000 {
		t.Errorf("the idle sidecar has %d KB, want less than 40 MB", kb)
	}
}
