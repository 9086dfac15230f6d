package netstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// targets are where flows lead to: 10.0.0.1 is dialled, and other addresses fail,
// each in its way.
type targets struct {
	dials atomic.Int32
	hold  chan struct{} // closed when 10.0.0.9 answers
	ln    net.Listener
}

var failures = map[string]error{
	"10.0.0.2": syscall.ECONNREFUSED,
	"10.0.0.3": fmt.Errorf("dial: %w", syscall.EHOSTUNREACH),
	"10.0.0.4": syscall.ENETUNREACH,
	"10.0.0.5": syscall.EACCES,
	"10.0.0.6": errors.New("no idea"),
	"10.0.0.7": os.ErrDeadlineExceeded,
	"fd00::2":  syscall.ECONNREFUSED,
	"fd00::3":  syscall.EHOSTUNREACH,
	"fd00::4":  syscall.ENETUNREACH,
	"fd00::5":  syscall.EACCES,
}

func (d *targets) dial(ctx context.Context, _, to netip.AddrPort) (net.Conn, error) {
	d.dials.Add(1)
	switch err := failures[to.Addr().String()]; {
	case err == os.ErrDeadlineExceeded:
		time.Sleep(1500 * time.Millisecond) // the app asks again after one second
		return nil, err
	case err != nil:
		return nil, err
	}
	if to.Addr().String() == "10.0.0.9" {
		select {
		case <-d.hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return net.Dial("tcp", d.ln.Addr().String())
}

// newDialLab is a lab whose flows lead to serve, a goroutine for each.
func newDialLab(t *testing.T, serve func(*net.TCPConn)) (*lab, *targets) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &targets{hold: make(chan struct{}), ln: ln}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			}()
		}
	}()
	l := newLabOf(t, Config{Dial: d.dial})
	t.Cleanup(func() {
		ln.Close()
		<-over
	})
	return l, d
}

func TestDial(t *testing.T) {
	l, _ := newDialLab(t, func(c *net.TCPConn) { echo(c) })
	big := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	for _, to := range []string{"10.0.0.1:80", "[fd00::1]:80"} {
		t.Run(to, func(t *testing.T) {
			c := l.dial(t, to)
			go func() {
				if _, err := c.Write(big); err != nil {
					t.Error(err)
				}
				if err := c.CloseWrite(); err != nil {
					t.Error(err)
				}
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, big) {
				t.Errorf("%d bytes came back of %d: %v", len(got), len(big), err)
			}
			within(t, "release", func() bool { return l.open.Load() == 0 })
		})
	}
}

// An app hears why there is no connection.
func TestDialFails(t *testing.T) {
	l, d := newDialLab(t, func(c *net.TCPConn) {})
	for to, want := range map[string]error{
		"10.0.0.2:80":  syscall.ECONNREFUSED,
		"10.0.0.3:80":  syscall.EHOSTUNREACH,
		"10.0.0.4:80":  syscall.ENETUNREACH,
		"10.0.0.5:80":  syscall.EHOSTUNREACH, // which is what Linux makes of it
		"10.0.0.6:80":  syscall.ECONNREFUSED,
		"10.0.0.7:80":  syscall.ECONNREFUSED,
		"[fd00::2]:80": syscall.ECONNREFUSED,
		"[fd00::3]:80": syscall.EHOSTUNREACH,
		"[fd00::4]:80": syscall.ENETUNREACH,
		"[fd00::5]:80": syscall.EACCES,
	} {
		before := d.dials.Load()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err := l.ns.DialContext(ctx, "tcp", to)
		cancel()
		if !errors.Is(err, want) {
			t.Errorf("%s: error %v, want %v", to, err, want)
		}
		if n := d.dials.Load() - before; n != 1 {
			t.Errorf("%s was dialled %d times", to, n)
		}
	}
	within(t, "release", func() bool { return l.open.Load() == 0 })
}

// Dials that hang hold up nobody else, and end with the Stack.
func TestDialHangs(t *testing.T) {
	l, d := newDialLab(t, func(c *net.TCPConn) { echo(c) })
	type result struct {
		c   net.Conn
		err error
	}
	results := make(chan result, 12)
	for range cap(results) {
		go func() {
			c, err := l.ns.DialContext(context.Background(), "tcp", "10.0.0.9:80")
			results <- result{c, err}
		}()
	}
	within(t, "dials", func() bool { return d.dials.Load() == int32(cap(results)) })
	c := l.dial(t, "10.0.0.1:80")
	if _, err := c.Write([]byte("abc")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 3)); err != nil {
		t.Error(err)
	}
	time.Sleep(1200 * time.Millisecond) // they ask again
	close(d.hold)
	for range cap(results) {
		r := <-results
		if r.err != nil {
			t.Error(r.err)
			continue
		}
		r.c.Close()
	}
	if n := d.dials.Load(); n != int32(cap(results))+1 {
		t.Errorf("%d dials", n)
	}
}

