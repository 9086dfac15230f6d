package publish

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/quicvpn/quicvpn/internal/relay"
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
			relay.Reset(client)
			s.full.Do(func() {
				s.to.log.Warn("a published port has too many connections; further ones are refused until some end", "port", s.published, "limit", s.to.limit)
			})
		}
	}
}

func (s *tcpServer) handle(ctx context.Context, client *net.TCPConn) {
	app, err := s.to.dialTCP(ctx, client.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(), s.published.ContainerPort)
	if err != nil {
		relay.Reset(client)
		s.to.log.Debug("a client of a published port is refused", "port", s.published, "client", client.RemoteAddr(), "error", err)
		return
	}
	relay.Relay(ctx, client, app, nil)
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
