package socks5

import (
	"bufio"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// roundTrip sends a request as it stands, and reads the response whole.
func (w *world) roundTrip(request string) *http.Response {
	w.t.Helper()
	c := w.connect()
	defer c.Close()
	send(w.t, c, []byte(request))
	return readResponse(w.t, bufio.NewReader(c), request)
}

func readResponse(t testing.TB, r *bufio.Reader, request string) *http.Response {
	t.Helper()
	method, _, _ := strings.Cut(request, " ")
	res, err := http.ReadResponse(r, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("%.200q: %v", request, err)
	}
	if method == http.MethodConnect && res.StatusCode == http.StatusOK {
		return res // what follows is the tunnel's
	}
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("%.200q: %v", request, err)
	}
	res.Body = io.NopCloser(strings.NewReader(string(b)))
	return res
}

// origin starts a web server.
func origin(t *testing.T, h http.HandlerFunc) Addr {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return addrFrom(addrPort(s.Listener.Addr()))
}

// client is net/http's, with the proxy.
func (w *world) client() *http.Client {
	tr := &http.Transport{
		Proxy:           http.ProxyURL(&url.URL{Scheme: "http", Host: w.addr}),
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func TestTunnelTLS(t *testing.T) {
	w := newWorld(t, nil)
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "private") }))
	defer s.Close()
	client := w.client()
	defer client.CloseIdleConnections()
	res, err := client.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	expect(t, res.Body, []byte("private"))
	if want := strings.TrimPrefix(s.URL, "https://"); w.lastDialed() != want {
		t.Errorf("dialed %s, want %s", w.lastDialed(), want)
	}
}

// What follows a CONNECT without waiting is the tunnel's.
func TestTunnelOptimistic(t *testing.T) {
	w := newWorld(t, nil)
	to := listen(t, "127.0.0.1:0", echo)
	for _, data := range []string{"\x16\x03\x01 hello", "a\r\n\r\nb", "GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 9000)} {
		c := w.connect()
		send(t, c, fmt.Appendf(nil, "CONNECT %v HTTP/1.0\r\n\r\n%s", to, data))
		expect(t, c, []byte("HTTP/1.1 200 Connection established\r\n\r\n"+data))
		c.CloseWrite()
		expectEOF(t, c)
	}
}

