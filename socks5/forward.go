package socks5

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"sync"
	"time"
)

// forward serves a request with an absolute URL.
func (v *service) forward(w http.ResponseWriter, r *http.Request, proxy http.Handler) {
	if r.Method == http.MethodTrace || r.Method == http.MethodOptions {
		// RFC 9110 section 7.6.2.
		n, err := strconv.ParseUint(r.Header.Get("Max-Forwards"), 10, 31)
		if err == nil && n == 0 {
			w.WriteHeader(http.StatusOK)
			return
		}
		if err == nil {
			r.Header.Set("Max-Forwards", strconv.FormatUint(n-1, 10))
		}
	}
	w.Header().Del("Connection") // which an interim response would have, too
	f := &forwarded{ResponseWriter: w, last: len(r.TransferEncoding) > 0}
	if r.Header.Get("Expect") != "" {
		r = r.WithContext(r.Context()) // net/http goes by the body of the one that it made
		r.Body = &expectedBody{ReadCloser: r.Body, response: f}
	}
	proxy.ServeHTTP(f, r)
}

// reverseProxy returns httputil's, as a proxy on the clients' side.
func (v *service) reverseProxy(errors *log.Logger) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite:        v.rewrite,
		Transport:      ownTransport{v},
		FlushInterval:  -1, // what a server sends, its client gets
		BufferPool:     bufferPool{},
		ErrorLog:       errors,
		ErrorHandler:   func(w http.ResponseWriter, r *http.Request, err error) { v.httpError(w, r.Host, err) },
		ModifyResponse: v.modifyResponse,
	}
}

// rewrite makes the request to the server of the client's: the same one, without
// fields that concern the proxy alone, which httputil has removed by now.
func (v *service) rewrite(r *httputil.ProxyRequest) {
	// These httputil removes too, for proxies that stand before a server.
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if values, ok := r.In.Header[name]; ok {
			r.Out.Header[name] = values
		}
	}
	r.Out.URL.RawQuery = r.In.URL.RawQuery
	r.Out.Header.Add("Via", v.via(r.In.ProtoMajor, r.In.ProtoMinor))
}

func (v *service) modifyResponse(r *http.Response) error {
	r.Header.Add("Via", v.via(r.ProtoMajor, r.ProtoMinor))
	if r.StatusCode == http.StatusSwitchingProtocols {
		clientOf(r.Request).upgraded.Store(true)
	}
	return nil
}

// via is the value for a message's Via field (RFC 9110 section 7.6.3).
func (v *service) via(major, minor int) string {
	return fmt.Sprintf("%d.%d %s", major, minor, v.name())
}

// A forwarded is a response that httputil writes. httputil forgets what was set in
// its header before when a server sends an interim response (1xx).
type forwarded struct {
	http.ResponseWriter
	last bool       // of its connection
	mu   sync.Mutex // is held while net/http writes an interim response
}

// Unwrap is for http.ResponseController.
func (f *forwarded) Unwrap() http.ResponseWriter { return f.ResponseWriter }

func (f *forwarded) WriteHeader(status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if status == http.StatusContinue {
		return // the body is read now, by which net/http sends it
	}
	if status >= http.StatusOK {
		h := f.Header()
		if _, ok := h["Content-Type"]; !ok {
			h["Content-Type"] = nil // or net/http guesses one
		}
		if f.last {
			h.Set("Connection", "close")
		}
	}
	f.ResponseWriter.WriteHeader(status)
}

// An expectedBody is a request's body for which the client waits to be told to
// continue. net/http tells it when the body is read first, and does not expect
// another interim response at the same time.
type expectedBody struct {
	io.ReadCloser
	response *forwarded
	begun    bool
}

func (b *expectedBody) Read(p []byte) (int, error) {
	if !b.begun {
		b.begun = true
		b.response.mu.Lock()
		_, err := b.ReadCloser.Read(nil)
		b.response.mu.Unlock()
		if err != nil {
			return 0, err
		}
	}
	return b.ReadCloser.Read(p)
}

// ownTransport sends a request by the transport of its client's connection. Clients
// share no connection to a server: some servers take what comes by one for one
// user's (NTLM).
type ownTransport struct{ *service }

func (t ownTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	c := clientOf(r)
	if c.transport == nil {
		c.transport = &http.Transport{
			DialContext:            t.dialHTTP,
			DisableCompression:     true, // it is between client and server
			MaxIdleConns:           4,
			MaxIdleConnsPerHost:    1,
			IdleConnTimeout:        httpIdle,
			ExpectContinueTimeout:  time.Second,
			MaxResponseHeaderBytes: 4 * maxHeader,
		}
	}
	return c.transport.RoundTrip(r)
}

// dialHTTP opens a connection for a request. net/http lets its context outlive the
// request, but it must not outlive the service.
func (v *service) dialHTTP(ctx context.Context, _, address string) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(v.ctx, cancel)()
	to, err := parseAddr(address)
	if err != nil {
		return nil, err
	}
	return v.dial(ctx, to)
}

// bufferPool lends buffers to httputil.
type bufferPool struct{}

func (bufferPool) Get() []byte  { return buffers.Get().(*[busyBuffer]byte)[:] }
func (bufferPool) Put(b []byte) { buffers.Put((*[busyBuffer]byte)(b)) }
