package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// healthcheck runs the command beside the client's sidecar and returns its one
// line.
func (c *client) healthcheck(args ...string) (line string, err error) {
	c.w.t.Helper()
	cmd := c.ns.Command(c.w.ctx, program, append([]string{"healthcheck", "--state-dir", c.stateDir()}, args...)...)
	out, err := cmd.CombinedOutput()
	line, more, _ := strings.Cut(string(out), "\n")
	if more != "" {
		c.w.t.Errorf("healthcheck printed more than a line: %s", out)
	}
	return line, err
}

// TestHealthcheck has both roles live, and judges what the tunnel carries.
func TestHealthcheck(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	c := w.client0()
	healthy := func(what string) {
		t.Helper()
		if line, err := c.healthcheck(); err != nil || !strings.HasPrefix(line, "the gateway answers through quicvpn0: ") {
			t.Errorf("%s: %q (%v)", what, line, err)
		}
	}
	sick := func(what, want string, args ...string) {
		t.Helper()
		if line, err := c.healthcheck(args...); fmt.Sprint(err) != "exit status 1" || !strings.HasPrefix(line, "quicvpn: ") || !strings.Contains(line, want) {
			t.Errorf("%s: got %q (%v), want %q", what, line, err, want)
		}
	}
	sick("no sidecar", "no sidecar runs with this state directory")
	w.startGateway()
	c.join(w.token)
	healthy("connected")

	role := w.gateway.Process
	if err := role.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	sick("at once when the gateway hangs", "the tunnel is dead: no answer from 10.91.0.1 ", "--timeout", "1s")
	if err := c.sidecar.WaitLog(w.ctx, "the gateway does not answer"); err != nil {
		t.Fatal(err)
	}
	sick("when it is known to hang", "the gateway does not answer", "--timeout", "1s")
	if err := role.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	c.waitUp()
	healthy("the gateway goes on")

	w.gateway.Kill()
	if err := c.sidecar.WaitLog(w.ctx, "nothing listens"); err != nil {
		t.Fatal(err)
	}
	sick("there is no gateway", "and the sidecar tries to connect again: ", "--timeout", "500ms")
	w.startGateway()
	c.waitUp()
	healthy("the gateway is back")
	c.sidecar.Kill()
	sick("the sidecar was killed", "there is no interface quicvpn0 here")
	c.join(w.token)
	healthy("it is back")
	c.stop()
	sick("stopped", "no sidecar runs with this state directory")
}
