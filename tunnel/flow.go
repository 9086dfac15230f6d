package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// protoConnect is what net/http calls the protocol of a plain CONNECT.
const protoConnect = "HTTP/3.0"

// A Flow is a TCP connection that ends at the other end of a session, and goes
// through it as a stream: CONNECT of RFC 9114, section 4.4.
type Flow struct {
	stream flowStream
	local  net.Addr
	remote flowAddr

	// Answered, if it is set before the first Read or Write, is called once with
	// the gateway's answer, nil or a *DialError.
	Answered func(error)

	request *http3.RequestStream // nil at the server
	once    sync.Once            // guards answer
	answer  error
}

// A flowStream is a stream at the client or at the server.
type flowStream interface {
	io.ReadWriteCloser
	CancelRead(quic.StreamErrorCode)
	CancelWrite(quic.StreamErrorCode)
	Context() context.Context
	SetDeadline(time.Time) error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// flowAddr is a host, which may be a name, and a port.
type flowAddr struct{ network, address string }

func (a flowAddr) Network() string { return a.network }
func (a flowAddr) String() string  { return a.address }

// ErrNoFlows is what a gateway's end of a session returns: clients open flows.
var ErrNoFlows = errors.New("the gateway's end of a session opens no flows")

// flows opens flows on one connection.
type flows struct {
	conn   *quic.Conn
	client *http3.ClientConn
	// authority and header go with every request that does not name a host.
	authority string
	header    http.Header
	session   *Session // that reads and writes the datagrams; nil where HTTP/3 does
	drops     *packet.Drops
}

// DialTCP has the gateway connect to address, "host:port", and waits for the
// outcome. A name is resolved by the gateway. Where the gateway does not connect the
// error is a *DialError.
func (s *flows) DialTCP(ctx context.Context, address string) (*Flow, error) {
	f, err := s.OpenTCP(ctx, address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { f.stream.SetReadDeadline(longAgo) })
	err = f.answered()
	if !stop() {
		err = fmt.Errorf("wait for the gateway's answer: %w", context.Cause(ctx))
	}
	if err != nil {
		f.Reset()
		return nil, err
	}
	return f, nil
}

// OpenTCP is DialTCP without the wait: what is written goes to the gateway at once,
// behind the request. How the dial ended the first Read tells, or a Write.
func (s *flows) OpenTCP(ctx context.Context, address string) (*Flow, error) {
	if _, _, err := splitAddress(address); err != nil {
		return nil, err
	}
	stream, err := s.request(ctx, &http.Request{
		Method: http.MethodConnect, Host: address, URL: &url.URL{Host: address}, Header: make(http.Header),
	})
	if err != nil {
		return nil, err
	}
	return &Flow{stream: stream, request: stream, local: s.conn.LocalAddr(), remote: flowAddr{"tcp", address}}, nil
}

// request opens a stream and sends a request on it.
func (s *flows) request(ctx context.Context, r *http.Request) (*http3.RequestStream, error) {
	if s == nil {
		return nil, ErrNoFlows
	}
	maps.Copy(r.Header, s.header)
	stream, err := s.client.OpenRequestStream(ctx)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w: %w", syscall.ENETDOWN, err) // nothing else fails it but the connection's end
	}
	if err != nil {
		return nil, fmt.Errorf("open a request: %w", err)
	}
	if s.session != nil {
		s.session.heard.sentNow()
	}
	if err := stream.SendRequestHeader(r.WithContext(ctx)); err != nil {
		cancelStream(stream, http3.ErrCodeRequestCanceled)
		return nil, fmt.Errorf("send a request: %w", s.lost(ctx, err))
	}
	return stream, nil
}

// lost makes an error of a connection that is over one that a lost network gives.
func (s *flows) lost(ctx context.Context, err error) error {
	if ctx.Err() == nil && s.conn.Context().Err() != nil {
		return fmt.Errorf("%w: %w", syscall.ENETDOWN, err)
	}
	return err
}

// splitAddress takes "host:port" apart; the host is an IP address or a name.
func splitAddress(address string) (host string, port uint16, err error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, fmt.Errorf("address: %w", err)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("address %q: the port must be 1 to 65535", address)
	}
	if host == "" || len(host) > maxHost || strings.ContainsFunc(host, func(r rune) bool {
		return r <= ' ' || r > '~' || strings.ContainsRune(`/?#@[]\"<>%`, r)
	}) {
		return "", 0, fmt.Errorf("address %q: not the name of a host", address)
	}
	return host, uint16(n), nil
}

// maxHost is a name of 253 bytes with its last dot.
const maxHost = 254

// longAgo as a deadline ends what is waiting.
var longAgo = time.Unix(1, 0)

// answered waits for the gateway's answer, and remembers it.
func (f *Flow) answered() error {
	if f.request == nil {
		return nil
	}
	f.once.Do(func() {
		response, err := f.request.ReadResponse()
		switch {
		case err != nil:
			f.answer = flowError(err)
		case response.StatusCode < 200 || response.StatusCode > 299:
			f.answer = answerError(response)
		}
		if f.Answered != nil {
			f.Answered(f.answer)
		}
	})
	return f.answer
}

func (f *Flow) Read(b []byte) (int, error) {
	if err := f.answered(); err != nil {
		return 0, err
	}
	n, err := f.stream.Read(b)
	return n, flowError(err)
}

// Write may write before the gateway has connected. A gateway that cannot connect
// stops it.
func (f *Flow) Write(b []byte) (int, error) {
	n, err := f.stream.Write(b)
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	if answer := f.answered(); answer != nil {
		return n, answer
	}
	return n, flowError(err)
}

// CloseWrite ends this direction; the other one goes on.
func (f *Flow) CloseWrite() error { return f.stream.Close() }

// Close ends both directions. What was written still arrives.
func (f *Flow) Close() error {
	f.stream.CancelRead(quic.StreamErrorCode(http3.ErrCodeNoError))
	return f.stream.Close()
}

// Reset aborts the connection: the other end sees a reset (RFC 9114, section 4.4).
func (f *Flow) Reset() error {
	cancelStream(f.stream, http3.ErrCodeConnectError)
	return nil
}

func cancelStream(s flowStream, code http3.ErrCode) {
	s.CancelRead(quic.StreamErrorCode(code))
	s.CancelWrite(quic.StreamErrorCode(code))
}

// Context ends with this end's direction, or when the flow is lost.
func (f *Flow) Context() context.Context { return f.stream.Context() }

// LocalAddr is the session's; RemoteAddr is the address that was asked for.
func (f *Flow) LocalAddr() net.Addr  { return f.local }
func (f *Flow) RemoteAddr() net.Addr { return f.remote }

func (f *Flow) SetDeadline(t time.Time) error      { return f.stream.SetDeadline(t) }
func (f *Flow) SetReadDeadline(t time.Time) error  { return f.stream.SetReadDeadline(t) }
func (f *Flow) SetWriteDeadline(t time.Time) error { return f.stream.SetWriteDeadline(t) }

// flowError makes of a stream's error what a TCP connection would have: both what
// the other end aborts and what is lost with the session are resets.
func flowError(err error) error {
	if err == nil || err == io.EOF || errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	if stream, ok := errors.AsType[*quic.StreamError](err); ok && !stream.Remote {
		return net.ErrClosed
	}
	return fmt.Errorf("%w: %w", syscall.ECONNRESET, err)
}

var _ net.Conn = (*Flow)(nil)