// Resets pass, in both directions.
func TestReset(t *testing.T) {
	seen := make(chan error, 1)
	reset := make(chan struct{})
	l, _ := newDialLab(t, func(c *net.TCPConn) {
		select {
		case <-reset:
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Error(err)
			}
			c.SetLinger(0)
		default:
			_, err := io.Copy(io.Discard, c)
			seen <- err
		}
	})
	c := l.dial(t, "10.0.0.1:80")
	c.SetLinger(0)
	c.Close()
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server sees %v", err)
	}
	close(reset)
	c = l.dial(t, "10.0.0.1:80")
	if _, err := c.Write([]byte("a")); err != nil {
		t.Error(err)
	}
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the app reads %d: %v", n, err)
	}
}

func TestListen(t *testing.T) {
	l, d := newDialLab(t, func(c *net.TCPConn) {})
	for _, own := range []string{"10.88.0.1:1080", "[fd88::1]:1080"} {
		addr := netip.MustParseAddrPort(own)
		ln, err := l.Listen(addr)
		if err != nil {
			t.Fatal(err)
		}
		accepted := make(chan struct{})
		go func() {
			defer close(accepted)
			for {
				c, err := ln.Accept()
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						t.Error(err)
					}
					return
				}
				echo(c)
				c.Close()
			}
		}()
		c := l.dial(t, own)
		if _, err := c.Write([]byte("abc")); err != nil {
			t.Error(err)
		}
		c.CloseWrite()
		if b, err := io.ReadAll(c); err != nil || string(b) != "abc" {
			t.Errorf("read %q: %v", b, err)
		}
		if _, err := l.ns.DialContext(t.Context(), "tcp", netip.AddrPortFrom(addr.Addr(), 81).String()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("another port: %v", err)
		}
		if ln.Addr().String() != own {
			t.Errorf("listens on %v", ln.Addr())
		}
		if err := ln.Close(); err != nil {
			t.Error(err)
		}
		<-accepted

		pc, err := l.ListenPacket(netip.AddrPortFrom(addr.Addr(), 0))
		if err != nil {
			t.Fatal(err)
		}
		uc, err := l.ns.DialContext(t.Context(), "udp", pc.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		uc.SetDeadline(time.Now().Add(patience))
		if _, err := uc.Write([]byte("hello")); err != nil {
			t.Error(err)
		}
		b := make([]byte, 100)
		n, from, err := pc.ReadFrom(b)
		if err != nil || string(b[:n]) != "hello" || from.String() != uc.LocalAddr().String() {
			t.Errorf("read %q from %v: %v", b[:n], from, err)
		}
		if _, err := pc.WriteTo([]byte("world"), from); err != nil {
			t.Error(err)
		}
		if n, err := uc.Read(b); err != nil || string(b[:n]) != "world" {
			t.Errorf("read %q: %v", b[:n], err)
		}
		// The largest datagrams come and go in fragments.
		big := bytes.Repeat([]byte("x"), 65_000)
		if _, err := uc.Write(big); err != nil {
			t.Error(err)
		}
		in := make([]byte, 1<<16)
		pc.SetReadDeadline(time.Now().Add(patience))
		if n, _, err := pc.ReadFrom(in); err != nil || !bytes.Equal(in[:n], big) {
			t.Errorf("read %d bytes: %v", n, err)
		}
		if _, err := pc.WriteTo(big, from); err != nil {
			t.Error(err)
		}
		if n, err := uc.Read(in); err != nil || !bytes.Equal(in[:n], big) {
			t.Errorf("read %d bytes: %v", n, err)
		}
		pc.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, _, err := pc.ReadFrom(b); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a deadline is %v", err)
		}
		pc.SetReadDeadline(time.Time{})
		time.AfterFunc(10*time.Millisecond, func() { pc.Close() })
		if _, _, err := pc.ReadFrom(b); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed is %v", err)
		}
		uc.Close()
	}
	if n := d.dials.Load(); n != 0 {
		t.Errorf("%d dials", n)
	}
}
