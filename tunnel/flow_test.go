package tunnel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// flowGateway runs a server that dials whatever it is asked for, and returns a
// client's session to it.
func flowGateway(t *testing.T) (*testGateway, *Session) {
	t.Helper()
	dial := func(network string) func(context.Context, *Session, string) (net.Conn, error) {
		return func(ctx context.Context, _ *Session, address string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		}
	}
	g := startGateway(t, ServerConfig{DialTCP: dial("tcp"), DialUDP: dial("udp")})
	s := dialSession(t, g)
	return g, s
}

// dialSession opens a session of which both ends receive.
func dialSession(t *testing.T, g *testGateway) *Session {
	t.Helper()
	s := dial(t, g.dialer(t), g.Addr())
	receive(t, s)
	receive(t, <-g.serve)
	return s
}

// serveTCP answers one connection after the other until the test ends.
func serveTCP(t *testing.T, serve func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.CloseWrite()
}

// closedPort is an address where nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// opens are the two ways to open a flow.
var opens = map[string]func(*Session, context.Context, string) (*Flow, error){
	"strict": (*Session).DialTCP, "early": (*Session).OpenTCP,
}

func TestFlow(t *testing.T) {
	_, s := flowGateway(t)
	to := serveTCP(t, echo)
	for name, open := range opens {
		t.Run(name, func(t *testing.T) {
			f, err := open(s, within(t, 10*time.Second), to)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if f.RemoteAddr().String() != to || f.RemoteAddr().Network() != "tcp" {
				t.Errorf("the flow leads to %v", f.RemoteAddr())
			}
			data := make([]byte, 5<<20)
			rng := rand.NewChaCha8([32]byte{1})
			rng.Read(data)
			go func() {
				f.Write(data)
				f.CloseWrite() // the other direction goes on
			}()
			f.SetReadDeadline(time.Now().Add(20 * time.Second))
			got, err := io.ReadAll(f)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, %v, want %d", len(got), err, len(data))
			}
		})
	}
}

// Whoever speaks first, the other end hears it: a flow that was opened early must
// not wait for the client's first bytes.
func TestFlowServerFirst(t *testing.T) {
	_, s := flowGateway(t)
	to := serveTCP(t, func(c *net.TCPConn) { fmt.Fprint(c, "hello") })
	for name, open := range opens {
		f, err := open(s, within(t, 10*time.Second), to)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(f); err != nil || string(got) != "hello" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		f.Close()
	}
}

func TestFlowRefused(t *testing.T) {
	_, s := flowGateway(t)
	nobody := closedPort(t)
	if _, err := s.DialTCP(within(t, 10*time.Second), nobody); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("strict: %v", err)
	}
	f, err := s.OpenTCP(within(t, 10*time.Second), nobody)
	if err != nil {
		t.Fatal(err)
	}
	answers := make(chan error, 2)
	f.Answered = func(err error) { answers <- err }
	if _, err := f.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("early: read %v", err)
	}
	for err = nil; err == nil; {
		_, err = f.Write(make([]byte, 1000))
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("early: write %v", err)
	}
	if len(answers) != 1 || !errors.Is(<-answers, syscall.ECONNREFUSED) {
		t.Error("the answer was not told once")
	}
	f.Close()
}

func TestFlowBadAddress(t *testing.T) {
	_, s := flowGateway(t)
	for _, address := range []string{"", "example.com", "example.com:", "example.com:0", "example.com:65536", ":80", "a b:80", "a/b:80", "a@b:80", "ä:80"} {
		if _, err := s.OpenTCP(t.Context(), address); err == nil {
			t.Errorf("%q is taken", address)
		}
		if _, err := s.DialUDP(t.Context(), address); err == nil {
			t.Errorf("%q is taken for UDP", address)
		}
	}
}

// A dial that hangs ends with its context, at the gateway too.
func TestFlowDialCanceled(t *testing.T) {
	gone := make(chan struct{})
	g := startGateway(t, ServerConfig{DialTCP: func(ctx context.Context, _ *Session, _ string) (net.Conn, error) {
		<-ctx.Done()
		close(gone)
		return nil, ctx.Err()
	}})
	s := dialSession(t, g)
	if _, err := s.DialTCP(within(t, 50*time.Millisecond), "192.0.2.1:80"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want the context's end", err)
	}
	select {
	case <-gone:
	case <-time.After(patience):
		t.Error("the gateway still dials")
	}
	if _, err := s.DialUDP(t.Context(), "192.0.2.1:53"); !errors.Is(err, syscall.EACCES) {
		t.Errorf("UDP: %v, want a refusal", err)
	}
}

