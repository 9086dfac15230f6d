//go:build bench

package tunnel

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quicvpn/quicvpn/internal/linksim"
	"github.com/quicvpn/quicvpn/socks5"
)

// TestBenchSocks prints what one connection through a client's SOCKS5 proxy carries
// over emulated links, beside a flow of the same session without the proxy: `make
// bench-socks`.
func TestBenchSocks(t *testing.T) {
	links := []struct{ mbps, ms float64 }{{50, 10}, {100, 1}, {100, 200}, {50, 300}, {10, 100}, {10, 300}}
	directions := []string{"down", "up"}
	if os.Getenv("QUICK") != "" {
		links, directions = links[:3], directions[:1]
	}
	fmt.Println("| Mbit/s | ms one way | direction | SOCKS5, early: % | first byte, RTT | SOCKS5, strict: % | first byte, RTT | flow alone: % |")
	fmt.Println("| --- | --- | --- | --- | --- | --- | --- | --- |")
	for _, l := range links {
		for _, direction := range directions {
			early, strict := socksRun(t, l.mbps, l.ms, direction, "early"), socksRun(t, l.mbps, l.ms, direction, "strict")
			alone := socksRun(t, l.mbps, l.ms, direction, "alone")
			fmt.Printf("| %.0f | %.0f | %s | %.1f | %.2f | %.1f | %.2f | %.1f |\n", l.mbps, l.ms, direction,
				early.share, early.first, strict.share, strict.first, alone.share)
		}
	}
	fmt.Println("\nOne connection of 20 s, its dial included, in a session that is 5 s old; % of the link's rate, IP and UDP headers not counted.")
}

type socksResult struct {
	share float64 // of the link's rate, %
	first float64 // round trips from before the dial to the first byte
}

const socksTime = 20 * time.Second

func socksRun(t *testing.T, mbps, ms float64, direction, how string) (r socksResult) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		rate := mbps * 1e6 / 8
		delay := time.Duration(ms * 1e6)
		queue := max(rate*2*delay.Seconds(), 64<<10)
		there := linksim.New(linksim.Config{Rate: rate, Delay: delay, Queue: queue, Seed: 7})
		back := linksim.New(linksim.Config{Rate: rate, Delay: delay, Queue: queue, Seed: 8})
		far := &farServer{up: direction == "up"}
		s, stop := simulateSession(t.Context(), t, &Dialer{}, ServerConfig{
			DialTCP: func(context.Context, *Session, string) (net.Conn, error) { return far.dial(), nil },
		}, there, back)
		time.Sleep(5 * time.Second)

		began := time.Now()
		conn, hangUp := socksDial(t, s, how)
		ask(t, conn, []byte("send"), 1)
		r.first = time.Since(began).Seconds() / (2 * delay.Seconds())
		var received *atomic.Int64 = new(atomic.Int64)
		var app sync.WaitGroup
		if far.up {
			received = &far.received
			app.Go(func() { io.Copy(conn, zeros{}) })
		} else {
			app.Go(func() { io.Copy(counter{received}, conn) })
		}
		time.Sleep(time.Until(began.Add(socksTime)))
		r.share = 100 * float64(received.Load()) / (rate * socksTime.Seconds())
		conn.Close()
		hangUp()
		app.Wait()
		stop()
		far.running.Wait()
		there.Close()
		back.Close()
	})
	return r
}

// socksDial connects through a proxy of the session, or without one.
func socksDial(t *testing.T, s *Session, how string) (conn net.Conn, hangUp func()) {
	t.Helper()
	if how == "alone" {
		f, err := s.OpenTCP(t.Context(), "192.0.2.80:80")
		if err != nil {
			t.Fatal(err)
		}
		return f, func() {}
	}
	ours, theirs := net.Pipe()
	proxy := &socks5.Server{Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
		if how == "early" {
			return s.OpenTCP(ctx, address)
		}
		return s.DialTCP(ctx, address)
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- proxy.Serve(ctx, &oneConn{conn: theirs, closed: make(chan struct{})}) }()
	ask(t, ours, []byte{5, 1, 0}, 2)
	ask(t, ours, []byte{5, 1, 0, 1, 192, 0, 2, 80, 0, 80}, 10)
	return ours, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// ask writes, and reads an answer of n bytes.
func ask(t *testing.T, c net.Conn, b []byte, n int) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
}

// oneConn is a listener with one connection.
type oneConn struct {
	conn   net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	<-l.closed
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *oneConn) Addr() net.Addr { return flowAddr{"pipe", "proxy"} }

// A farServer answers a request of 4 bytes by a byte, and then sends or receives
// without end.
type farServer struct {
	up       bool
	received atomic.Int64
	running  sync.WaitGroup
}

func (s *farServer) dial() net.Conn {
	ours, theirs := net.Pipe()
	s.running.Go(func() {
		defer theirs.Close()
		if _, err := io.ReadFull(theirs, make([]byte, 4)); err != nil {
			return
		}
		if _, err := theirs.Write([]byte{1}); err != nil {
			return
		}
		if s.up {
			io.Copy(counter{&s.received}, theirs)
		} else {
			io.Copy(theirs, zeros{})
		}
	})
	return ours
}

// counter counts what is written to it.
type counter struct{ n *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return len(b), nil
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }
