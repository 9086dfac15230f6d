package socks5

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// A talk is what a client sends, and what it is answered.
type talk struct {
	io.Reader
	answer bytes.Buffer
}

func (c *talk) Write(b []byte) (int, error) { return c.answer.Write(b) }

func TestNegotiate(t *testing.T) {
	const toIP = "\x05\x01\x00\x01\x01\x02\x03\x04\x00\x50"
	connectIP := request{commandConnect, Addr{IP: netip.MustParseAddr("1.2.3.4"), Port: 80}}
	port80 := request{commandConnect, Addr{Port: 80}}
	auth := Credentials("user", "secret")
	for _, tt := range []struct {
		name, sent, answer string
		auth               func(user, password string) bool
		want               request
		err                error
	}{
		{name: "IPv4", sent: "\x01\x00" + toIP, answer: "\x05\x00", want: connectIP},
		{name: "IPv6", sent: "\x01\x00\x05\x01\x00\x04" + strings.Repeat("\x20", 16) + "\x01\xbb", answer: "\x05\x00",
			want: request{commandConnect, Addr{IP: netip.MustParseAddr("2020:2020:2020:2020:2020:2020:2020:2020"), Port: 443}}},
		{name: "IPv4 as IPv6", sent: "\x01\x00\x05\x01\x00\x04" + strings.Repeat("\x00", 10) + "\xff\xff\x01\x02\x03\x04\x00\x50", answer: "\x05\x00", want: connectIP},
		{name: "name", sent: "\x01\x00\x05\x01\x00\x03\x0bexample.com\x00\x50", answer: "\x05\x00",
			want: request{commandConnect, Addr{Name: "example.com", Port: 80}}},
		{name: "IPv4 in words", sent: "\x01\x00\x05\x01\x00\x03\x071.2.3.4\x00\x50", answer: "\x05\x00", want: connectIP},
		{name: "associate", sent: "\x01\x00\x05\x03\x00\x01\x00\x00\x00\x00\x00\x00", answer: "\x05\x00",
			want: request{commandAssociate, Addr{IP: netip.IPv4Unspecified()}}},
		{name: "none among several", sent: "\x03\x01\x02\x00" + toIP, answer: "\x05\x00", want: connectIP},
		{name: "credentials though none are asked for", sent: "\x01\x02\x01\x01a\x01b" + toIP, answer: "\x05\x02\x01\x00", want: connectIP},
		{name: "right credentials", auth: auth, sent: "\x02\x00\x02\x01\x04user\x06secret" + toIP, answer: "\x05\x02\x01\x00", want: connectIP},
		{name: "wrong password", auth: auth, sent: "\x01\x02\x01\x04user\x06Secret" + toIP, answer: "\x05\x02\x01\x01", err: errDenied},
		{name: "wrong user", auth: auth, sent: "\x01\x02\x01\x04User\x06secret" + toIP, answer: "\x05\x02\x01\x01", err: errDenied},
		{name: "empty credentials", auth: auth, sent: "\x01\x02\x01\x00\x00" + toIP, answer: "\x05\x02\x01\x01", err: errDenied},
		{name: "no credentials", auth: auth, sent: "\x01\x00" + toIP, answer: "\x05\xff", err: errDenied},
		{name: "GSSAPI alone", sent: "\x01\x01", answer: "\x05\xff", err: errDenied},
		{name: "no method", sent: "\x00", answer: "\x05\xff", err: errDenied},
		{name: "type of address", sent: "\x01\x00\x05\x01\x00\x02\x00\x00", answer: "\x05\x00", want: request{command: commandConnect}, err: AddressTypeNotSupported},
		{name: "empty name", sent: "\x01\x00\x05\x01\x00\x03\x00\x00\x50", answer: "\x05\x00", want: port80, err: HostUnreachable},
		{name: "name with a port", sent: "\x01\x00\x05\x01\x00\x03\x03a:1\x00\x50", answer: "\x05\x00", want: port80, err: HostUnreachable},
		{name: "name with a line end", sent: "\x01\x00\x05\x01\x00\x03\x03a\r\n\x00\x50", answer: "\x05\x00", want: port80, err: HostUnreachable},
		{name: "address with a zone", sent: "\x01\x00\x05\x01\x00\x03\x08fe80::%1\x00\x50", answer: "\x05\x00", want: port80, err: HostUnreachable},
		{name: "version of the request", sent: "\x01\x00\x04\x01\x00\x01\x01\x02\x03\x04\x00\x50", answer: "\x05\x00", err: errMalformed},
		{name: "version of the credentials", auth: auth, sent: "\x01\x02\x05\x04user\x06secret", answer: "\x05\x02", err: errMalformed},
		{name: "greeting cut off", sent: "\x02\x00", err: io.ErrUnexpectedEOF},
		{name: "no request", sent: "\x01\x00", answer: "\x05\x00", err: io.ErrUnexpectedEOF},
		{name: "request cut off", sent: "\x01\x00" + toIP[:9], answer: "\x05\x00", want: request{command: commandConnect}, err: io.ErrUnexpectedEOF},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := strings.NewReader(tt.sent)
			c := &talk{Reader: in}
			got, err := negotiate(c, tt.auth)
			if !errors.Is(err, tt.err) {
				t.Errorf("error %v, want %v", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(request{}), cmpopts.EquateComparable(Addr{})); diff != "" {
				t.Errorf("request (-want +got):\n%s", diff)
			}
			if got := c.answer.String(); got != tt.answer {
				t.Errorf("answered %q, want %q", got, tt.answer)
			}
			if err == nil && in.Len() > 0 {
				t.Errorf("%d bytes are left", in.Len())
			}
		})
	}
}