func TestFlowReset(t *testing.T) {
	_, s := flowGateway(t)
	f, err := s.DialTCP(within(t, 10*time.Second), serveTCP(t, func(c *net.TCPConn) {
		c.Read(make([]byte, 1))
		c.SetLinger(0)
	}))
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("x"))
	if _, err := f.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %v, want a reset", err)
	}
	f.Close()

	seen := make(chan error, 1)
	f, err = s.DialTCP(within(t, 10*time.Second), serveTCP(t, func(c *net.TCPConn) {
		_, err := io.Copy(io.Discard, c)
		seen <- err
	}))
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("x"))
	f.Reset()
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server saw %v, want a reset", err)
	}
	if _, err := f.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read %v after a reset of our own", err)
	}
}

// A session that ends takes its flows along at once, at both ends.
func TestFlowsEndWithTheSession(t *testing.T) {
	_, s := flowGateway(t)
	seen := make(chan error, 1)
	f, err := s.DialTCP(within(t, 10*time.Second), serveTCP(t, func(c *net.TCPConn) {
		_, err := io.Copy(io.Discard, c)
		seen <- err
	}))
	if err != nil {
		t.Fatal(err)
	}
	u, err := s.DialUDP(within(t, 10*time.Second), "127.0.0.1:9")
	if err != nil {
		t.Fatal(err)
	}
	s.Close("enough")
	if _, err := f.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %v, want a reset", err)
	}
	if _, err := u.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("UDP: read %v, want a reset", err)
	}
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server saw %v, want a reset", err)
	}
	if _, err := s.OpenTCP(t.Context(), "127.0.0.1:9"); !errors.Is(err, syscall.ENETDOWN) {
		t.Errorf("%v, want that the network is down", err)
	}
}

// A reader that is slow stops the writer, and others go on.
func TestFlowBackPressure(t *testing.T) {
	_, s := flowGateway(t)
	hold := make(chan struct{})
	slow, err := s.DialTCP(within(t, 10*time.Second), serveTCP(t, func(c *net.TCPConn) {
		c.SetReadBuffer(64 << 10)
		<-hold
		io.Copy(io.Discard, c)
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	defer close(hold)
	var sent int
	for err == nil {
		var n int
		slow.SetWriteDeadline(time.Now().Add(time.Second))
		n, err = slow.Write(make([]byte, 64<<10))
		if sent += n; sent > 64<<20 {
			t.Fatal("64 MiB and no end")
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	other, err := s.DialTCP(within(t, 10*time.Second), serveTCP(t, echo))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	go func() {
		other.Write(make([]byte, 1<<20))
		other.CloseWrite()
	}()
	if n, err := io.Copy(io.Discard, other); n != 1<<20 || err != nil {
		t.Errorf("another flow moved %d bytes, %v", n, err)
	}
}

// What a dial failed of comes to the client as it was.
func TestDialErrors(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want error
		code string
	}{
		{syscall.ECONNREFUSED, syscall.ECONNREFUSED, "connection_refused"},
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}, syscall.EHOSTUNREACH, "destination_unavailable"},
		{syscall.ENETUNREACH, syscall.ENETUNREACH, "destination_ip_unroutable"},
		{syscall.EACCES, syscall.EACCES, "destination_ip_prohibited"},
		{syscall.ETIMEDOUT, syscall.ETIMEDOUT, "connection_timeout"},
		{context.DeadlineExceeded, syscall.ETIMEDOUT, "connection_timeout"},
		{&DialError{Status: 503, Code: "connection_limit_reached", Text: `too "many"`}, nil, "connection_limit_reached"},
		{errors.New("something of the gateway's own"), nil, "proxy_internal_error"},
	} {
		w := httptest.NewRecorder()
		refuseFlow(w, dialError(tt.err))
		got := answerError(w.Result())
		if diff := cmp.Diff(dialError(tt.err), got); diff != "" {
			t.Errorf("%v: %s", tt.err, diff)
		}
		if got.Code != tt.code || tt.want != nil && !errors.Is(got, tt.want) {
			t.Errorf("%v became %v", tt.err, got)
		}
	}
	for _, sent := range []*net.DNSError{{IsNotFound: true}, {IsTimeout: true}, {}} {
		w := httptest.NewRecorder()
		refuseFlow(w, dialError(fmt.Errorf("look up: %w", sent)))
		got, ok := errors.AsType[*net.DNSError](answerError(w.Result()))
		if !ok || got.IsNotFound != sent.IsNotFound || got.IsTimeout != sent.IsTimeout {
			t.Errorf("%+v became %+v", sent, got)
		}
	}
	// Proxies that do not say more than HTTP must.
	for status, want := range map[int]error{502: syscall.ECONNREFUSED, 504: syscall.ETIMEDOUT, 403: syscall.EACCES} {
		if got := answerError(&http.Response{StatusCode: status}); !errors.Is(got, want) {
			t.Errorf("%d became %v", status, got)
		}
	}
}

func FuzzProxyStatus(f *testing.F) {
	f.Add(502, `a; error=connection_refused, b; error=dns_error; details="no"`)
	f.Add(403, "(a b);error=x")
	f.Fuzz(func(t *testing.T, status int, header string) {
		e := answerError(&http.Response{StatusCode: status, Header: http.Header{"Proxy-Status": {header}}})
		if e.Error() == "" || len(e.Text) > 1000 {
			t.Errorf("%q", e)
		}
		e.Unwrap()
	})
}

// serveUDP echoes datagrams until the test ends.
func serveUDP(t *testing.T) string {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			c.WriteTo(b[:n], from)
		}
	}()
	t.Cleanup(func() {
		c.Close()
		<-done
	})
	return c.LocalAddr().String()
}