func TestBadRequests(t *testing.T) {
	w := newWorld(t, nil)
	at := origin(t, func(http.ResponseWriter, *http.Request) { t.Error("a bad request was forwarded") })
	get := fmt.Sprintf("POST http://%v/ HTTP/1.1\r\nHost: x\r\n", at)
	for name, tt := range map[string]struct {
		request string
		want    int
	}{
		"origin form":            {"GET / HTTP/1.1\r\nHost: app.test\r\n\r\n", 400},
		"asterisk form":          {"OPTIONS * HTTP/1.1\r\nHost: app.test\r\n\r\n", 400},
		"https":                  {"GET https://app.test/ HTTP/1.1\r\nHost: app.test\r\n\r\n", 400},
		"ftp":                    {"GET ftp://app.test/ HTTP/1.1\r\nHost: app.test\r\n\r\n", 400},
		"no host":                {"GET http:/// HTTP/1.1\r\nHost: app.test\r\n\r\n", 400},
		"port 0":                 {"GET http://app.test:0/ HTTP/1.1\r\nHost: app.test\r\n\r\n", 400},
		"odd host":               {"GET http://app_(1).test/ HTTP/1.1\r\nHost: app.test\r\n\r\n", 400},
		"HTTP/2":                 {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400},
		"no such version":        {fmt.Sprintf("GET http://%v/ HTTP/3.0\r\nHost: x\r\n\r\n", at), 505},
		"CONNECT without port":   {"CONNECT app.test HTTP/1.1\r\n\r\n", 400},
		"CONNECT port 0":         {"CONNECT app.test:0 HTTP/1.1\r\n\r\n", 400},
		"CONNECT path":           {"CONNECT /app.test:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400},
		"CONNECT URL":            {"CONNECT http://app.test:80/ HTTP/1.1\r\nHost: x\r\n\r\n", 400},
		"CONNECT user":           {"CONNECT me@app.test:80 HTTP/1.1\r\n\r\n", 400},
		"CONNECT zone":           {"CONNECT [fe80::1%25eth0]:80 HTTP/1.1\r\n\r\n", 400},
		"CONNECT with content":   {"CONNECT app.test:80 HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 400},
		"CONNECT chunked":        {"CONNECT app.test:80 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
		"two lengths":            {get + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400},
		"list of lengths":        {get + "Content-Length: 1, 1\r\n\r\nxx", 400},
		"signed length":          {get + "Content-Length: +1\r\n\r\nx", 400},
		"length and chunked":     {get + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
		"chunked and length":     {get + "transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 400},
		"folded length":          {get + "Content-Length:\r\n 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
		"padded length":          {get + "Content-Length:" + strings.Repeat(" ", 300) + "5\r\n\r\nhello", 400},
		"chunked twice":          {get + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501},
		"unknown coding":         {get + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501},
		"coding in HTTP/1.0":     {fmt.Sprintf("POST http://%v/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", at), 400},
		"space before the colon": {get + "Content-Length : 1\r\n\r\nx", 400},
		"line end in a field":    {get + "X: a\rb\r\n\r\n", 400},
		"zero byte in a field":   {get + "X: a\x00b\r\n\r\n", 400},
		"too long a header":      {get + "X: " + strings.Repeat("x", 2*maxHeader) + "\r\n\r\n", 431},
	} {
		if got := w.roundTrip(tt.request); got.StatusCode != tt.want {
			t.Errorf("%s: status %d, want %d", name, got.StatusCode, tt.want)
		}
	}
	if got := w.lastDialed(); got != "" {
		t.Errorf("dialed %s", got)
	}
}

// What a client sends ahead of the response to CONNECT arrives whole, or the tunnel is
// none.
func TestTunnelAmbiguous(t *testing.T) {
	w := newWorld(t, nil)
	to := listen(t, "127.0.0.1:0", echo)
	c := w.connect()
	send(t, c, fmt.Appendf(nil, "CONNECT %v HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", to))
	if b, _ := io.ReadAll(c); len(b) > 0 {
		t.Errorf("read %q", b)
	}
}

// A smuggled request is not served, wherever it stands on a connection.
func TestSmuggling(t *testing.T) {
	w := newWorld(t, nil)
	var paths []string
	at := origin(t, func(_ http.ResponseWriter, r *http.Request) { paths = append(paths, r.URL.Path) })
	request := func(path, fields, body string) string {
		return fmt.Sprintf("POST http://%v%s HTTP/1.1\r\nHost: x\r\n%s\r\n%s", at, path, fields, body)
	}
	smuggled := request("/smuggled", "", "")
	c := w.connect()
	send(t, c, []byte(request("/one", "Content-Length: 5\r\n", "hello")+
		request("/two", "", "")+
		request("/three", fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n", 5+len(smuggled)), "0\r\n\r\n"+smuggled)))
	r := bufio.NewReader(c)
	var status []int
	for range 3 {
		status = append(status, readResponse(t, r, "POST").StatusCode)
	}
	if diff := cmp.Diff([]int{200, 200, 400}, status); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	io.Copy(io.Discard, r)
	// A chunked request is the last of its connection.
	c = w.connect()
	send(t, c, []byte(request("/four", "Transfer-Encoding: chunked\r\n", "1\r\nx\r\n0\r\n\r\n")+smuggled))
	r = bufio.NewReader(c)
	if res := readResponse(t, r, "POST"); res.StatusCode != 200 || !res.Close {
		t.Errorf("chunked: %v", res)
	}
	io.Copy(io.Discard, r)
	if diff := cmp.Diff([]string{"/one", "/two", "/four"}, paths); diff != "" {
		t.Errorf("served (-want +got):\n%s", diff)
	}
}

func TestProxyAuthorization(t *testing.T) {
	w := newWorld(t, func(w *world) { w.Authenticate = Credentials("user", "se:cret") })
	at := origin(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Proxy-Authorization") != "" {
			t.Error("credentials at the server")
		}
	})
	basic := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, tt := range []struct {
		field string
		ok    bool
	}{
		{"Basic " + basic("user:se:cret"), true},
		{"bAsIc  " + basic("user:se:cret"), true},
		{"", false},
		{"Basic " + basic("user:secret"), false},
		{"Basic " + basic("user"), false},
		{"Basic " + basic(":"), false},
		{"Basic !", false},
		{"Basic", false},
		{"Bearer " + basic("user:se:cret"), false},
	} {
		for _, line := range []string{"CONNECT %v HTTP/1.1\r\n", "GET http://%v/ HTTP/1.1\r\nHost: x\r\n"} {
			request := fmt.Sprintf(line, at)
			if tt.field != "" {
				request += "Proxy-Authorization: " + tt.field + "\r\n"
			}
			res := w.roundTrip(request + "\r\n")
			if ok := res.StatusCode == 200; ok != tt.ok {
				t.Errorf("%s with %q: status %d", line, tt.field, res.StatusCode)
			}
			if challenge := res.Header.Get("Proxy-Authenticate"); !tt.ok && (res.StatusCode != 407 || challenge != `Basic realm="quicvpn", charset="UTF-8"`) {
				t.Errorf("%s with %q: status %d, %q", line, tt.field, res.StatusCode, challenge)
			}
		}
	}
	// A client that asks first stays on its connection.
	c := w.connect()
	r := bufio.NewReader(c)
	send(t, c, fmt.Appendf(nil, "CONNECT %v HTTP/1.1\r\n\r\n", at))
	readResponse(t, r, "CONNECT")
	send(t, c, fmt.Appendf(nil, "CONNECT %v HTTP/1.1\r\nProxy-Authorization: Basic %s\r\n\r\n", at, basic("user:se:cret")))
	if res := readResponse(t, r, "CONNECT"); res.StatusCode != 200 {
		t.Errorf("the second time: %d", res.StatusCode)
	}
	w.logged("refused a client without the right user and password")
	for _, secret := range []string{"cret", basic("user:se:cret"), "user:"} {
		if strings.Contains(w.log.String(), secret) {
			t.Errorf("%q is in the log", secret)
		}
	}
}

func TestForeignProtocols(t *testing.T) {
	for sent, want := range map[string]struct{ answer, hint string }{
		"\x04\x01\x00\x50\x01\x02\x03\x04user\x00": {"\x00\x5b\x00\x00\x00\x00\x00\x00", "SOCKS4"},
		"\x16\x03\x01\x00\xff":                     {"", "TLS"},
		"\x00\x00":                                 {"", "neither SOCKS5 nor HTTP"},
	} {
		w := newWorld(t, nil)
		for range 3 { // of which one is logged
			c := w.connect()
			send(t, c, []byte(sent))
			expect(t, c, []byte(want.answer))
			expectEOF(t, c)
		}
		w.logged(want.hint)
		if n := strings.Count(w.log.String(), "level=WARN"); n != 1 {
			t.Errorf("%d warnings", n)
		}
	}
}
