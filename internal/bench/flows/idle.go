package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// An idleConn is the other side of a flow: nothing comes from it.
type idleConn struct {
	net.Conn
	once  sync.Once
	ended chan struct{}
}

func (c *idleConn) Read([]byte) (int, error)        { <-c.ended; return 0, io.EOF }
func (c *idleConn) Write(b []byte) (int, error)     { return len(b), nil }
func (c *idleConn) Close() error                    { c.once.Do(func() { close(c.ended) }); return nil }
func (c *idleConn) CloseWrite() error               { return c.Close() }
func (c *idleConn) Reset() error                    { return c.Close() }
func (c *idleConn) SetReadDeadline(time.Time) error { return nil }

// measureIdle prints what a connection costs that does nothing. The app's side of
// it is the kernel's.
func measureIdle(tb netlab.TB, n int) {
	client := netlab.New(tb).NS("client")
	var dialled atomic.Int64
	stacked(tb, client, func(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) {
		dialled.Add(1)
		return &idleConn{ended: make(chan struct{})}, nil
	})
	check(tb, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n) + 1000, Max: uint64(n) + 1000}))
	var fds []int
	connect := func(n int) {
		check(tb, client.Do(func() error {
			for range n {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				fds = append(fds, fd)
				if err := unix.Connect(fd, &unix.SockaddrInet4{Port: 80, Addr: serverAddr.Addr().As4()}); err != nil {
					return fmt.Errorf("connect: %w", err)
				}
				if _, err := unix.Write(fd, []byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	connect(100) // what all share is there already
	before, rss := inUse()
	connect(n)
	time.Sleep(time.Second)
	after, rssAfter := inUse()
	fmt.Printf("%d idle connections: %.1f KiB each in use by Go, %.1f KiB resident, %d goroutines\n",
		n, (after-before)/float64(n)/1024, (rssAfter-rss)/float64(n)/1024, runtime.NumGoroutine())
	for _, fd := range fds {
		check(tb, unix.Close(fd))
	}
}

// inUse returns the bytes that live, on the heap and on stacks, and those that the
// process has of the machine's.
func inUse() (live, resident float64) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		panic(err)
	}
	for line := range strings.Lines(string(status)) {
		var kb float64
		if _, err := fmt.Sscanf(line, "VmRSS: %f kB", &kb); err == nil {
			resident = kb * 1024
		}
	}
	return float64(m.HeapAlloc + m.StackInuse), resident
}
