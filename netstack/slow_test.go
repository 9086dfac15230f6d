package netstack

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A pump is the other side of a flow, as fast as it is read; what is written to it
// stays unless it drains. It has no end of its own.
type pump struct {
	net.Conn
	read, written atomic.Int64
	drains        chan struct{} // closed when Write may go on
	over          chan struct{}
	once          sync.Once
}

func newPump() *pump { return &pump{drains: make(chan struct{}), over: make(chan struct{})} }

func (p *pump) Read(b []byte) (int, error) {
	select {
	case <-p.over:
		return 0, net.ErrClosed
	default:
		p.read.Add(int64(len(b)))
		return len(b), nil
	}
}

func (p *pump) Write(b []byte) (int, error) {
	select {
	case <-p.drains:
		p.written.Add(int64(len(b)))
		return len(b), nil
	case <-p.over:
		return 0, net.ErrClosed
	}
}

func (p *pump) Close() error                    { p.once.Do(func() { close(p.over) }); return nil }
func (p *pump) Reset() error                    { return p.Close() }
func (p *pump) CloseWrite() error               { return nil }
func (p *pump) SetReadDeadline(time.Time) error { return nil }

// still waits until a number does not change any more, and returns it.
func still(n func() int64) int64 {
	for last := int64(-1); ; time.Sleep(300 * time.Millisecond) {
		if is := n(); is == last {
			return is
		} else {
			last = is
		}
	}
}

// What one side does not read the other side keeps, but for a bounded part.
func TestSlowReader(t *testing.T) {
	p := newPump()
	l := newLabOf(t, Config{Dial: func(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) { return p, nil }})
	const socket, limit = 64 << 10, nearBuffer + 512<<10
	c := l.dial(t, "10.0.0.1:80")
	if err := errors.Join(c.SetReadBuffer(socket), c.SetWriteBuffer(socket)); err != nil {
		t.Fatal(err)
	}
	// It is fast first, so that buffers grow.
	if _, err := io.CopyN(io.Discard, c, 64<<20); err != nil {
		t.Fatal(err)
	}
	if kept := still(p.read.Load) - 64<<20; kept < 64<<10 || kept > limit {
		t.Errorf("%d bytes are kept for an app that does not read", kept)
	}
	sent := make(chan struct{})
	var written atomic.Int64
	go func() {
		defer close(sent)
		b := make([]byte, 16<<10)
		for {
			n, err := c.Write(b)
			written.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	if kept := still(written.Load); kept < 64<<10 || kept > limit {
		t.Errorf("an app wrote %d bytes that nobody reads", kept)
	}
	close(p.drains)
	within(t, "progress", func() bool { return p.written.Load() > 2*limit })
	// A side that is lost takes the other along at once.
	p.Close()
	within(t, "release", func() bool { return l.open.Load() == 0 })
	<-sent
	if _, err := c.Write([]byte("a")); err == nil {
		t.Error("the app could write on")
	}
}

// A flow of a Stack that ends is reset at once, and so is one that is dialled.
func TestCloseResets(t *testing.T) {
	p := newPump()
	dialled := make(chan struct{}, 1)
	l := newLabOf(t, Config{Dial: func(ctx context.Context, _, to netip.AddrPort) (net.Conn, error) {
		if to.Port() == 81 {
			dialled <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return p, nil
	}})
	c := l.dial(t, "10.0.0.1:80")
	failed := make(chan error)
	go func() {
		_, err := l.ns.DialContext(context.Background(), "tcp", "10.0.0.1:81")
		failed <- err
	}()
	<-dialled
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the app reads until %v", err)
	}
	if err := <-failed; !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the app that waited got %v", err)
	}
}

// An app that has sent its all may still be lost.
func TestResetAfterEnd(t *testing.T) {
	lost := make(chan struct{})
	l, _ := newDialLab(t, func(c *net.TCPConn) {
		if _, err := io.Copy(io.Discard, c); err != nil {
			t.Error(err)
		}
		// It has ended its direction, and gets nothing.
		raw, err := c.SyscallConn()
		if err != nil {
			t.Error(err)
		}
		within(t, "reset", func() bool {
			var code int
			raw.Control(func(fd uintptr) { code, _ = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR) })
			return code != 0
		})
		close(lost)
	})
	c := l.dial(t, "10.0.0.1:80")
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	c.SetLinger(0)
	c.Close()
	<-lost
	within(t, "release", func() bool { return l.open.Load() == 0 })
}

func TestShareOf(t *testing.T) {
	for _, tt := range []struct{ n, most, want int }{
		{0, 1 << 20, 1 << 20}, {1, 1 << 20, 1 << 20}, {1, 1 << 30, memory / 4}, {127, 1 << 20, 1 << 20},
		{128, 1 << 20, 1 << 19}, {1000, 1 << 20, startBuffer}, {10_000, 1 << 20, leastBuffer}, {1 << 30, 1 << 20, leastBuffer},
	} {
		if got := shareOf(tt.n, tt.most); got != tt.want {
			t.Errorf("%d connections of %d bytes at most: %d, want %d", tt.n, tt.most, got, tt.want)
		}
	}
}
