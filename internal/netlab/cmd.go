package netlab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A Cmd is an exec.Cmd whose process starts inside a namespace. It leads a
// process group, and the group is killed when the lab ends; the process itself
// also when this process dies, but for those of NS.Join. Use the methods here in
// place of exec.Cmd's own.
type Cmd struct {
	*exec.Cmd
	ns   *NS
	out  output
	done chan struct{} // closed once err is set
	err  error
}

// Command prepares a command. What it prints is kept, unless Stdout and Stderr
// are set before the start. It is killed when ctx ends.
func (n *NS) Command(ctx context.Context, name string, args ...string) *Cmd {
	c := &Cmd{Cmd: exec.CommandContext(ctx, name, args...), ns: n, done: make(chan struct{})}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.WaitDelay = 2 * time.Second // for children that keep the output open
	return c
}

// Start starts the process; Wait, Stop or Kill may follow, in any number.
func (c *Cmd) Start() error {
	if c.Stdout == nil {
		c.Stdout = &c.out
	}
	if c.Stderr == nil {
		c.Stderr = &c.out
	}
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Setpgid = true
	if !c.ns.joined {
		c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	if !c.ns.lab.enter() {
		return fmt.Errorf("start in namespace %s: %w", c.ns.Name, net.ErrClosed)
	}
	defer c.ns.lab.inside.Done()
	started := make(chan error, 1)
	select {
	case c.ns.calls <- func() { started <- c.Cmd.Start() }:
	case <-c.ns.gone:
		started <- net.ErrClosed
	}
	if err := <-started; err != nil {
		return fmt.Errorf("start in namespace %s: %w", c.ns.Name, err)
	}
	c.ns.lab.mu.Lock()
	c.ns.lab.cmds = append(c.ns.lab.cmds, c)
	c.ns.lab.mu.Unlock()
	go func() {
		c.err = c.Cmd.Wait()
		close(c.done)
	}()
	return nil
}

// Start starts a command that must start, and returns it running.
func (n *NS) Start(ctx context.Context, name string, args ...string) *Cmd {
	n.lab.tb.Helper()
	c := n.Command(ctx, name, args...)
	if err := c.Start(); err != nil {
		n.lab.tb.Fatalf("%v", err)
	}
	return c
}

// Wait waits for the process to end; nil means exit status 0.
func (c *Cmd) Wait() error {
	<-c.done
	return c.err
}

// Done is closed when the process has ended.
func (c *Cmd) Done() <-chan struct{} { return c.done }

// Run starts the process and waits for it.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// CombinedOutput runs the process and returns what it printed.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	err := c.Run()
	return []byte(c.Log()), err
}

// Output runs the process and returns what it printed on standard output alone.
func (c *Cmd) Output() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Run()
	return out.Bytes(), err
}

// Log returns what the process has printed so far.
func (c *Cmd) Log() string { return c.out.String() }

// WaitLog waits until the process has printed text.
func (c *Cmd) WaitLog(ctx context.Context, text string) error {
	for !strings.Contains(c.Log(), text) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s to print %q: %w; it printed:\n%s", c.Args[0], text, ctx.Err(), c.Log())
		case <-c.done:
			if strings.Contains(c.Log(), text) {
				return nil
			}
			return fmt.Errorf("%s ended (%v) before it printed %q:\n%s", c.Args[0], c.err, text, c.Log())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// Stop asks the process to end with SIGTERM and waits; after the time given it
// is killed and that is an error.
func (c *Cmd) Stop(within time.Duration) error {
	if err := c.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", c.Args[0], err)
	}
	select {
	case <-c.done:
		return c.err
	case <-time.After(within):
		c.Kill()
		return fmt.Errorf("%s did not end within %v of SIGTERM", c.Args[0], within)
	}
}

// Kill ends the process and what it started with SIGKILL, and waits.
func (c *Cmd) Kill() {
	select {
	case <-c.done: // the number may be another process' by now
		return
	default:
	}
	// The process may end at this very moment: that is what is wanted.
	_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
	<-c.done
}

// output keeps what a process printed.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}