// What was sent in one go is answered as what comes byte by byte, and what stands
// behind the request is not touched.
func FuzzNegotiate(f *testing.F) {
	f.Add([]byte("\x01\x00\x05\x01\x00\x01\x01\x02\x03\x04\x00\x50GET /"))
	f.Add([]byte("\x02\x00\x02\x01\x04user\x06secret\x05\x01\x00\x03\x0bexample.com\x00\x50"))
	f.Add([]byte("\x01\x00\x05\x03\x00\x04" + strings.Repeat("\x20", 16) + "\x01\xbb"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		for _, auth := range []func(user, password string) bool{nil, Credentials("user", "secret")} {
			in := bytes.NewReader(sent)
			whole, slow := &talk{Reader: in}, &talk{Reader: iotest.OneByteReader(bytes.NewReader(sent))}
			req, err := negotiate(whole, auth)
			again, errAgain := negotiate(slow, auth)
			if req != again || (err == nil) != (errAgain == nil) || whole.answer.String() != slow.answer.String() {
				t.Fatalf("%+v, %v, %q; byte by byte %+v, %v, %q", req, err, whole.answer.String(), again, errAgain, slow.answer.String())
			}
			if err != nil {
				continue
			}
			if to, err := readAddr(bytes.NewReader(req.to.append(nil))); err != nil || to != req.to {
				t.Fatalf("%v is read back as %v, %v", req.to, to, err)
			}
			if to, err := parseAddr(req.to.String()); req.to.Port != 0 && (err != nil || to != req.to) {
				t.Fatalf("%v is parsed as %v, %v", req.to, to, err)
			}
			// The request's end is that of its port.
			port := []byte{byte(req.to.Port >> 8), byte(req.to.Port)}
			if head := sent[:len(sent)-in.Len()]; !bytes.HasSuffix(head, port) {
				t.Fatalf("the handshake %q does not end in %q", head, port)
			}
		}
	})
}

func TestParseAddr(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Addr
		ok   bool
	}{
		{"example.com:443", Addr{Name: "example.com", Port: 443}, true},
		{"_a-b.example.:1", Addr{Name: "_a-b.example.", Port: 1}, true},
		{"1.2.3.4:80", Addr{IP: netip.MustParseAddr("1.2.3.4"), Port: 80}, true},
		{"[::1]:80", Addr{IP: netip.IPv6Loopback(), Port: 80}, true},
		{"[::ffff:1.2.3.4]:80", Addr{IP: netip.MustParseAddr("1.2.3.4"), Port: 80}, true},
		{in: "example.com"}, {in: "example.com:"}, {in: "example.com:0"}, {in: "example.com:65536"}, {in: "example.com:+1"},
		{in: ":80"}, {in: "::1:80"}, {in: "[fe80::1%25eth0]:80"}, {in: "user@example.com:80"}, {in: "a b:80"}, {in: "é.example:80"},
		{in: strings.Repeat("a", 255) + ":80"},
	} {
		got, err := parseAddr(tt.in)
		if (err == nil) != tt.ok || tt.ok && got != tt.want {
			t.Errorf("%q: %v, %v, want %v, %t", tt.in, got, err, tt.want, tt.ok)
		}
	}
}

func TestCredentials(t *testing.T) {
	check := Credentials("user", "secret")
	for _, tt := range []struct {
		user, password string
		want           bool
	}{
		{"user", "secret", true}, {"user", "", false}, {"", "secret", false}, {"", "", false},
		{"users", "ecret", false}, {"user", "secret\x00", false}, {"secret", "user", false},
	} {
		if got := check(tt.user, tt.password); got != tt.want {
			t.Errorf("%q, %q: %t", tt.user, tt.password, got)
		}
	}
}
