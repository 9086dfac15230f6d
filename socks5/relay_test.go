package socks5

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/relay"
)

// ways are the two protocols.
var ways = map[string]func(w *world, to Addr) *net.TCPConn{
	"SOCKS5": (*world).through,
	"HTTP": func(w *world, to Addr) *net.TCPConn {
		c := w.connect()
		send(w.t, c, fmt.Appendf(nil, "CONNECT %v HTTP/1.1\r\nHost: %v\r\n\r\n", to, to))
		expect(w.t, c, []byte("HTTP/1.1 200 Connection established\r\n\r\n"))
		return c
	},
}

// wrapped hides that a connection is the system's, as those of a tunnel are not.
type wrapped struct{ net.Conn }

func (c wrapped) CloseWrite() error { return c.Conn.(*net.TCPConn).CloseWrite() }
func (c wrapped) Reset() error      { return c.Conn.(*net.TCPConn).SetLinger(0) }

// wrap has the other side's connections wrapped.
func wrap(w *world) {
	w.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
		c, err := w.dial(ctx, network, to)
		if err != nil {
			return nil, err
		}
		return wrapped{c}, nil
	}
}

// eachWay runs a test by both protocols, with TCP and with something else at the
// other side.
func eachWay(t *testing.T, test func(t *testing.T, w *world, through func(w *world, to Addr) *net.TCPConn)) {
	for name, through := range ways {
		for kind, set := range map[string]func(*world){"splice": nil, "copy": wrap} {
			t.Run(name+" "+kind, func(t *testing.T) { test(t, newWorld(t, set), through) })
		}
	}
}

func TestHalfClose(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, through func(*world, Addr) *net.TCPConn) {
		// The client ends first.
		to := listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
			defer c.Close()
			b, err := io.ReadAll(c)
			fmt.Fprintf(c, "%s, %v", b, err)
		})
		c := through(w, to)
		send(t, c, []byte("question"))
		c.CloseWrite()
		expect(t, c, []byte("question, <nil>"))
		expectEOF(t, c)
		// The server ends first.
		got := make(chan string, 1)
		to = listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
			defer c.Close()
			c.Write([]byte("greeting"))
			c.CloseWrite()
			b, err := io.ReadAll(c)
			got <- fmt.Sprintf("%s, %v", b, err)
		})
		c = through(w, to)
		expect(t, c, []byte("greeting"))
		expectEOF(t, c)
		send(t, c, []byte("answer"))
		c.Close()
		if s := <-got; s != "answer, <nil>" {
			t.Errorf("the server got %s", s)
		}
	})
}

// wasReset knows Linux's error for a reset after the peer's end, too.
func wasReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func TestReset(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, through func(*world, Addr) *net.TCPConn) {
		// By the server.
		c := through(w, listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 1))
			relay.Reset(c)
		}))
		send(t, c, []byte("x"))
		if _, err := c.Read(make([]byte, 1)); !wasReset(err) {
			t.Errorf("read %v, want a reset", err)
		}
		// By the client, also after it has ended its direction.
		for _, half := range []bool{false, true} {
			ended := make(chan error, 1)
			ready := make(chan struct{})
			c = through(w, listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
				defer c.Close()
				_, err := c.Read(make([]byte, 1))
				close(ready)
				if err == nil || half {
					err = relay.AwaitReset(c)
				}
				ended <- err
			}))
			if half {
				c.CloseWrite()
			} else {
				send(t, c, []byte("x"))
			}
			<-ready
			relay.Reset(c)
			if err := <-ended; !wasReset(err) {
				t.Errorf("half closed %t: the server saw %v, want a reset", half, err)
			}
		}
	})
}

// stream is a connection whose end its context tells, as a QUIC stream's.
type stream struct {
	net.Conn
	ctx    context.Context
	cancel context.CancelFunc
}

func (s *stream) Context() context.Context { return s.ctx }
func (s *stream) CloseWrite() error        { s.cancel(); return s.Conn.(*net.TCPConn).CloseWrite() }

// A stream that has ended its direction and is lost then resets the client; one that
// ends well does not.
func TestLostStream(t *testing.T) {
	for _, lost := range []bool{true, false} {
		streams := make(chan *stream, 1)
		w := newWorld(t, func(w *world) {
			w.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
				c, err := w.dial(ctx, network, to)
				ctx, cancel := context.WithCancel(context.Background())
				s := &stream{c, ctx, cancel}
				streams <- s
				return s, err
			}
		})
		c := w.through(listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
			defer c.Close()
			c.CloseWrite()
			io.Copy(io.Discard, c)
		}))
		expectEOF(t, c)
		if lost {
			(<-streams).cancel()
			if err := relay.AwaitReset(c); !wasReset(err) {
				t.Errorf("%v, want a reset", err)
			}
			continue
		}
		c.CloseWrite()
		eventually(t, "the end of the connection", func() bool { return w.count() == 0 })
		c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if err := relay.AwaitReset(c); err != nil {
			t.Errorf("%v after a good end", err)
		}
	}
}

// A side that does not read stops the other one.
func TestBackPressure(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, through func(*world, Addr) *net.TCPConn) {
		hold := make(chan struct{})
		sum := make(chan int64, 1)
		c := through(w, listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
			defer c.Close()
			c.SetReadBuffer(64 << 10)
			<-hold
			n, _ := io.Copy(io.Discard, c)
			sum <- n
		}))
		c.SetWriteBuffer(64 << 10)
		var sent int64
		b := make([]byte, 64<<10)
		for {
			c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
			n, err := c.Write(b)
			sent += int64(n)
			if err != nil {
				break
			}
			if sent > 64<<20 {
				t.Fatal("64 MiB and no end")
			}
		}
		close(hold)
		c.CloseWrite()
		if got := <-sum; got != sent {
			t.Errorf("%d bytes arrived of %d", got, sent)
		}
	})
}

// Bytes arrive whole and in order, whatever the sizes in which they are written.
func TestTransferWhole(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, through func(*world, Addr) *net.TCPConn) {
		c := through(w, listen(t, "127.0.0.1:0", echo))
		data := make([]byte, 3<<20)
		rng := rand.New(rand.NewPCG(1, 2))
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		go func() {
			for rest := data; len(rest) > 0; {
				n := min(len(rest), 1+rng.IntN(100_000))
				if _, err := c.Write(rest[:n]); err != nil {
					t.Error(err)
					return
				}
				rest = rest[n:]
			}
			c.CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, %v, want %d", len(got), err, len(data))
		}
	})
}
