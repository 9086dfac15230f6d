package publish

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	host4  = netip.MustParseAddr("192.0.2.1")
	host4b = netip.MustParseAddr("192.0.2.9")
	host6  = netip.MustParseAddr("2001:db8::1")
	app4   = netip.MustParseAddr("10.88.0.5")
	app6   = netip.MustParseAddr("fd00:88::5")
)

// A world is a client beside a host, and a container's namespace that neither of
// them has a link to.
type world struct {
	t                 *testing.T
	ctx               context.Context
	client, host, app *netlab.NS
	sandbox           *netlab.Cmd // the process that keeps the app's namespace in /proc
	to                *container
	log               *syncBuffer
}

func newWorld(t *testing.T) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	t.Cleanup(cancel)
	lab := netlab.New(t)
	w := &world{t: t, ctx: ctx, client: lab.NS("client"), host: lab.NS("host"), app: lab.NS("app"), log: new(syncBuffer)}
	lab.Link(w.client, w.host, netlab.LinkConfig{
		A: netlab.End{Addresses: prefixes("192.0.2.2/24", "2001:db8::2/64")},
		B: netlab.End{Addresses: prefixes("192.0.2.1/24", "192.0.2.9/24", "2001:db8::1/64")},
	})
	lab.Link(w.app, lab.NS("nowhere"), netlab.LinkConfig{A: netlab.End{Addresses: prefixes("10.88.0.5/24", "fd00:88::5/64")}})
	w.sandbox = w.app.Start(ctx, "sleep", "infinity")
	w.to = &container{
		Target: Target{Sandbox: fmt.Sprintf("/proc/%d/ns/net", w.sandbox.Process.Pid), Addrs: []netip.Addr{app4, app6}},
		log:    slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		limit:  limit, idleUnanswered: idleUnanswered, idleAnswered: idleAnswered,
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s", w.log)
		}
	})
	return w
}

func prefixes(texts ...string) (ps []netip.Prefix) {
	for _, s := range texts {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

// listen publishes ports at the host.
func (w *world) listen(ports ...Port) (l *Listeners, err error) {
	err = w.host.Do(func() error {
		l, err = listen(ports, w.to)
		return err
	})
	return l, err
}

// publish is listen for ports that can be published, until the test's end; then
// nothing may be open that was not before.
func (w *world) publish(ports ...Port) *Listeners {
	w.t.Helper()
	before := descriptors(w.t)
	l, err := w.listen(ports...)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := l.Close(); err != nil {
			w.t.Errorf("close: %v", err)
		}
		if err := l.Close(); err != nil {
			w.t.Errorf("close once more: %v", err)
		}
		// What clients have may outlive the listeners, but not by long.
		w.eventually(func() error {
			if diff := cmp.Diff(before, descriptors(w.t)); diff != "" {
				return fmt.Errorf("descriptors (-before +after):\n%s", diff)
			}
			return nil
		})
	})
	return l
}

// descriptors returns what is open, but for what the runtime keeps: pipes for the
// next splice, and handles of processes.
func descriptors(t *testing.T) []string {
	t.Helper()
	fds, err := netlab.Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(fds, func(fd string) bool { return fd == "pipe:" || fd == "anon_inode:" })
}

// dial connects the client.
func (w *world) dial(network string, to netip.Addr, port uint16) net.Conn {
	w.t.Helper()
	c, err := w.client.DialContext(w.ctx, network, netip.AddrPortFrom(to, port).String())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	deadline, _ := w.ctx.Deadline()
	c.SetDeadline(deadline)
	return c
}

// serve runs an app that handles each connection to a port by f.
func (w *world) serve(network, address string, f func(*net.TCPConn)) {
	w.t.Helper()
	ln, err := w.app.Listen(network, address)
	if err != nil {
		w.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				stop := context.AfterFunc(w.ctx, func() { c.Close() })
				defer stop()
				f(c.(*net.TCPConn))
			})
		}
	})
	w.t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
}

// echoWhole sends back all that came, after its end.
func echoWhole(c *net.TCPConn) {
	all, err := io.ReadAll(c)
	if err == nil {
		_, _ = c.Write(all)
	}
}

func (w *world) eventually(ok func() error) {
	w.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.t.Errorf("after 30 s: %v", err)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// logged waits until the log holds the text.
func (w *world) logged(text string) {
	w.t.Helper()
	w.eventually(func() error {
		if !strings.Contains(w.log.String(), text) {
			return fmt.Errorf("the log does not tell: %s", text)
		}
		return nil
	})
}

// syncBuffer is a bytes.Buffer that several write to.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
