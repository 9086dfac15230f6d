package publish

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/internal/relay"
)

var web = Port{Protocol: "tcp", HostPort: 8080, ContainerPort: 80}

// Clients of both IP versions reach the app by whatever the container has.
func TestTCP(t *testing.T) {
	for _, tt := range []struct {
		name    string
		addrs   []netip.Addr
		network string // that the app listens on
		address string
		want    map[netip.Addr]netip.Addr // the host's address, and the container's that it leads to
	}{
		{"both", []netip.Addr{app4, app6}, "tcp", ":80", map[netip.Addr]netip.Addr{host4: app4, host4b: app4, host6: app6}},
		{"IPv4 alone", []netip.Addr{app4}, "tcp", ":80", map[netip.Addr]netip.Addr{host4: app4, host6: app4}},
		{"IPv6 alone", []netip.Addr{app6}, "tcp", ":80", map[netip.Addr]netip.Addr{host4: app6, host6: app6}},
		{"an app of IPv4", []netip.Addr{app6, app4}, "tcp4", "0.0.0.0:80", map[netip.Addr]netip.Addr{host4: app4, host6: app4}},
		{"an app of IPv6", []netip.Addr{app4, app6}, "tcp6", "[::]:80", map[netip.Addr]netip.Addr{host4: app6, host6: app6}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.to.Addrs = tt.addrs
			w.serve(tt.network, tt.address, func(c *net.TCPConn) {
				fmt.Fprintf(c, "%v seen by %v\n", addr(c.RemoteAddr()), addr(c.LocalAddr()))
			})
			w.publish(web)
			for at, own := range tt.want {
				got, err := io.ReadAll(w.dial("tcp", at, 8080))
				// The client's address is the container's own.
				if want := fmt.Sprintf("%v seen by %v\n", own, own); err != nil || string(got) != want {
					t.Errorf("by %v: got %q and %v, want %q", at, got, err, want)
				}
			}
		})
	}
}

func addr(a net.Addr) netip.Addr { return a.(*net.TCPAddr).AddrPort().Addr().Unmap() }

// Each direction ends by itself, whichever is first.
func TestHalfClose(t *testing.T) {
	w := newWorld(t)
	w.serve("tcp", ":80", echoWhole)
	heard := make(chan string, 1)
	w.serve("tcp", ":81", func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "first")
		_ = c.CloseWrite()
		all, err := io.ReadAll(c)
		heard <- fmt.Sprint(string(all), err)
	})
	w.publish(web, Port{Protocol: "tcp", HostPort: 8081, ContainerPort: 81})

	if err := w.whole(host4, bytes.Repeat([]byte("quicvpn "), 1<<18)); err != nil {
		t.Errorf("the client ends first: %v", err)
	}

	client := w.dial("tcp", host6, 8081).(*net.TCPConn)
	if got, err := io.ReadAll(client); err != nil || string(got) != "first" {
		t.Errorf("the app ends first: got %q and %v", got, err)
	}
	_, _ = io.WriteString(client, "second")
	_ = client.CloseWrite()
	if got := <-heard; got != "second<nil>" {
		t.Errorf("after its own end the app heard %q", got)
	}
}

// What one side resets is reset at the other, also where that side had ended its
// direction and nothing is under way.
func TestReset(t *testing.T) {
	for _, tt := range []struct {
		name             string
		byApp, halfClose bool
	}{{"by the client", false, false}, {"by the app", true, false}, {"by the client, half closed", false, true}, {"by the app, half closed", true, true}} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			apps := make(chan *net.TCPConn)
			w.serve("tcp", ":80", func(c *net.TCPConn) {
				apps <- c
				<-w.ctx.Done()
			})
			w.publish(web)
			client := w.dial("tcp", host4, 8080).(*net.TCPConn)
			resetting, other := client, <-apps
			if tt.byApp {
				resetting, other = other, resetting
			}
			deadline, _ := w.ctx.Deadline()
			other.SetDeadline(deadline)
			if _, err := io.WriteString(resetting, "x"); err != nil {
				t.Fatal(err)
			}
			if _, err := other.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			if tt.halfClose {
				if err := resetting.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				if _, err := other.Read(make([]byte, 1)); err != io.EOF {
					t.Fatalf("the end of one direction: %v", err)
				}
			}
			relay.Reset(resetting)
			if !tt.halfClose {
				if _, err := other.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("read says %v, want a reset", err)
				}
				return
			}
			w.eventually(func() error { // a write would bring about the reset that it reports
				if err := pendingError(t, other); err != syscall.EPIPE && err != syscall.ECONNRESET {
					return fmt.Errorf("the socket says %v, want a reset", err)
				}
				return nil
			})
		})
	}
}

func pendingError(t *testing.T, c *net.TCPConn) (err syscall.Errno) {
	t.Helper()
	raw, failed := c.SyscallConn()
	if failed == nil {
		failed = raw.Control(func(fd uintptr) {
			code, _ := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR)
			err = syscall.Errno(code)
		})
	}
	if failed != nil {
		t.Fatal(failed)
	}
	return err
}

func TestParallelConnections(t *testing.T) {
	w := newWorld(t)
	w.serve("tcp", ":80", echoWhole)
	w.publish(web)
	var clients errgroup.Group
	for i := range 200 {
		clients.Go(func() error {
			return w.whole([]netip.Addr{host4, host6}[i%2], bytes.Repeat([]byte{byte(i)}, 100_000+i))
		})
	}
	if err := clients.Wait(); err != nil {
		t.Error(err)
	}
}

