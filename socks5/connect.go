package socks5

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/quicvpn/quicvpn/internal/relay"
)

// longAgo as a deadline ends what is waiting.
var longAgo = time.Unix(1, 0)

// socks serves a client that has sent the version byte. It returns when all has
// ended; the caller closes the connection.
func (v *service) socks(conn net.Conn) {
	req, err := negotiate(conn, v.Authenticate)
	if err != nil {
		v.failed(conn, err)
		return
	}
	conn.SetDeadline(time.Time{})
	switch {
	case req.command == commandConnect:
		v.connect(conn, req.to)
	case req.command == commandAssociate && v.Associate != nil:
		v.associate(conn, req.to)
	default:
		v.reply(conn, CommandNotSupported)
	}
}

// failed ends a handshake.
func (v *service) failed(conn net.Conn, err error) {
	var reply Reply
	switch {
	case errors.As(err, &reply):
		v.reply(conn, reply)
	case errors.Is(err, errDenied):
		v.denied(conn)
		finish(conn)
	}
	v.log().Debug("a SOCKS5 handshake failed", "client", conn.RemoteAddr(), "error", err)
}

// denied tells of a client without credentials, or with wrong ones.
func (v *service) denied(conn net.Conn) {
	if v.said.denied.due() {
		v.log().Warn("a proxy refused a client without the right user and password", "client", conn.RemoteAddr())
	}
}

// reply ends a connection with a reply that is no success.
func (v *service) reply(conn net.Conn, r Reply) {
	conn.SetWriteDeadline(time.Now().Add(v.handshakeTimeout()))
	if _, err := conn.Write(appendReply(nil, r, Addr{})); err == nil {
		finish(conn)
	}
}

func (v *service) connect(conn net.Conn, to Addr) {
	ctx, stop := v.watch(conn)
	upstream, err := v.dial(ctx, to)
	early, gone := stop()
	if err != nil {
		if !gone {
			v.reply(conn, replyTo(err))
		}
		return
	}
	if _, err := conn.Write(appendReply(nil, succeeded, addrFrom(addrPort(upstream.LocalAddr())))); err != nil {
		relay.Reset(upstream)
		return
	}
	relay.Relay(v.ctx, conn, upstream, early)
}

// dial opens the other side of a client's connection.
func (s *Server) dial(ctx context.Context, to Addr) (net.Conn, error) {
	if to.Port == 0 {
		return nil, fmt.Errorf("%w: %w", errPort, GeneralFailure)
	}
	ctx, cancel := context.WithTimeout(ctx, s.dialTimeout())
	defer cancel()
	conn, err := s.Dial(ctx, "tcp", to.String())
	if err != nil {
		s.log().Debug("a proxy cannot connect", "to", to, "error", err)
	}
	return conn, err
}

// watch returns a context that is done when the client goes while this side is busy
// for it. Its end of sending counts: no client gives up that before it has a reply,
// except by closing. stop ends the watch and returns what the client has sent
// meanwhile, and whether it has gone.
func (v *service) watch(conn net.Conn) (ctx context.Context, stop func() (early []byte, gone bool)) {
	ctx, cancel := context.WithCancel(v.ctx)
	var early []byte
	var gone bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, idleBuffer)
		n, err := conn.Read(b)
		early = b[:n]
		if n == 0 && !errors.Is(err, os.ErrDeadlineExceeded) {
			gone = true
			cancel()
		}
	}()
	return ctx, func() ([]byte, bool) {
		conn.SetReadDeadline(longAgo)
		<-done
		conn.SetReadDeadline(time.Time{})
		cancel()
		return early, gone
	}
}
