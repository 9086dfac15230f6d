// Package netlab builds small networks out of Linux network namespaces for
// tests, the demo and benchmarks.
//
// A Lab holds its namespaces by descriptor only and its commands die with it, so
// that everything goes away with the process, however that ends. It needs root,
// and the programs ip and nft for some of its calls. It never touches the
// namespaces that the process came from, but for what Lab.Host is told to do.
package netlab

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
)

// TB is what a lab reports to: a *testing.T or *testing.B, or the argument of a
// Main function. As with those, Fatalf is for the goroutine of the test only, so
// every netlab call that takes no context and returns no error is too.
type TB interface {
	Helper()
	Name() string
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
	Failed() bool
	Cleanup(func())
	TempDir() string
}

// A Lab owns namespaces, links, commands and captures, until its TB cleans up.
type Lab struct {
	tb      TB
	closing context.Context // done once the lab closes
	cancel  context.CancelFunc
	inside  sync.WaitGroup // functions that run in namespaces, commands that start

	mu      sync.Mutex // guards the fields below, until all has left
	closed  bool       // no function may enter a namespace any more
	closers []func()   // run last first
	cmds    []*Cmd
}

// New returns an empty lab that ends with tb. Where tb failed it shows what the
// lab's commands printed.
func New(tb TB) *Lab {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Fatalf("network namespaces need root: run this as root")
	}
	l := &Lab{tb: tb}
	l.closing, l.cancel = context.WithCancel(context.Background())
	tb.Cleanup(l.close)
	return l
}

func (l *Lab) onClose(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closers = append(l.closers, f)
}

// enter reports whether a function may enter a namespace; it then ends with
// inside.Done.
func (l *Lab) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.inside.Add(1)
	}
	return !l.closed
}

func (l *Lab) close() {
	l.cancel()
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.kill()
	l.inside.Wait()
	l.kill() // what was about to start
	for _, c := range l.cmds {
		if l.tb.Failed() && c.Log() != "" {
			l.tb.Logf("%s in %s printed:\n%s", c.Args, c.ns.Name, tail(c.Log(), 8<<10))
		}
	}
	for _, f := range slices.Backward(l.closers) {
		f()
	}
}

func (l *Lab) kill() {
	l.mu.Lock()
	cmds := slices.Clone(l.cmds)
	l.mu.Unlock()
	for _, c := range slices.Backward(cmds) {
		c.Kill()
	}
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// Main runs f the way a test runs, for programs: Fatalf ends f, cleanups run
// last first whatever happens, and the first failure is the error.
func Main(ctx context.Context, name string, f func(ctx context.Context, tb TB)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m := &mainTB{name: name}
	m.run(func() { f(ctx, m) })
	cancel()
	for len(m.cleanups) > 0 {
		last := m.cleanups[len(m.cleanups)-1]
		m.cleanups = m.cleanups[:len(m.cleanups)-1]
		m.run(last)
	}
	// Last of all: before, a command may still write there.
	for _, dir := range m.dirs {
		if err := os.RemoveAll(dir); err != nil {
			m.fail(fmt.Errorf("remove the temporary directory: %w", err))
		}
	}
	return m.err
}

// mainTB is the TB of a Main function.
type mainTB struct {
	name     string
	err      error
	cleanups []func()
	dirs     []string // that TempDir made
}

// run calls f on a goroutine that Fatalf can end.
func (m *mainTB) run(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if r := recover(); r != nil {
				stack := make([]byte, 16<<10)
				m.fail(fmt.Errorf("panic: %v\n%s", r, stack[:runtime.Stack(stack, false)]))
			}
		}()
		f()
	}()
	<-done
}

func (m *mainTB) fail(err error) {
	if m.err == nil {
		m.err = err
	}
}

func (m *mainTB) Helper()                    {}
func (m *mainTB) Name() string               { return m.name }
func (m *mainTB) Failed() bool               { return m.err != nil }
func (m *mainTB) Cleanup(f func())           { m.cleanups = append(m.cleanups, f) }
func (m *mainTB) Logf(f string, args ...any) { fmt.Fprintf(os.Stderr, f+"\n", args...) }

func (m *mainTB) Fatalf(f string, args ...any) {
	m.fail(fmt.Errorf(f, args...))
	runtime.Goexit()
}

func (m *mainTB) TempDir() string {
	dir, err := os.MkdirTemp("", m.name+"-")
	if err != nil {
		m.Fatalf("make a temporary directory: %v", err)
	}
	m.dirs = append(m.dirs, dir)
	return dir
}
