package tunnel

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"

	"github.com/quic-go/quic-go/http3"

	"github.com/quicvpn/quicvpn/internal/relay"
)

const (
	// maxFlows bounds the requests of a connection, and maxEarlyRequests those of one
	// that has no session.
	maxFlows         = 16 << 10
	maxEarlyRequests = 8
)

// A flowDialer is one of a server's functions that open flows.
type flowDialer func(ctx context.Context, s *Session, address string) (net.Conn, error)

// serveFlow answers a request for a flow, which needs a session on its connection,
// and passes its bytes until it has ended.
func (h *handler) serveFlow(w http.ResponseWriter, r *http.Request) {
	dial, address, serve := h.server.cfg.DialTCP, r.Host, (*Session).serveTCP
	if r.Proto == protoConnectUDP {
		dial, address, serve = h.server.cfg.DialUDP, udpAddress(r), (*Session).serveUDP
	}
	s := h.session.Load()
	_, _, err := splitAddress(address)
	switch {
	case s == nil:
		refuseFlow(w, &DialError{http.StatusForbidden, codeDenied, "ask for a tunnel (RFC 9484) on this connection first"})
		return
	case err != nil:
		refuseFlow(w, &DialError{http.StatusBadRequest, codeBadRequest, "not a host and a port"})
		return
	case dial == nil:
		refuseFlow(w, &DialError{http.StatusNotImplemented, codeDenied, "this gateway carries packets alone"})
		return
	}
	upstream, err := flowDialer(dial)(r.Context(), s, address)
	if err != nil {
		if r.Context().Err() == nil {
			refuseFlow(w, dialError(err))
		}
		return
	}
	if r.Proto == protoConnectUDP {
		w.Header().Set(http3.CapsuleProtocolHeader, "?1")
	}
	w.WriteHeader(http.StatusOK)
	stream, err := w.(http3.HTTPStreamer).HTTPStream()
	if err != nil {
		relay.Reset(upstream)
		return
	}
	serve(s, stream, upstream, address)
}

// udpAddress returns the host and port of a path of the default template.
func udpAddress(r *http.Request) string {
	path, ok := strings.CutPrefix(r.URL.Path, pathConnectUDP)
	fields := strings.Split(path, "/")
	if !ok || len(fields) != 3 || fields[2] != "" {
		return ""
	}
	return net.JoinHostPort(fields[0], fields[1])
}

func (s *Session) serveTCP(stream *http3.Stream, upstream net.Conn, address string) {
	flow := &Flow{stream: stream, local: s.conn.LocalAddr(), remote: flowAddr{"tcp", address}}
	relay.Relay(context.Background(), flow, upstream, nil) // the session's end is its own
}

// serveUDP passes datagrams until one side has ended.
func (s *Session) serveUDP(stream *http3.Stream, upstream net.Conn, address string) {
	on := &flows{conn: s.conn, drops: s.drops}
	if s.own {
		on.session = s
	}
	flow := newUDPFlow(stream, flowAddr{"udp", address}, on)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer upstream.Close()
		copyDatagrams(upstream, flow)
	}()
	copyDatagrams(flow, upstream)
	flow.Close()
	<-done
}

// copyDatagrams copies until one of both has ended. A datagram that is too long for
// the way is lost, as in any network.
func copyDatagrams(dst, src net.Conn) {
	b := make([]byte, maxUDP)
	for {
		n, err := src.Read(b)
		if err != nil {
			return
		}
		if _, err := dst.Write(b[:n]); err != nil && !errors.Is(err, syscall.EMSGSIZE) {
			return
		}
	}
}
