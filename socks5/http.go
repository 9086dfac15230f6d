package socks5

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/relay"
)

// maxHeader bounds the header of a request.
const maxHeader = 64 << 10

// httpIdle ends an HTTP connection without a request, and one to a server.
const httpIdle = 90 * time.Second

// handoff is the listener from which net/http takes the clients that speak HTTP.
type handoff struct {
	ctx     context.Context
	clients chan *client
}

// give hands a client over, unless all ends.
func (h *handoff) give(c *client) bool {
	select {
	case h.clients <- c:
		return true
	case <-h.ctx.Done():
		return false
	}
}

func (h *handoff) Accept() (net.Conn, error) {
	select {
	case c := <-h.clients:
		return c, nil
	case <-h.ctx.Done():
		return nil, net.ErrClosed
	}
}

func (h *handoff) Close() error   { return nil } // ctx ends it
func (h *handoff) Addr() net.Addr { return &net.TCPAddr{} }

type clientKey struct{}

func clientOf(r *http.Request) *client { return r.Context().Value(clientKey{}).(*client) }

// serveHTTP starts what serves the clients that speak HTTP.
func (v *service) serveHTTP() {
	v.http = &handoff{ctx: v.ctx, clients: make(chan *client)}
	log := slog.NewLogLogger(v.log().Handler(), slog.LevelDebug)
	proxy := v.reverseProxy(log)
	s := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { v.request(w, r, proxy) }),
		ReadHeaderTimeout: v.handshakeTimeout(),
		IdleTimeout:       httpIdle,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          log,
		BaseContext:       func(net.Listener) context.Context { return v.ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, clientKey{}, c)
		},
		DisableGeneralOptionsHandler: true, // of `OPTIONS *`
	}
	v.running.Go(func() { s.Serve(v.http) })
}

// request serves one request: CONNECT, or one with an absolute http URL. All else
// is meant for a server, not a proxy; a web page that has a browser send something
// to the proxy's port gets no further than here.
func (v *service) request(w http.ResponseWriter, r *http.Request, proxy http.Handler) {
	if len(r.TransferEncoding) > 0 {
		w.Header().Set("Connection", "close") // see heads
	}
	if !v.authorized(w, r) {
		return
	}
	switch {
	case r.Method == http.MethodConnect:
		to, err := parseAddr(r.RequestURI)
		if err == nil && r.ContentLength != 0 {
			err = errMalformed // what is content and what is the tunnel's must not be in question
		}
		if err != nil {
			badRequest(w, "CONNECT needs host:port, and no content")
			return
		}
		v.tunnel(w, r, to)
	case r.URL.Scheme == "http":
		host := r.URL.Host
		if r.URL.Port() == "" {
			host = net.JoinHostPort(r.URL.Hostname(), "80")
		}
		if _, err := parseAddr(host); err != nil {
			badRequest(w, "the URL has no valid host and port")
			return
		}
		v.forward(w, r, proxy)
	default:
		badRequest(w, "this is a proxy: it takes CONNECT host:port, and http:// URLs")
	}
}

func badRequest(w http.ResponseWriter, text string) {
	w.Header().Set("Connection", "close")
	http.Error(w, text, http.StatusBadRequest)
}

// authorized checks the credentials (RFC 9110 section 11.7).
func (v *service) authorized(w http.ResponseWriter, r *http.Request) bool {
	if v.Authenticate == nil {
		return true
	}
	field := r.Header.Get("Proxy-Authorization")
	user, password, ok := parseBasic(field)
	if ok && v.Authenticate(user, password) {
		return true
	}
	if field != "" { // clients without credentials ask first, and may then stay
		w.Header().Set("Connection", "close")
		v.denied(clientOf(r))
	}
	w.Header().Set("Proxy-Authenticate", fmt.Sprintf(`Basic realm=%q, charset="UTF-8"`, v.name()))
	http.Error(w, "this proxy needs a user and a password", http.StatusProxyAuthRequired)
	return false
}

// httpError tells a client why there is no response of a server.
func (v *service) httpError(w http.ResponseWriter, host string, err error) {
	status, proxyError := statusTo(err)
	v.log().Debug("a proxy has no response for a request", "to", host, "error", err)
	w.Header().Set("Proxy-Status", v.name()+"; error="+proxyError)
	http.Error(w, fmt.Sprintf("the proxy cannot reach %s: %s", host, strings.ReplaceAll(proxyError, "_", " ")), status)
}

// tunnel serves CONNECT.
func (v *service) tunnel(w http.ResponseWriter, r *http.Request, to Addr) {
	upstream, err := v.dial(r.Context(), to)
	if err != nil {
		v.httpError(w, to.String(), err)
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil { // the client has gone
		relay.Reset(upstream)
		return
	}
	c := conn.(*client)
	if c.heads.refused() {
		// What was sent ahead of the response looks like a bad request, of which the
		// rest is lost by now.
		relay.Reset(upstream)
		c.Close()
		return
	}
	early := make([]byte, rw.Reader.Buffered())
	rw.Reader.Read(early) // which is there
	// net/http's part of the connection, and its memory, end with this function.
	go func() {
		defer c.Close()
		if _, err := c.Conn.Write([]byte("HTTP/1.1 200 Connection established\r\n\r\n")); err != nil {
			relay.Reset(upstream)
			return
		}
		relay.Relay(v.ctx, c.Conn, upstream, early)
	}()
}