// echoDatagrams sends datagrams of many sizes through a flow and expects them back.
func echoDatagrams(t *testing.T, f *UDPFlow) {
	t.Helper()
	b := make([]byte, 1<<16)
	for _, size := range []int{0, 1, 100, 1000, 1200, 1300, 1400, 1500, 9000, maxUDP} {
		data := bytes.Repeat([]byte{byte(size)}, size)
		got := -1
		for range 20 { // UDP may lose
			if n, err := f.Write(data); n != size || err != nil {
				t.Fatalf("%d bytes: wrote %d, %v", size, n, err)
			}
			f.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
			n, err := f.Read(b)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				continue
			}
			if err != nil {
				t.Fatalf("%d bytes: %v", size, err)
			}
			if bytes.Equal(b[:n], data) {
				got = n
				break
			}
		}
		if got != size {
			t.Errorf("%d bytes do not come back", size)
		}
	}
	if _, err := f.Write(make([]byte, maxUDP+1)); !errors.Is(err, syscall.EMSGSIZE) {
		t.Errorf("%v for what no UDP carries", err)
	}
}

func TestUDPFlow(t *testing.T) {
	_, s := flowGateway(t)
	f, err := s.DialUDP(within(t, 10*time.Second), serveUDP(t))
	if err != nil {
		t.Fatal(err)
	}
	echoDatagrams(t, f)
	f.Close()
	if _, err := f.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read %v after Close", err)
	}
	if _, err := f.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write %v after Close", err)
	}
}

// A port where nobody listens ends the flow.
func TestUDPFlowRefused(t *testing.T) {
	_, s := flowGateway(t)
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	f, err := s.DialUDP(within(t, 10*time.Second), c.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.Write([]byte("x"))
	f.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := f.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read %v, want the end", err)
	}
}

func TestUDPAddress(t *testing.T) {
	for path, want := range map[string]string{
		"/.well-known/masque/udp/192.0.2.1/53/":        "192.0.2.1:53",
		"/.well-known/masque/udp/2001%3Adb8%3A%3A1/1/": "[2001:db8::1]:1",
		"/.well-known/masque/udp/example.com/443/":     "example.com:443",
		"/.well-known/masque/udp/example.com/443":      "",
		"/.well-known/masque/udp/example.com/443/x":    "",
		"/elsewhere": "",
	} {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		if got := udpAddress(r); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

// A deadline that is moved counts for a reader that waits already.
func TestDeadline(t *testing.T) {
	var d deadline
	passed := d.passed()
	d.set(time.Now().Add(time.Hour))
	d.set(time.Now())
	<-passed
	d.set(time.Time{})
	select {
	case <-d.passed():
		t.Error("a deadline of never has passed")
	case <-time.After(10 * time.Millisecond):
	}
}
