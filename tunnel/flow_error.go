package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"

	"github.com/dunglas/httpsfv"
)

// A DialError is why a gateway, or another proxy, has not opened a flow. It unwraps
// to the error that a dial without a proxy would have had.
type DialError struct {
	// Status is the HTTP status.
	Status int
	// Code is the type of error of RFC 9209, section 2.3: "connection_refused" and
	// so on; empty if the proxy did not tell.
	Code string
	// Text says more, for people; it may be empty.
	Text string
}

func (e *DialError) Error() string {
	what := strings.ReplaceAll(e.Code, "_", " ")
	if what == "" {
		what = fmt.Sprintf("status %d", e.Status)
	}
	if e.Text == "" {
		return "the gateway cannot connect: " + what
	}
	return "the gateway cannot connect: " + what + ": " + e.Text
}

// Types of errors of RFC 9209, section 2.3.
const (
	codeRefused    = "connection_refused"
	codeTimeout    = "connection_timeout"
	codeLimit      = "connection_limit_reached"
	codeUnroutable = "destination_ip_unroutable"
	codeNoHost     = "destination_unavailable"
	codeProhibited = "destination_ip_prohibited"
	codeDenied     = "http_request_denied"
	codeBadRequest = "http_request_error"
	codeDNS        = "dns_error"
	codeDNSTimeout = "dns_timeout"
	codeInternal   = "proxy_internal_error"
)

// notFound is what Text says of a name that does not exist.
const notFound = "no such host"

// Unwrap tells by the code, or, of proxies that send none, by the status.
func (e *DialError) Unwrap() error {
	switch e.Code {
	case codeRefused:
		return syscall.ECONNREFUSED
	case codeTimeout:
		return syscall.ETIMEDOUT
	case codeUnroutable:
		return syscall.ENETUNREACH
	case codeNoHost:
		return syscall.EHOSTUNREACH
	case codeProhibited, codeDenied:
		return syscall.EACCES
	case codeDNS:
		return &net.DNSError{Err: e.Text, IsNotFound: e.Text == notFound}
	case codeDNSTimeout:
		return &net.DNSError{Err: e.Text, IsTimeout: true}
	case "":
	default:
		return nil
	}
	switch e.Status {
	case http.StatusBadGateway:
		return syscall.ECONNREFUSED
	case http.StatusGatewayTimeout:
		return syscall.ETIMEDOUT
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired:
		return syscall.EACCES
	}
	return nil
}

// dialError makes of an error of a dial what a client is told. What is not known
// stays with us: it may name what is the gateway's own.
func dialError(err error) *DialError {
	if e, ok := errors.AsType[*DialError](err); ok {
		return e
	}
	dns, isDNS := errors.AsType[*net.DNSError](err)
	timeout, isTimeout := errors.AsType[net.Error](err)
	switch {
	case isDNS && dns.IsNotFound:
		return &DialError{http.StatusBadGateway, codeDNS, notFound}
	case isDNS && dns.IsTimeout:
		return &DialError{http.StatusGatewayTimeout, codeDNSTimeout, "no name server answers"}
	case isDNS:
		return &DialError{http.StatusBadGateway, codeDNS, "the name servers fail"}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &DialError{http.StatusBadGateway, codeRefused, ""}
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EHOSTDOWN):
		return &DialError{http.StatusBadGateway, codeNoHost, "no way to the host"}
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EAFNOSUPPORT):
		return &DialError{http.StatusBadGateway, codeUnroutable, "no way to the network"}
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return &DialError{http.StatusForbidden, codeProhibited, ""}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), isTimeout && timeout.Timeout():
		return &DialError{http.StatusGatewayTimeout, codeTimeout, ""}
	}
	return &DialError{http.StatusInternalServerError, codeInternal, ""}
}

// proxyName is who reports an error (RFC 9209, section 2).
const proxyName = "quicvpn"

// refuseFlow answers a request for a flow that cannot be opened.
func refuseFlow(w http.ResponseWriter, e *DialError) {
	item := httpsfv.NewItem(httpsfv.Token(proxyName))
	item.Params.Add("error", httpsfv.Token(e.Code))
	if e.Text != "" {
		item.Params.Add("details", e.Text)
	}
	if status, err := httpsfv.Marshal(httpsfv.List{item}); err == nil { // not where Text is no ASCII
		w.Header().Set("Proxy-Status", status)
	}
	w.WriteHeader(e.Status)
}

// answerError reads an answer that is no success.
func answerError(r *http.Response) *DialError {
	e := &DialError{Status: r.StatusCode}
	list, err := httpsfv.UnmarshalList(r.Header.Values("Proxy-Status"))
	if err != nil {
		return e // it stands for nothing (RFC 9209, section 2)
	}
	for _, member := range list { // the one next to the destination first
		item, ok := member.(httpsfv.Item)
		if !ok {
			continue
		}
		if code, ok := item.Params.Get("error"); ok {
			if token, ok := code.(httpsfv.Token); ok {
				e.Code = string(token)
			}
			if details, ok := item.Params.Get("details"); ok {
				if text, ok := details.(string); ok {
					e.Text = printable(clip(text))
				}
			}
			return e
		}
	}
	return e
}
