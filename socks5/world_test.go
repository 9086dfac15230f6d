package socks5

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A world is a proxy on loopback that dials directly. The names that it knows end in
// .test.
type world struct {
	*Server
	t    *testing.T
	addr string // of the proxy
	log  *syncBuffer
	stop func()

	mu     sync.Mutex
	dialed []string // guarded by mu
}

// newWorld starts a proxy; set changes it before.
func newWorld(t *testing.T, set func(*world)) *world {
	t.Helper()
	w := &world{t: t, log: new(syncBuffer)}
	w.Server = &Server{
		Dial:      w.dial,
		Associate: func(context.Context) (PacketRelay, error) { return newDirectRelay() },
		Name:      "quicvpn",
		Log:       slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if set != nil {
		set(w)
	}
	w.addr, w.stop = w.serve("127.0.0.1:0")
	t.Cleanup(func() {
		w.stop()
		if t.Failed() {
			t.Logf("log:\n%s", w.log)
		}
	})
	return w
}

// serve serves another listener until stop is called, or the test ends.
func (w *world) serve(on string) (addr string, stop func()) {
	w.t.Helper()
	l, err := net.Listen("tcp", on)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Serve(ctx, l) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("Serve: %v", err)
		}
	})
	w.t.Cleanup(stop)
	return l.Addr().String(), stop
}

// address stands for the resolver at the other end.
func address(hostport string) (string, error) {
	host, port, err := net.SplitHostPort(hostport)
	if err != nil {
		return "", err
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return hostport, nil
	}
	if !strings.HasSuffix(host, ".test") {
		return "", &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	return net.JoinHostPort("127.0.0.1", port), nil
}

func (w *world) dial(ctx context.Context, network, to string) (net.Conn, error) {
	w.mu.Lock()
	w.dialed = append(w.dialed, to)
	w.mu.Unlock()
	addr, err := address(to)
	if err != nil {
		return nil, err
	}
	return new(net.Dialer).DialContext(ctx, network, addr)
}

func (w *world) lastDialed() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.dialed) == 0 {
		return ""
	}
	return w.dialed[len(w.dialed)-1]
}

// logged waits until the log has a text.
func (w *world) logged(text string) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%q in the log", text), func() bool { return strings.Contains(w.log.String(), text) })
}

// connect opens a TCP connection to the proxy that ends with the test.
func (w *world) connect() *net.TCPConn {
	w.t.Helper()
	return dialTCP(w.t, w.addr)
}

func dialTCP(t testing.TB, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.TCPConn)
}

// ask makes a request without credentials and returns the reply.
func ask(t testing.TB, c net.Conn, command byte, to Addr) (Reply, Addr) {
	t.Helper()
	greet(t, c)
	send(t, c, to.append([]byte{5, command, 0}))
	return readReply(t, c)
}

func greet(t testing.TB, c net.Conn) {
	t.Helper()
	send(t, c, []byte{5, 1, 0})
	expect(t, c, []byte{5, 0})
}

func readReply(t testing.TB, c net.Conn) (Reply, Addr) {
	t.Helper()
	var b [3]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatalf("read the reply: %v", err)
	}
	bound, err := readAddr(c)
	if b[0] != 5 || b[2] != 0 || err != nil {
		t.Fatalf("reply %x, address %v, %v", b, bound, err)
	}
	return Reply(b[1]), bound
}

// through connects through the proxy.
func (w *world) through(to Addr) *net.TCPConn {
	w.t.Helper()
	c := w.connect()
	if reply, _ := ask(w.t, c, commandConnect, to); reply != succeeded {
		w.t.Fatalf("connect to %v: %v", to, reply)
	}
	return c
}

func send(t testing.TB, c io.Writer, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

func expect(t testing.TB, c io.Reader, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %.200q, %v, want %.200q", got[:n], err, want)
	}
}

func expectEOF(t testing.TB, c io.Reader) {
	t.Helper()
	if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
		t.Fatalf("read %.200q, %v, want the end", b, err)
	}
}

// listen accepts connections until the test ends, and has each served.
func listen(t testing.TB, on string, serve func(*net.TCPConn)) Addr {
	t.Helper()
	l, err := net.Listen("tcp", on)
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			running.Go(func() { serve(c.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		running.Wait()
	})
	return addrFrom(addrPort(l.Addr()))
}

func echo(c *net.TCPConn) {
	defer c.Close()
	io.Copy(c, c)
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for: %s", what)
		}
	}
}

// descriptors counts those that are open, apart from pipes that Go keeps for a
// further splice.
func descriptors(t testing.TB) int {
	t.Helper()
	runtime.GC()
	runtime.GC()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// directRelay is a PacketRelay by a socket of the system.
type directRelay struct {
	conn *net.UDPConn
	buf  [busyBuffer]byte
}

func newDirectRelay() (*directRelay, error) {
	conn, err := net.ListenUDP("udp", nil)
	return &directRelay{conn: conn}, err
}

func (r *directRelay) Send(b []byte, to Addr) error {
	addr, err := address(to.String())
	if err != nil {
		return err
	}
	_, err = r.conn.WriteToUDPAddrPort(b, netip.MustParseAddrPort(addr))
	return err
}

func (r *directRelay) Receive() ([]byte, Addr, error) {
	n, from, err := r.conn.ReadFromUDPAddrPort(r.buf[:])
	return r.buf[:n], addrFrom(netip.AddrPortFrom(from.Addr().Unmap(), from.Port())), err
}

func (r *directRelay) Close() error { return r.conn.Close() }

// syncBuffer is a log that can be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
