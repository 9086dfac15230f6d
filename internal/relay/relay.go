// Package relay passes bytes between two connections, whatever they are: TCP's, a
// stack's of its own, or streams of QUIC.
package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A direction in which nothing comes holds a small buffer. It takes a large one
// while more comes than fits, and gives it back when nothing came for a while. That
// one is a little less than 64 KiB, so that netstack sends what it holds as one
// super-packet, with headers, and no small one behind it.
const (
	idleBuffer = 2 << 10
	busyBuffer = 63 << 10
	busyWait   = time.Second
)

var buffers = sync.Pool{New: func() any { return new([busyBuffer]byte) }}

// longAgo as a deadline ends what is waiting.
var longAgo = time.Unix(1, 0)

// Relay passes both directions until both have ended, each by itself, or one side
// is reset, or ctx is done; then the other side is reset too. It closes both. early
// is what the client has sent already. A side that reads slowly slows the other
// one: nothing is kept but a buffer.
//
// A connection should have the method CloseWrite() error, as *net.TCPConn has, or
// the end of one direction ends both. It may have Reset() error, which aborts
// instead of closing, and Context() context.Context, as a QUIC stream has: its end
// tells, after Read has returned io.EOF, that the other direction is lost.
func Relay(ctx context.Context, client, upstream net.Conn, early []byte) {
	r := &relayed{client: client, upstream: upstream, both: make(chan struct{})}
	defer context.AfterFunc(ctx, r.reset)()
	var other sync.WaitGroup
	other.Go(func() { r.pass(client, upstream, nil) })
	r.pass(upstream, client, early)
	other.Wait()
	client.Close()
	upstream.Close()
}

// relayed is a pair of connections.
type relayed struct {
	client, upstream net.Conn
	ended            atomic.Int32  // directions
	both             chan struct{} // closed when both have
}

// pass copies from src until its end, which it passes on.
func (r *relayed) pass(dst, src net.Conn, first []byte) {
	var err error
	if len(first) > 0 {
		_, err = dst.Write(first)
	}
	if err == nil {
		err = transfer(dst, src)
	}
	if err == nil {
		n := r.ended.Add(1) // before dst's context may end by it
		err = CloseWrite(dst)
		if err == nil && n == 2 {
			// Nothing is read from either any more, but for the wait below.
			close(r.both)
			dst.SetReadDeadline(longAgo)
			src.SetReadDeadline(longAgo)
			return
		}
	}
	if err == nil {
		err = r.awaitLoss(src)
	}
	if err != nil {
		r.reset()
	}
}

func (r *relayed) reset() {
	Reset(r.client)
	Reset(r.upstream)
}

var errLost = errors.New("the connection was lost")

// awaitLoss waits for the end of the other direction, which is no error. Until then
// it returns an error where c, whose peer has ended its own direction, is lost: only
// writing would tell otherwise, and there may be nothing to write for long. Of some
// connections it cannot know.
func (r *relayed) awaitLoss(c net.Conn) error {
	switch c := c.(type) {
	case syscall.Conn: // a socket of TCP, as it is or inside another
		return AwaitReset(c)
	case interface{ Context() context.Context }:
		select {
		case <-r.both:
		case <-c.Context().Done():
			if r.ended.Load() < 2 {
				return errLost
			}
		}
	}
	return nil
}

// AwaitReset returns the error by which a TCP connection is reset, or nil when its
// read deadline has passed.
func AwaitReset(c syscall.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && code != 0 {
			failed = unix.Errno(code)
		}
		return failed != nil
	})
	if failed != nil {
		return failed
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// transfer copies until src has ended. Between two TCP connections the kernel
// copies, by splice(2).
func transfer(dst, src net.Conn) error {
	if _, ok := dst.(*net.TCPConn); ok {
		if src, ok := src.(*net.TCPConn); ok {
			_, err := io.Copy(dst, src)
			return err
		}
	}
	b := make([]byte, idleBuffer)
	for {
		n, err := src.Read(b)
		err = write(dst, b[:n], err)
		if n == len(b) && err == nil {
			err = transferBusy(dst, src)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// transferBusy copies until src has ended, which is io.EOF, or nothing came for a
// while.
func transferBusy(dst, src net.Conn) error {
	b := buffers.Get().(*[busyBuffer]byte)
	defer buffers.Put(b)
	defer src.SetReadDeadline(time.Time{})
	for {
		src.SetReadDeadline(time.Now().Add(busyWait))
		n, err := src.Read(b[:])
		err = write(dst, b[:n], err)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// write passes on what a Read returned, and returns the first error of both. That
// the other side has ended must not pass for the end of this one.
func write(dst io.Writer, b []byte, readErr error) error {
	if len(b) == 0 {
		return readErr
	}
	if _, err := dst.Write(b); errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		return errLost
	} else if err != nil {
		return err
	}
	return readErr
}

// CloseWrite ends this side's direction. A connection that cannot end one alone is
// closed.
func CloseWrite(c net.Conn) error {
	if c, ok := c.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return c.Close()
}

// Reset aborts a connection: of TCP's by RST instead of FIN.
func Reset(c net.Conn) {
	// What fails here has been closed, or reset, by the other side.
	switch c := c.(type) {
	case interface{ Reset() error }:
		_ = c.Reset()
	case interface{ SetLinger(int) error }:
		_ = c.SetLinger(0)
	}
	_ = c.Close()
}
