package dockerlab

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// cliLimit is when a command of Docker's has hung.
const cliLimit = 90 * time.Second

// Docker runs a command of the docker client that must succeed, and returns what
// it printed on standard output, without spaces around it.
func (e *Engine) Docker(ctx context.Context, args ...string) string {
	e.tb.Helper()
	out, err := e.TryDocker(ctx, args...)
	if err != nil {
		e.tb.Fatalf("%v", err)
	}
	return out
}

// TryDocker is Docker for commands that may fail. The error has what the client
// printed on standard error.
func (e *Engine) TryDocker(ctx context.Context, args ...string) (stdout string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, cliLimit, fmt.Errorf("it has hung for %v", cliLimit))
	defer cancel()
	return output(ctx, e.Command(ctx, dockerCLI, args...))
}

// output runs a command and returns what it printed on standard output.
func output(ctx context.Context, c *netlab.Cmd) (string, error) {
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		err = fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSpace(string(out)), err
}

// Sandbox returns a file for this process that is the network namespace of a
// running container, as package nsenter takes it.
func (e *Engine) Sandbox(ctx context.Context, container string) string {
	e.tb.Helper()
	return e.Path(e.Docker(ctx, "inspect", "--format", "{{.NetworkSettings.SandboxKey}}", container))
}
