package publish

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A tcpServer is a published TCP port.
type tcpServer struct {
	ln        *net.TCPListener
	to        *container
	published Port
	full      sync.Once // guards the message that there are too many
}

func (s *tcpServer) port() uint16 { return s.ln.Addr().(*net.TCPAddr).AddrPort().Port() }
func (s *tcpServer) Close() error { return closed(s.ln) }

// serve takes connections; what is beyond the limit is reset at once, so that a
// client does not hang.
func (s *tcpServer) serve(ctx context.Context) {
	var conns sync.WaitGroup
	defer conns.Wait()
	slots := make(chan struct{}, s.to.limit)
	for {
		client, err := s.ln.AcceptTCP()
		if err != nil {
			if !retry(ctx, s.to, s.published, err) {
				return
			}
			continue
		}
		select {
		case slots <- struct{}{}:
			conns.Go(func() {
				defer func() { <-slots }()
				s.handle(ctx, client)
			})
		default:
			reset(client)
			s.full.Do(func() {
				s.to.log.Warn("a published port has too many connections; further ones are refused until some end", "port", s.published, "limit", s.to.limit)
			})
		}
	}
}

func (s *tcpServer) handle(ctx context.Context, client *net.TCPConn) {
	app, err := s.to.dialTCP(ctx, client.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(), s.published.ContainerPort)
	if err != nil {
		reset(client)
		s.to.log.Debug("a client of a published port is refused", "port", s.published, "client", client.RemoteAddr(), "error", err)
		return
	}
	relay(ctx, client, app)
}

// relay passes both directions until both have ended, each by itself, or one side
// is reset, or ctx is done; then the other side is reset too.
func relay(ctx context.Context, client, app *net.TCPConn) {
	r := &relayed{client: client, app: app}
	defer context.AfterFunc(ctx, r.reset)()
	var other sync.WaitGroup
	other.Go(func() { r.pass(app, client) })
	r.pass(client, app)
	other.Wait()
	client.Close()
	app.Close()
}

// relayed is a pair of connections.
type relayed struct {
	client, app *net.TCPConn
	ended       atomic.Int32 // directions
}

// pass copies from src until its end, which it passes on. The kernel does the
// copying, by splice(2).
func (r *relayed) pass(dst, src *net.TCPConn) {
	_, err := io.Copy(dst, src)
	if err == nil {
		err = dst.CloseWrite()
	}
	if err == nil {
		if r.ended.Add(1) == 2 {
			// Nothing is read from either any more, but for the wait below.
			dst.SetReadDeadline(time.Unix(1, 0))
			src.SetReadDeadline(time.Unix(1, 0))
			return
		}
		err = awaitReset(src)
	}
	if err != nil {
		r.reset()
	}
}

func (r *relayed) reset() {
	reset(r.client)
	reset(r.app)
}

// awaitReset waits for the end of the other direction, which is the passing of
// c's read deadline and no error. Until then it returns an error where c's peer,
// which has closed its own direction, resets the connection: only writing would
// tell otherwise, and there may be nothing to write for long.
func awaitReset(c *net.TCPConn) error {
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

// reset closes the connection by RST instead of FIN.
func reset(c *net.TCPConn) {
	// What fails here has been closed, or reset, by the other side.
	_ = c.SetLinger(0)
	_ = c.Close()
}

// closed closes a listener and makes a further call no error.
func closed(c io.Closer) error {
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// retry tells whether to go on after an error of a host's socket: the port stays
// published when descriptors or memory run out for a while.
func retry(ctx context.Context, to *container, p Port, err error) bool {
	if errors.Is(err, net.ErrClosed) {
		return false
	}
	to.log.Warn("a published port has trouble; trying again in a second", "port", p, "error", err)
	select {
	case <-ctx.Done():
		return false
	case <-time.After(time.Second):
		return true
	}
}
