package socks5

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"net/textproto"
	"strings"
	"testing"
)

// checked reads as net/http does: what passes heads.
type checked struct {
	heads heads
	r     io.Reader
	chunk int
}

func (c *checked) Read(b []byte) (int, error) {
	if c.heads.refused() {
		return c.heads.read(b)
	}
	n, err := c.r.Read(b[:min(len(b), c.chunk)])
	return c.heads.pass(b[:n]), err
}

// ambiguous judges a request's head apart from heads, by net/http's own reader of
// fields.
func ambiguous(raw []byte) bool {
	r := textproto.NewReader(bufio.NewReader(bytes.NewReader(raw)))
	line, _ := r.ReadLine()
	fields, _ := r.ReadMIMEHeader()
	_, transfer := fields["Transfer-Encoding"]
	_, length := fields["Content-Length"]
	return transfer && (length || strings.HasSuffix(line, " HTTP/1.0"))
}

// Requests that net/http takes pass unchanged, but for those with an ambiguous
// framing: these it refuses. It goes on until a chunked body, the last of a
// connection.
func FuzzHeads(f *testing.F) {
	for _, seed := range []string{
		"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\nGET http://b/ HTTP/1.1\r\nHost: b\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcPOST / HTTP/1.1\nHost: a\nContent-Length: 1\nTransfer-Encoding: chunked\n\n0\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
		"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\nContent-Length:\r\n 2\r\n\r\nab",
		"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nabGET / HTTP/1.1\r\n\r\n",
		"CONNECT a:1 HTTP/1.1\r\n\r\nanything\r\n\r\n",
	} {
		f.Add([]byte(seed), byte(7))
	}
	f.Fuzz(func(t *testing.T, raw []byte, chunk byte) {
		plainIn := bytes.NewReader(raw)
		plain := bufio.NewReader(plainIn)
		watched := bufio.NewReader(&checked{r: bytes.NewReader(raw), chunk: int(chunk) + 1})
		for {
			head := raw[len(raw)-plainIn.Len()-plain.Buffered():]
			want, err := http.ReadRequest(plain)
			got, errGot := http.ReadRequest(watched)
			switch {
			case err != nil && errGot == nil:
				t.Fatalf("net/http refuses %q: %v; heads made it pass", head, err)
			case err != nil:
				return
			case ambiguous(head) && errGot == nil:
				t.Fatalf("passed: %q", head)
			case ambiguous(head):
				return
			case errGot != nil && want.Header["Content-Length"] != nil:
				return // a long or folded line, which is refused by right
			case errGot != nil:
				t.Fatalf("%q does not pass: %v", head, errGot)
			}
			a, errA := io.ReadAll(want.Body)
			b, errB := io.ReadAll(got.Body)
			if want.RequestURI != got.RequestURI || !bytes.Equal(a, b) || (errA == nil) != (errB == nil) {
				t.Fatalf("%q: %s %q %v, was %s %q %v", head, got.RequestURI, b, errB, want.RequestURI, a, errA)
			}
			if errA != nil || len(want.TransferEncoding) > 0 {
				return
			}
		}
	})
}
