package socks5

import (
	"bytes"
	"strconv"
	"strings"
)

// heads watches the heads of HTTP/1 requests as they pass to net/http, for those
// whose framing is ambiguous: with both Transfer-Encoding and Content-Length, or with
// Transfer-Encoding in HTTP/1.0. net/http settles on one and drops the other without
// a trace; RFC 9112 sections 6.1 and 6.3 have them for what they are, an attempt to
// smuggle a request past somebody, and the connection closed. The zero value is
// ready.
//
// It need not know where a chunked body ends: a connection with one carries no
// further request (see service.request).
type heads struct {
	line     []byte // so far, without its end; cut off at maxHeadLine
	started  bool   // the request line was read
	length   string // of the Content-Length field
	lengths  int    // of those fields
	transfer bool   // there is a Transfer-Encoding field
	old      bool   // HTTP/1.0
	body     uint64 // bytes of the body still to come
	raw      bool   // the rest is none of its business
	refusal  []byte // what net/http reads in place of the rest
}

// maxHeadLine is enough for the lines that matter.
const maxHeadLine = 256

// refusal ends a head in a way that net/http answers with 400 itself, whatever
// stands before it, and closes the connection for.
const refusal = "Content-Length: ambiguous\r\n\r\n"

func (h *heads) refused() bool { return h.refusal != nil }

// read returns the end of a refused head.
func (h *heads) read(b []byte) (int, error) {
	n := copy(b, h.refusal)
	if h.refusal = h.refusal[n:]; len(h.refusal) == 0 {
		h.refusal = []byte("\r\n") // net/http has seen enough; never nil again
	}
	return n, nil
}

// pass takes note of bytes on their way and returns how many of them may pass.
func (h *heads) pass(b []byte) int {
	for i := 0; i < len(b); {
		switch {
		case h.raw:
			return len(b)
		case h.body > 0:
			n := min(h.body, uint64(len(b)-i))
			h.body -= n
			i += int(n)
		default:
			rest, _, whole := bytes.Cut(b[i:], []byte("\n"))
			h.line = append(h.line, rest[:min(len(rest), maxHeadLine-len(h.line))]...)
			if !whole {
				return len(b)
			}
			if !h.endLine() {
				h.refusal = []byte(refusal)
				return i // without the end of the last line, which was empty
			}
			i += len(rest) + 1
		}
	}
	return len(b)
}

// endLine judges a line, and returns false for one that ends a bad head.
func (h *heads) endLine() bool {
	line := strings.TrimSuffix(string(h.line), "\r")
	h.line = h.line[:0]
	switch {
	case line == "" && h.started:
		return h.endHead()
	case line == "":
		return true // an empty line before a request
	case !h.started:
		h.started = true
		h.old = strings.HasSuffix(line, " HTTP/1.0")
		return true
	}
	name, value, _ := strings.Cut(line, ":")
	switch {
	case strings.EqualFold(name, "Content-Length"):
		h.length = strings.Trim(value, " \t")
		h.lengths++
	case strings.EqualFold(name, "Transfer-Encoding"):
		h.transfer = true
	}
	return true
}

// endHead judges a head.
func (h *heads) endHead() bool {
	body, err := strconv.ParseUint(h.length, 10, 63)
	if h.transfer && (h.lengths > 0 || h.old) || h.lengths > 0 && err != nil {
		return false
	}
	*h = heads{line: h.line, body: body, raw: h.transfer}
	return true
}
