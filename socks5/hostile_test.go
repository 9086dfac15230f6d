package socks5

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A client that never gets to the point is sent away in time, and what it held is
// free.
func TestSlowClients(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.HandshakeTimeout = 400 * time.Millisecond
		w.Authenticate = Credentials("user", "secret")
	})
	before := descriptors(t)
	var running sync.WaitGroup
	for _, talk := range []string{
		"", // half-open
		"\x05", "\x05\xff", "\x05\x01\x02",
		"\x05\x01\x02\x01\xff", "\x05\x01\x02\x01\x04user\x06secret\x05\x01\x00\x03\xff",
		"G", "GET http://app.test/ HTTP/1.1\r\n", "CONNECT app.test:80 HTTP/1.1\r\nX: ",
	} {
		for _, pause := range []time.Duration{0, 40 * time.Millisecond} {
			c := w.connect()
			running.Go(func() {
				defer c.Close()
				start := time.Now()
				go func() { // a byte at a time, and for ever
					for i := 0; ; i++ {
						b := byte('x')
						if i < len(talk) {
							b = talk[i]
						} else if pause == 0 || talk == "" {
							return
						}
						if _, err := c.Write([]byte{b}); err != nil {
							return
						}
						time.Sleep(pause)
					}
				}()
				if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%q, %v: still there after %v", talk, pause, time.Since(start))
				}
			})
		}
	}
	running.Wait()
	eventually(t, "all gone", func() bool { return w.count() == 0 && descriptors(t) <= before })
}

// A client that takes no part of a reply holds nothing for long.
func TestMalformed(t *testing.T) {
	w := newWorld(t, nil)
	before := descriptors(t)
	for _, sent := range []string{
		"\x05\x00", "\x05\x01\x00\x06\x01\x00", "\x05\x01\x00\x05\x01\x00\x07", "\x05\x01\x00\x05\x02\x00\x01\x01\x01\x01\x01\x00\x01",
		"GET\x00", "GET / HTTP/9.9\r\n\r\n", "x\r\n\r\n", "CONNECT  HTTP/1.1\r\n\r\n", "\x04", "\xff\xff",
	} {
		c := w.connect()
		send(t, c, []byte(sent))
		c.CloseWrite()
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q: still there", sent)
		}
		c.Close()
	}
	eventually(t, "all gone", func() bool { return w.count() == 0 && descriptors(t) <= before })
}

func TestLimits(t *testing.T) {
	w := newWorld(t, func(w *world) { w.MaxConns, w.MaxConnsPerClient = 5, 3 })
	dial := func(last byte) (net.Conn, error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, last)}}
		return d.Dial("tcp", w.addr)
	}
	from := func(last byte) *net.TCPConn {
		c, err := dial(last)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
		return c.(*net.TCPConn)
	}
	refused := func(last byte) {
		t.Helper()
		c, err := dial(last)
		if err == nil { // the reset may be quicker
			defer c.Close()
			_, err = c.Read(make([]byte, 1))
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%v, want a reset", err)
		}
	}
	var first []*net.TCPConn
	for range 3 {
		c := from(2)
		greet(t, c)
		first = append(first, c)
	}
	refused(2)
	for range 2 {
		greet(t, from(3))
	}
	refused(4)
	w.logged("too many connections")
	first[0].Close()
	eventually(t, "a place", func() bool { return w.count() == 4 })
	greet(t, from(4))
}

// Five thousand at once, half-open, and then as many that want something: nothing is
// left of them, and others are served meanwhile.
func TestManyClients(t *testing.T) {
	const many = 5000
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	limit.Cur = limit.Max // both ends of each connection are ours
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(w *world) { w.MaxConns, w.MaxConnsPerClient, w.Log = 2*many, 2*many, nil })
	to := listen(t, "127.0.0.1:0", echo)
	c := w.through(to)
	before, goroutines, memory := descriptors(t), runtime.NumGoroutine(), heap()
	const whole = "\x05\x01\x00\x05\x01\x00\x03\x0fnowhere.invalid\x00\x50"
	for _, sent := range []string{"", "\x05\x01", "GET http://app.test/ HTTP/1.1\r\n", whole} {
		clients := make([]net.Conn, many)
		for i := range clients {
			c, err := net.Dial("tcp", w.addr)
			if err != nil {
				t.Fatal(err)
			}
			clients[i] = c
			send(t, c, []byte(sent))
		}
		if sent != whole { // else some are answered and gone by now
			eventually(t, "all accepted", func() bool { return w.count() == many+1 })
		}
		held := heap() - memory
		t.Logf("%q: %d bytes held for each, in %d goroutines", sent, held/many, runtime.NumGoroutine()-goroutines)
		if held > many*24<<10 {
			t.Errorf("%q: %d bytes held for each", sent, held/many)
		}
		c.SetDeadline(time.Now().Add(20 * time.Second)) // all of them together may take longer
		send(t, c, []byte("served meanwhile"))
		expect(t, c, []byte("served meanwhile"))
		for _, c := range clients {
			c.Close()
		}
		eventually(t, "the end of all", func() bool { return w.count() == 1 && runtime.NumGoroutine() <= goroutines+5 })
	}
	if n := descriptors(t); n > before+2 {
		t.Errorf("%d descriptors, were %d", n, before)
	}
	if h := heap(); h > memory+2*many<<10 { // maps do not shrink
		t.Errorf("heap %d bytes, was %d", h, memory)
	}
}

// heap returns the bytes of the heap and of stacks in use.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// Memory for established connections that idle, by a connection of a tunnel.
func TestIdleMemory(t *testing.T) {
	const many = 500
	w := newWorld(t, wrap)
	to := listen(t, "127.0.0.1:0", echo)
	for name, through := range ways {
		memory := heap()
		for range many {
			c := through(w, to)
			send(t, c, []byte("x"))
			expect(t, c, []byte("x"))
		}
		// The test's own ends, the echo's among them, are in it.
		each := (heap() - memory) / many
		t.Logf("%s: %d bytes for each", name, each)
		if each > 40<<10 {
			t.Errorf("%s: %d bytes for each", name, each)
		}
	}
}

// A flood of datagrams costs no memory for longer than it lasts.
func TestDatagramFlood(t *testing.T) {
	const many = 100
	w := newWorld(t, func(w *world) {
		w.Associate = func(context.Context) (PacketRelay, error) {
			return &namedRelay{make(chan []byte, 40), make(chan []byte)}, nil // answers all
		}
	})
	memory := heap()
	data := datagram(Addr{Name: "app.test", Port: 1}, make([]byte, 60000))
	var clients []*udpClient
	for range many {
		clients = append(clients, w.associated(w.addr))
	}
	for range 20 {
		for _, c := range clients {
			send(t, c, data)
		}
	}
	eventually(t, "memory back", func() bool { return heap()-memory < many*(busyBuffer/2) })
}
