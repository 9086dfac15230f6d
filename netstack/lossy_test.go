package netstack

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Packets that are lost, on the way in and out, are sent again. Each direction is
// tried by itself: where both are full gVisor, which cannot take what its peer
// repeats, does not look at its peer's acknowledgments either, and both wait.
func TestLoss(t *testing.T) {
	const size = 4 << 20
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i * i >> 7)
	}
	sum := sha256.Sum256(data)
	var n atomic.Uint32
	l := &lab{lingers: time.Second, lose: func() bool { return n.Add(1)%50 == 0 }}
	l.build(t, Config{Serve: func(c net.Conn) {
		var direction [1]byte
		if _, err := io.ReadFull(c, direction[:]); err != nil {
			t.Error(err)
			return
		}
		if direction[0] == 'd' {
			if _, err := c.Write(data); err != nil {
				t.Error(err)
			}
			if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
				t.Error(err)
			}
			_, _ = io.Copy(io.Discard, c) // until the peer has it all, which may take longer than it lingers
			return
		}
		in, err := io.ReadAll(c)
		if err != nil || sha256.Sum256(in) != sum {
			t.Errorf("%d bytes came of %d: %v", len(in), size, err)
		}
		if _, err := c.Write(sum[:]); err != nil {
			t.Error(err)
		}
	}})
	dial := func(to, direction string) *net.TCPConn {
		c := l.dial(t, to)
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, direction); err != nil {
			t.Fatal(err)
		}
		return c
	}
	for _, to := range []string{"10.0.0.1:80", "[fd00::1]:80"} {
		c := dial(to, "d")
		in, err := io.ReadAll(c)
		c.Close()
		if err != nil || sha256.Sum256(in) != sum {
			t.Errorf("%d bytes came back of %d: %v", len(in), size, err)
		}
		c = dial(to, "u")
		if _, err := c.Write(data); err != nil {
			t.Error(err)
		}
		c.CloseWrite()
		if answer, err := io.ReadAll(c); err != nil || !bytes.Equal(answer, sum[:]) {
			t.Errorf("the answer to %d bytes is %d bytes: %v", size, len(answer), err)
		}
	}
}

// Tools of everybody's get along with it.
func TestCurl(t *testing.T) {
	body := strings.Repeat("quicvpn ", 100_000)
	l, _ := newDialLab(t, func(c *net.TCPConn) {
		var request bytes.Buffer
		b := make([]byte, 1024)
		for !bytes.Contains(request.Bytes(), []byte("\r\n\r\n")) {
			n, err := c.Read(b)
			if err != nil {
				t.Error(err)
				return
			}
			request.Write(b[:n])
		}
		if _, err := io.WriteString(c, "HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n"+body); err != nil {
			t.Error(err)
		}
	})
	for _, url := range []string{"http://10.0.0.1/", "http://[fd00::1]/"} {
		out, err := l.ns.Command(t.Context(), "curl", "--silent", "--show-error", "--max-time", "10", url).Output()
		if err != nil || string(out) != body {
			t.Errorf("%s: %d bytes: %v", url, len(out), err)
		}
	}
}

// A conn keeps to what net.Conn promises.
func TestConnDeadlines(t *testing.T) {
	done := make(chan struct{})
	l := newLab(t, func(c net.Conn) {
		defer close(done)
		b := make([]byte, 1)
		timedOut := func(what string, err error) {
			var ne net.Error
			if !errors.As(err, &ne) || !ne.Timeout() {
				t.Errorf("%s: %v", what, err)
			}
		}
		c.SetReadDeadline(time.Now().Add(-time.Second))
		_, err := c.Read(b)
		timedOut("a deadline in the past", err)
		c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, err = c.Read(b)
		timedOut("a deadline to come", err)
		c.SetReadDeadline(time.Time{})
		time.AfterFunc(20*time.Millisecond, func() { c.SetReadDeadline(time.Unix(1, 0)) })
		_, err = c.Read(b)
		timedOut("a deadline set meanwhile", err)
		c.SetDeadline(time.Now().Add(50 * time.Millisecond))
		_, err = c.Write(make([]byte, 64<<20)) // nobody reads
		timedOut("a write", err)
		c.SetDeadline(time.Time{})
		if n, err := c.Read(nil); n != 0 || err != nil {
			t.Errorf("read %d bytes into none: %v", n, err)
		}
		time.AfterFunc(20*time.Millisecond, func() { c.Close() })
		if _, err = c.Read(b); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed meanwhile: %v", err)
		}
		if _, err = c.Write(b); !errors.Is(err, net.ErrClosed) {
			t.Errorf("written when closed: %v", err)
		}
		if err = c.Close(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed twice: %v", err)
		}
		if netip.MustParseAddrPort(c.LocalAddr().String()).Port() != 80 {
			t.Errorf("the local address is %v", c.LocalAddr())
		}
	}, 100*time.Millisecond)
	l.dial(t, "10.0.0.1:80")
	<-done
}
