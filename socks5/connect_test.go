package socks5

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func TestConnect(t *testing.T) {
	w := newWorld(t, nil)
	v4, v6 := listen(t, "127.0.0.1:0", echo), listen(t, "[::1]:0", echo)
	for _, to := range []Addr{v4, v6, {Name: "app.test", Port: v4.Port}} {
		c := w.through(to)
		send(t, c, []byte("hello"))
		expect(t, c, []byte("hello"))
		if got := w.lastDialed(); got != to.String() {
			t.Errorf("dialed %s, want %v", got, to)
		}
	}
	// The proxy itself by IPv6.
	addr, _ := w.serve("[::1]:0")
	c := dialTCP(t, addr)
	reply, bound := ask(t, c, commandConnect, v6)
	if reply != succeeded || bound.IP != netip.IPv6Loopback() || bound.Port == 0 {
		t.Errorf("reply %v, bound to %v", reply, bound)
	}
}

// All in one flight, without waiting for an answer.
func TestOptimistic(t *testing.T) {
	w := newWorld(t, nil)
	to := listen(t, "127.0.0.1:0", echo)
	data := bytes.Repeat([]byte("0123456789"), 1000)
	c := w.connect()
	send(t, c, append(to.append([]byte{5, 1, 0, 5, commandConnect, 0}), data...))
	expect(t, c, []byte{5, 0})
	if reply, _ := readReply(t, c); reply != succeeded {
		t.Fatal(reply)
	}
	expect(t, c, data)
	c.CloseWrite()
	expectEOF(t, c)
}

func TestReplies(t *testing.T) {
	var dialErr error
	w := newWorld(t, func(w *world) {
		w.Dial = func(context.Context, string, string) (net.Conn, error) { return nil, dialErr }
		w.Associate = nil
	})
	for _, tt := range []struct {
		err        error
		reply      Reply
		status     int
		proxyError string
	}{
		{errors.New("no idea"), GeneralFailure, 503, "destination_unavailable"},
		{fmt.Errorf("gateway: %w", NotAllowed), NotAllowed, 403, "http_request_denied"},
		{NetworkUnreachable, NetworkUnreachable, 502, "destination_ip_unroutable"},
		{TTLExpired, TTLExpired, 504, "connection_timeout"},
		{sysErr(syscall.ECONNREFUSED), ConnectionRefused, 502, "connection_refused"},
		{sysErr(syscall.ENETUNREACH), NetworkUnreachable, 502, "destination_ip_unroutable"},
		{sysErr(syscall.EADDRNOTAVAIL), NetworkUnreachable, 502, "destination_ip_unroutable"},
		{sysErr(syscall.EHOSTUNREACH), HostUnreachable, 502, "destination_ip_unroutable"},
		{sysErr(syscall.ETIMEDOUT), TTLExpired, 504, "connection_timeout"},
		{sysErr(syscall.EACCES), NotAllowed, 403, "http_request_denied"},
		{sysErr(syscall.EAFNOSUPPORT), AddressTypeNotSupported, 502, "destination_ip_unroutable"},
		{sysErr(syscall.ECONNRESET), GeneralFailure, 502, "connection_terminated"},
		{context.DeadlineExceeded, TTLExpired, 504, "connection_timeout"},
		{os.ErrDeadlineExceeded, TTLExpired, 504, "connection_timeout"},
		{&net.DNSError{IsNotFound: true}, HostUnreachable, 502, "dns_error"},
		{&net.DNSError{IsTimeout: true}, TTLExpired, 504, "dns_timeout"},
		{&net.DNSError{IsTemporary: true}, GeneralFailure, 502, "dns_error"},
	} {
		dialErr = tt.err
		c := w.connect()
		if got, bound := ask(t, c, commandConnect, Addr{Name: "app.test", Port: 1}); got != tt.reply || bound != (Addr{IP: netip.IPv4Unspecified()}) {
			t.Errorf("%v: reply %v, %v, want %v", tt.err, got, bound, tt.reply)
		}
		expectEOF(t, c)
		for _, request := range []string{"CONNECT app.test:1 HTTP/1.1\r\n\r\n", "GET http://app.test/ HTTP/1.1\r\nHost: app.test\r\n\r\n"} {
			res := w.roundTrip(request)
			if got, status := res.StatusCode, res.Header.Get("Proxy-Status"); got != tt.status || status != "quicvpn; error="+tt.proxyError {
				t.Errorf("%v: %s: status %d, Proxy-Status %q, want %d, %s", tt.err, request[:3], got, status, tt.status, tt.proxyError)
			}
		}
	}
	for _, command := range []byte{0, 2, commandAssociate, 9} {
		if got, _ := ask(t, w.connect(), command, Addr{Name: "app.test", Port: 1}); got != CommandNotSupported {
			t.Errorf("command %d: %v", command, got)
		}
	}
	if got, _ := ask(t, w.connect(), commandConnect, Addr{Name: "app.test"}); got != GeneralFailure {
		t.Errorf("port 0: %v", got)
	}
}

func sysErr(e syscall.Errno) error {
	return &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", e)}
}

