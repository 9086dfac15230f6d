package socks5

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestForward(t *testing.T) {
	w := newWorld(t, nil)
	var got *http.Request
	var body []byte
	at := origin(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
		h := w.Header()
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "secret")
		h.Set("Proxy-Authenticate", "Basic")
		h.Set("Keep-Alive", "timeout=5")
		h.Set("X-End", "kept")
		h["Content-Type"] = nil
		w.WriteHeader(http.StatusTeapot)
		io.WriteString(w, "<html>")
	})
	res := w.roundTrip(fmt.Sprintf("POST http://app.test:%d/a%%2fb//c?x=1;y=%%zz HTTP/1.1\r\n"+
		"Host: elsewhere.test\r\nProxy-Authorization: Basic c2VjcmV0\r\nProxy-Connection: keep-alive\r\nConnection: close, X-Private\r\n"+
		"X-Private: secret\r\nKeep-Alive: 300\r\nTE: gzip\r\nX-Forwarded-For: 192.0.2.7\r\nAuthorization: Basic b3JpZ2lu\r\nContent-Length: 4\r\n\r\nbody", at.Port))
	if res.StatusCode != http.StatusTeapot {
		t.Fatalf("status %d", res.StatusCode)
	}
	if got.RequestURI != "/a%2fb//c?x=1;y=%zz" || got.Host != fmt.Sprintf("app.test:%d", at.Port) || string(body) != "body" {
		t.Errorf("%s of %s with %q", got.RequestURI, got.Host, body)
	}
	want := http.Header{"Authorization": {"Basic b3JpZ2lu"}, "Content-Length": {"4"}, "Via": {"1.1 quicvpn"}, "X-Forwarded-For": {"192.0.2.7"}}
	if diff := cmp.Diff(want, got.Header); diff != "" {
		t.Errorf("fields at the server (-want +got):\n%s", diff)
	}
	res.Header.Del("Date")
	want = http.Header{"Content-Length": {"6"}, "Via": {"1.1 quicvpn"}, "X-End": {"kept"}}
	if diff := cmp.Diff(want, res.Header); diff != "" {
		t.Errorf("fields at the client (-want +got):\n%s", diff)
	}
}

// A client's connection carries one request after the other, over one connection to
// the server, which no other client's requests share.
func TestForwardKeepsConnections(t *testing.T) {
	w := newWorld(t, nil)
	at := origin(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.RemoteAddr) })
	request := fmt.Sprintf("GET http://%v/ HTTP/1.1\r\nHost: %v\r\n\r\n", at, at)
	seen := make(map[string]int)
	for range 2 {
		c := w.connect()
		r := bufio.NewReader(c)
		send(t, c, []byte(request+request)) // pipelined, as by apt
		for i := range 3 {
			b, _ := io.ReadAll(readResponse(t, r, request).Body)
			seen[string(b)]++
			if i == 1 {
				send(t, c, []byte(request))
			}
		}
		c.Close()
	}
	if len(seen) != 2 {
		t.Errorf("requests by connection to the server: %v, want 3 by each of 2", seen)
	}
	eventually(t, "the end of the clients", func() bool { return w.count() == 0 })
}

// What a server sends arrives as it sends it, and trailers arrive.
func TestForwardStreams(t *testing.T) {
	w := newWorld(t, nil)
	next := make(chan struct{})
	at := origin(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		io.WriteString(w, "one")
		http.NewResponseController(w).Flush()
		<-next
		io.WriteString(w, "two")
		w.Header().Set("X-Sum", "6")
	})
	res, err := w.client().Get("http://" + at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	expect(t, res.Body, []byte("one"))
	close(next)
	expect(t, res.Body, []byte("two"))
	expectEOF(t, res.Body)
	if got := res.Trailer.Get("X-Sum"); got != "6" {
		t.Errorf("trailer %q", got)
	}
}