// refused checks that the client's connection is reset, maybe so soon that it seems
// to have been refused.
func (w *world) refused(port uint16) {
	w.t.Helper()
	c, err := w.client.DialContext(w.ctx, "tcp", netip.AddrPortFrom(host4, port).String())
	if err == nil {
		defer c.Close()
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		w.t.Errorf("port %d: read says %v, want a reset", port, err)
	}
}

// whole is an exchange with echoWhole.
func (w *world) whole(at netip.Addr, sent []byte) error {
	c, err := w.client.DialContext(w.ctx, "tcp", netip.AddrPortFrom(at, 8080).String())
	if err != nil {
		return err
	}
	defer c.Close()
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(sent)
		written <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	got, err := io.ReadAll(c)
	if err == nil && !bytes.Equal(got, sent) {
		err = fmt.Errorf("got %d bytes back that are not the %d that were sent", len(got), len(sent))
	}
	return errors.Join(err, <-written)
}

func TestRefused(t *testing.T) {
	w := newWorld(t)
	w.publish(web)
	w.refused(8080)
	w.logged("connection refused")
}

func TestSandboxGone(t *testing.T) {
	w := newWorld(t)
	w.publish(web, Port{Protocol: "udp", HostPort: 5353, ContainerPort: 53})
	w.sandbox.Kill()
	w.refused(8080)
	w.refused(8080)
	if _, err := w.dial("udp", host4, 5353).Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	w.logged("a client of a published port is ignored")
	w.logged("network namespace is gone")
	if n := strings.Count(w.log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings, want one", n)
	}
}

// silence lets nothing answer at a port of the container.
func (w *world) silence(port uint16) {
	w.t.Helper()
	w.app.Nft(fmt.Sprintf(`table inet silence {
	chain input {
		type filter hook input priority filter
		tcp dport %d drop
	}
}`, port))
}

// An app that does not answer keeps nobody else waiting, and Close not either.
func TestHangingDials(t *testing.T) {
	w := newWorld(t)
	w.silence(81)
	w.serve("tcp", ":80", echoWhole)
	l := w.publish(web, Port{Protocol: "tcp", HostPort: 8081, ContainerPort: 81})
	var hanging []net.Conn
	for range 20 {
		hanging = append(hanging, w.dial("tcp", host4, 8081))
	}
	if err := w.whole(host4, []byte("x")); err != nil {
		t.Errorf("beside dials that hang: %v", err)
	}
	start := time.Now()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > dialTimeout/2 {
		t.Errorf("Close took %v", d)
	}
	for _, c := range hanging {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("after Close: %v, want a reset", err)
		}
	}
}

func TestDialTimeout(t *testing.T) {
	w := newWorld(t)
	w.silence(80)
	w.publish(web)
	start := time.Now()
	w.refused(8080)
	if d := time.Since(start); d < dialTimeout-time.Second || d > dialTimeout+5*time.Second {
		t.Errorf("reset after %v, want %v", d, dialTimeout)
	}
	w.logged(os.ErrDeadlineExceeded.Error())
}

// Close ends connections in whatever state.
func TestCloseEndsConnections(t *testing.T) {
	w := newWorld(t)
	accepted := make(chan struct{}, 3)
	w.serve("tcp", ":80", func(c *net.TCPConn) {
		accepted <- struct{}{}
		_, _ = io.Copy(io.Discard, c)
		<-w.ctx.Done()
	})
	l := w.publish(web)
	idle := w.dial("tcp", host4, 8080)
	busy := w.dial("tcp", host6, 8080)
	half := w.dial("tcp", host6, 8080).(*net.TCPConn)
	for range 3 {
		<-accepted
	}
	if err := half.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := busy.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for _, c := range []net.Conn{idle, busy, half} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read says %v, want a reset", err)
		}
	}
	if c, err := w.client.DialContext(w.ctx, "tcp", "192.0.2.1:8080"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the port is still open: %v, %v", c, err)
	}
}

func TestTooManyConnections(t *testing.T) {
	w := newWorld(t)
	w.to.limit = 2
	w.serve("tcp", ":80", echoWhole)
	w.publish(web)
	first := w.dial("tcp", host4, 8080).(*net.TCPConn)
	w.dial("tcp", host4, 8080)
	w.refused(8080)
	w.refused(8080)
	if n := strings.Count(w.log.String(), "too many connections"); n != 1 {
		t.Errorf("it is told %d times, want once", n)
	}
	if err := first.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(first); err != nil {
		t.Fatal(err)
	}
	// The place is free a moment later.
	w.eventually(func() error { return w.whole(host4, []byte("x")) })
}

// Clients that close first leave source ports in TIME_WAIT, which are then used
// again.
func TestSourcePortsRunOut(t *testing.T) {
	w := newWorld(t)
	w.app.Sysctl("net.ipv4.ip_local_port_range", "40000 40009")
	w.serve("tcp", ":80", echoWhole)
	w.publish(web)
	for _, at := range []netip.Addr{host4, host6} {
		for range 30 {
			w.eventually(func() error { return w.whole(at, []byte("x")) })
		}
	}
}
