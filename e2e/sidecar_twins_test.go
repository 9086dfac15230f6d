package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestCopiedStateDirectory has two machines be one client. They take the place
// from each other, which must not keep the gateway busy, and say what is wrong.
func TestCopiedStateDirectory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.join(w.token)
	twin := w.addClient("twin")
	if err := os.Mkdir(twin.stateDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(filepath.Join(c.stateDir(), "client.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(twin.stateDir(), "client.key"), key, 0o600); err != nil {
		t.Fatal(err)
	}
	twin.start(w.token)
	time.Sleep(6 * time.Second)
	both := c.sidecar.Log() + twin.sidecar.Log()
	if n := strings.Count(both, "msg=connected"); n < 3 || n > 25 {
		t.Errorf("%d sessions in 6 s, want some, and a pause between them", n)
	}
	if !strings.Contains(both, "another machine uses a copy of this state directory") {
		t.Errorf("the logs do not say what is wrong:\n%s", both)
	}
}