func TestInterim(t *testing.T) {
	w := newWorld(t, nil)
	at := origin(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</a.css>")
		w.WriteHeader(http.StatusEarlyHints)
		io.Copy(w, r.Body)
	})
	var hints, continued int
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		Got100Continue: func() { continued++ },
		Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
			if code == http.StatusEarlyHints {
				hints++
			}
			return nil
		},
	})
	r, err := http.NewRequestWithContext(ctx, "PUT", "http://"+at.String(), strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Expect", "100-continue")
	client := w.client()
	client.Transport.(*http.Transport).ExpectContinueTimeout = 10 * time.Second
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	expect(t, res.Body, []byte("body"))
	if hints != 1 || continued != 1 {
		t.Errorf("%d early hints, %d continue", hints, continued)
	}
	// What was settled before an interim response holds after it.
	c := w.connect()
	send(t, c, fmt.Appendf(nil, "PUT http://%v/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", at))
	br := bufio.NewReader(c)
	for _, want := range []int{http.StatusEarlyHints, http.StatusOK} {
		res, err := http.ReadResponse(br, nil)
		if err != nil || res.StatusCode != want || res.Close != (want == http.StatusOK) {
			t.Errorf("%+v, %v, want status %d", res, err, want)
		}
	}
}

// A body that the server does not want is not asked for.
func TestExpectationFailed(t *testing.T) {
	w := newWorld(t, nil)
	at := origin(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	res := w.roundTrip(fmt.Sprintf("PUT http://%v/ HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", at))
	if res.StatusCode != http.StatusUnauthorized {
		t.Errorf("status %d", res.StatusCode)
	}
}

func TestUpgrade(t *testing.T) {
	w := newWorld(t, nil)
	at := origin(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "echo" || r.Header.Get("Connection") != "Upgrade" {
			t.Errorf("fields %v", r.Header)
		}
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\n")
		io.Copy(c, rw)
	})
	c := w.connect()
	send(t, c, fmt.Appendf(nil, "GET http://%v/ HTTP/1.1\r\nHost: x\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\n", at))
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols || res.Header.Get("Connection") != "Upgrade" {
		t.Fatalf("%v, %v", res, err)
	}
	// No request of HTTP's any more, whatever it looks like.
	data := []byte("x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n")
	for range 3 {
		send(t, c, data)
		expect(t, r, data)
	}
}

func TestMaxForwards(t *testing.T) {
	w := newWorld(t, nil)
	var got []string
	at := origin(t, func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Method+" "+r.Header.Get("Max-Forwards"))
		w.WriteHeader(http.StatusNoContent)
	})
	for forwards, want := range map[string]int{"0": 200, "9": 204} {
		request := fmt.Sprintf("OPTIONS http://%v/ HTTP/1.1\r\nHost: x\r\nMax-Forwards: %s\r\n\r\n", at, forwards)
		if res := w.roundTrip(request); res.StatusCode != want {
			t.Errorf("%s: %d", forwards, res.StatusCode)
		}
	}
	if diff := cmp.Diff([]string{"OPTIONS 8"}, got); diff != "" {
		t.Errorf("forwarded (-want +got):\n%s", diff)
	}
}

// A server that ends in the middle of a response does not look like the end of it.
func TestForwardCutOff(t *testing.T) {
	w := newWorld(t, nil)
	for response, want := range map[string]error{
		"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc":               io.ErrUnexpectedEOF,
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc": io.ErrUnexpectedEOF,
		"HTTP/1.1 200 OK\r\n\r\nabc":                                    nil,
	} {
		at := listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
			defer c.Close()
			http.ReadRequest(bufio.NewReader(c))
			io.WriteString(c, response)
		})
		res, err := w.client().Get("http://" + at.String())
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		if string(b) != "abc" || !errors.Is(err, want) {
			t.Errorf("%q: %q, %v, want %v", response, b, err, want)
		}
	}
	at := listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
		defer c.Close()
		http.ReadRequest(bufio.NewReader(c))
	})
	res := w.roundTrip(fmt.Sprintf("POST http://%v/ HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", at))
	if res.StatusCode != 502 || res.Header.Get("Proxy-Status") != "quicvpn; error=connection_terminated" {
		t.Errorf("no response: %d, %v", res.StatusCode, res.Header)
	}
}

// A refusal that is known with the first Read alone has its status all the same.
func TestForwardEarly(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	go io.Copy(io.Discard, far)
	ready := make(chan struct{})
	close(ready)
	w := newWorld(t, func(w *world) {
		w.Dial = func(context.Context, string, string) (net.Conn, error) {
			return &lazy{Conn: near, ready: ready, err: ConnectionRefused}, nil
		}
	})
	res := w.roundTrip("GET http://app.test/ HTTP/1.1\r\nHost: app.test\r\n\r\n")
	if res.StatusCode != 502 || res.Header.Get("Proxy-Status") != "quicvpn; error=connection_refused" {
		t.Errorf("%d, %v", res.StatusCode, res.Header)
	}
}