// Real sockets have these errors too.
func TestRefusedForReal(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.DialTimeout = time.Second
		w.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
			if strings.HasPrefix(to, "silent.test:") {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return w.dial(ctx, network, to)
		}
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	to := addrFrom(addrPort(l.Addr()))
	l.Close()
	if got, _ := ask(t, w.connect(), commandConnect, to); got != ConnectionRefused {
		t.Errorf("a closed port: %v", got)
	}
	if got, _ := ask(t, w.connect(), commandConnect, Addr{Name: "nowhere.invalid", Port: 80}); got != HostUnreachable {
		t.Errorf("a name that does not exist: %v", got)
	}
	if got, _ := ask(t, w.connect(), commandConnect, Addr{Name: "silent.test", Port: 80}); got != TTLExpired {
		t.Errorf("no answer: %v", got)
	}
}

// lazy is a connection that was returned before its outcome is known.
type lazy struct {
	net.Conn
	ready chan struct{}
	err   error
}

func (l *lazy) Read(b []byte) (int, error) {
	<-l.ready
	if l.err != nil {
		return 0, l.err
	}
	return l.Conn.Read(b)
}

// Early: the reply does not wait for the other side, whose refusal is a reset then.
func TestEarly(t *testing.T) {
	for _, refused := range []error{nil, syscall.ECONNREFUSED} {
		near, far := net.Pipe()
		defer far.Close()
		l := &lazy{Conn: near, ready: make(chan struct{}), err: refused}
		w := newWorld(t, func(w *world) {
			w.Dial = func(context.Context, string, string) (net.Conn, error) { return l, nil }
		})
		c := w.through(Addr{Name: "app.test", Port: 1})
		send(t, c, []byte("first"))
		expect(t, far, []byte("first"))
		close(l.ready)
		if refused != nil {
			if _, err := c.Read(make([]byte, 1)); !wasReset(err) {
				t.Errorf("read %v, want a reset", err)
			}
			continue
		}
		send(t, far, []byte("answer"))
		expect(t, c, []byte("answer"))
	}
}

// A dial ends with the client that it is for, and dials that hang are in nobody's
// way.
func TestHangingDials(t *testing.T) {
	var hanging atomic.Int32
	w := newWorld(t, func(w *world) {
		w.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
			if !strings.HasPrefix(to, "hang") {
				return w.dial(ctx, network, to)
			}
			hanging.Add(1)
			defer hanging.Add(-1)
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	var clients []*net.TCPConn
	for i := range 24 {
		c := w.connect()
		if i%2 == 0 {
			send(t, c, Addr{Name: "hang.test", Port: 1}.append([]byte{5, 1, 0, 5, commandConnect, 0}))
			expect(t, c, []byte{5, 0}) // or the close would be a reset
		} else {
			send(t, c, []byte("CONNECT hang.test:1 HTTP/1.1\r\n\r\n"))
		}
		clients = append(clients, c)
	}
	eventually(t, "all dials", func() bool { return hanging.Load() == 24 })
	c := w.through(listen(t, "127.0.0.1:0", echo))
	send(t, c, []byte("x"))
	expect(t, c, []byte("x"))
	for i, c := range clients {
		if i%3 == 0 {
			c.SetLinger(0)
		}
		c.Close()
	}
	eventually(t, "the end of all dials", func() bool { return hanging.Load() == 0 })
}

func TestServeEnds(t *testing.T) {
	w := newWorld(t, nil)
	to := listen(t, "127.0.0.1:0", echo)
	before := descriptors(t)
	addr, stop := w.serve("127.0.0.1:0")
	idle, asked := dialTCP(t, addr), dialTCP(t, addr)
	ask(t, asked, commandConnect, to)
	tunnel := dialTCP(t, addr)
	send(t, tunnel, fmt.Appendf(nil, "CONNECT %v HTTP/1.1\r\n\r\n", to))
	expect(t, tunnel, []byte("HTTP/1.1 200 Connection established\r\n\r\n"))
	partial := dialTCP(t, addr)
	send(t, partial, []byte("GET http://"))
	associated := dialTCP(t, addr)
	ask(t, associated, commandAssociate, Addr{})
	eventually(t, "all accepted", func() bool { return w.count() == 5 })
	stop()
	for i, c := range []*net.TCPConn{idle, asked, tunnel, partial, associated} {
		if _, err := c.Read(make([]byte, 1)); !wasReset(err) {
			t.Errorf("connection %d: %v, want a reset", i, err)
		}
		c.Close()
	}
	if _, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the listener: %v", err)
	}
	eventually(t, "descriptors closed", func() bool { return descriptors(t) <= before })
}

func TestServeRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := new(Server).Serve(t.Context(), l); err == nil || !strings.Contains(err.Error(), "Dial") {
		t.Errorf("without Dial: %v", err)
	}
	if err := (&Server{Dial: new(net.Dialer).DialContext}).Serve(t.Context(), l); !errors.Is(err, net.ErrClosed) {
		t.Errorf("with a closed listener: %v", err)
	}
}

// hiccup is a listener that fails once before it works.
type hiccup struct {
	net.Listener
	once atomic.Bool
}

func (h *hiccup) Accept() (net.Conn, error) {
	if !h.once.Swap(true) {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return h.Listener.Accept()
}

// A proxy lives on when descriptors run out.
func TestServeGoesOn(t *testing.T) {
	w := newWorld(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Serve(ctx, &hiccup{Listener: l}) }()
	greet(t, dialTCP(t, l.Addr().String()))
	w.logged("cannot accept clients")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// count returns the number of connections.
func (s *Server) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}
