package publish

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

var dns = Port{Protocol: "udp", HostPort: 5353, ContainerPort: 53}

// exchange sends a datagram and returns what comes back to this socket, which is
// connected: what comes from elsewhere than it sent to does not count.
func exchange(c net.Conn, b []byte) ([]byte, error) {
	if _, err := c.Write(b); err != nil {
		return nil, err
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return nil, err
	}
	got := make([]byte, maxDatagram)
	n, err := c.Read(got)
	return got[:n], err
}

func (w *world) echoes(c net.Conn, b []byte) {
	w.t.Helper()
	if got, err := exchange(c, b); err != nil || !bytes.Equal(got, b) {
		w.t.Errorf("%v: sent %d bytes, got %d and %v", c.RemoteAddr(), len(b), len(got), err)
	}
}

// Every client has its own answers, from the address that it sent to.
func TestUDP(t *testing.T) {
	w := newWorld(t)
	w.app.ServeEcho(53)
	w.publish(dns, Port{Protocol: "udp", HostIP: host4b, HostPort: 54, ContainerPort: 53}, Port{Protocol: "udp", HostIP: host6, HostPort: 54, ContainerPort: 53})
	var clients []net.Conn
	for _, at := range []netip.Addr{host4, host4, host4b, host6, host6} {
		clients = append(clients, w.dial("udp", at, 5353))
	}
	clients = append(clients, w.dial("udp", host4b, 54), w.dial("udp", host6, 54))
	for round := range 3 {
		for i, c := range clients {
			w.echoes(c, fmt.Appendf(nil, "round %d, client %d", round, i))
		}
	}
	for _, c := range clients {
		for _, size := range []int{0, 1, 1400, 9000, 65507} {
			w.echoes(c, make([]byte, size))
		}
	}
}

// Sessions of one client's socket to two addresses of the host are two.
func TestUDPUnconnectedClient(t *testing.T) {
	w := newWorld(t)
	w.app.ServeEcho(53)
	w.publish(dns)
	pc, err := w.client.ListenPacket("udp4", "192.0.2.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	pc.SetDeadline(time.Now().Add(5 * time.Second))
	for _, at := range []netip.Addr{host4, host4b, host4} {
		to := netip.AddrPortFrom(at, 5353)
		if _, err := pc.WriteTo([]byte(at.String()), net.UDPAddrFromAddrPort(to)); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 100)
		n, from, err := pc.ReadFrom(got)
		if err != nil || string(got[:n]) != at.String() || from.String() != to.String() {
			t.Errorf("sent to %v: got %q from %v, %v", to, got[:n], from, err)
		}
	}
}

func TestUDPOtherVersion(t *testing.T) {
	for _, own := range []netip.Addr{app4, app6} {
		w := newWorld(t)
		w.to.Addrs = []netip.Addr{own}
		w.app.ServeEcho(53)
		w.publish(dns)
		w.echoes(w.dial("udp", host4, 5353), []byte("4"))
		w.echoes(w.dial("udp", host6, 5353), []byte("6"))
	}
}

// An app that is not there yet costs datagrams, not the session.
func TestUDPRefused(t *testing.T) {
	w := newWorld(t)
	l := w.publish(dns)
	clients := []net.Conn{w.dial("udp", host4, 5353), w.dial("udp", host6, 5353)}
	for range 5 {
		for _, c := range clients {
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := l.servers[0].(*udpServer)
	w.eventually(func() error {
		if n := s.dropped.toApp.Load(); n == 0 {
			return errors.New("no datagram was counted as dropped")
		}
		return nil
	})
	w.serveLate("udp4", "10.88.0.5:53")
	w.serveLate("udp6", "[fd00:88::5]:53")
	for _, c := range clients {
		w.echoes(c, []byte("now"))
	}
	if n := s.count(); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	w.logged("datagrams of a published port were dropped")
}

// serveLate is ServeEcho for after the ports were published: it ends before them.
func (w *world) serveLate(network, address string) {
	w.t.Helper()
	pc, err := w.app.ListenPacket(network, address)
	if err != nil {
		w.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, maxDatagram)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(buf[:n], from)
		}
	})
	w.t.Cleanup(func() {
		pc.Close()
		wg.Wait()
	})
}

func (s *udpServer) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sessions)
}

func TestUDPIdle(t *testing.T) {
	for _, answered := range []bool{false, true} {
		t.Run(fmt.Sprintf("answered=%t", answered), func(t *testing.T) {
			w := newWorld(t)
			// The time that does not count here is too long for the test.
			w.to.idleUnanswered, w.to.idleAnswered = 200*time.Millisecond, time.Hour
			if answered {
				w.to.idleUnanswered, w.to.idleAnswered = w.to.idleAnswered, w.to.idleUnanswered
				// The first wait is that for an answer.
				w.to.idleUnanswered = time.Second
				w.app.ServeEcho(53)
			}
			s := w.publish(dns).servers[0].(*udpServer)
			c := w.dial("udp", host4, 5353)
			for range 2 { // a client that comes back has a new session
				if answered {
					w.echoes(c, []byte("x"))
				} else if _, err := exchange(c, []byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatal(err)
				}
				w.eventually(func() error {
					if n := s.count(); n != 0 {
						return fmt.Errorf("%d sessions", n)
					}
					return nil
				})
			}
		})
	}
}

// A client that goes on keeps its session.
func TestUDPNotIdle(t *testing.T) {
	w := newWorld(t)
	w.to.idleUnanswered, w.to.idleAnswered = 300*time.Millisecond, 300*time.Millisecond
	w.app.ServeEcho(53)
	s := w.publish(dns).servers[0].(*udpServer)
	c := w.dial("udp", host4, 5353)
	var first *session
	for start := time.Now(); time.Since(start) < time.Second; {
		w.echoes(c, []byte("x"))
		s.mu.Lock()
		for _, sess := range s.sessions {
			if first == nil {
				first = sess
			} else if sess != first {
				t.Error("the session was made anew")
			}
		}
		s.mu.Unlock()
	}
}

func TestUDPTooManyClients(t *testing.T) {
	w := newWorld(t)
	w.to.limit = 2
	w.app.ServeEcho(53)
	l := w.publish(dns)
	clients := []net.Conn{w.dial("udp", host4, 5353), w.dial("udp", host4, 5353)}
	for _, c := range clients {
		w.echoes(c, []byte("x"))
	}
	for range 2 {
		if got, err := exchange(w.dial("udp", host4, 5353), []byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a third client got %q and %v", got, err)
		}
	}
	for _, c := range clients {
		w.echoes(c, []byte("y"))
	}
	if n := strings.Count(w.log.String(), "too many clients"); n != 1 {
		t.Errorf("it is told %d times, want once", n)
	}
	if n := l.servers[0].(*udpServer).dropped.full.Load(); n != 2 {
		t.Errorf("%d datagrams were counted, want 2", n)
	}
}

// TestAnswerFrom has what no kernel sends.
func TestAnswerFrom(t *testing.T) {
	for _, control := range [][]byte{nil, make([]byte, 3), make([]byte, 16), bytes.Repeat([]byte{0xff}, 40)} {
		if host, err := answerFrom(control); err == nil {
			t.Errorf("%x is of %v", control, host)
		}
	}
}
