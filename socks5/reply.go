package socks5

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
)

// A Reply is how a request ended (RFC 1928 section 6). As an error, wrapped or not,
// it lets Dial and Associate say which reply the client gets. Of other errors the
// usual ones are known: errors of the system, timeouts, *net.DNSError. HTTP clients
// get the status and the Proxy-Status (RFC 9209) that mean the same.
type Reply byte

const (
	succeeded               Reply = iota
	GeneralFailure                // anything else
	NotAllowed                    // by rules of this side or the other
	NetworkUnreachable            // no way to the network
	HostUnreachable               // no way to the host, or its name does not exist
	ConnectionRefused             // the host does not listen there
	TTLExpired                    // no answer in time, as other servers have it too
	CommandNotSupported           // not CONNECT, nor UDP ASSOCIATE where it is on
	AddressTypeNotSupported       // an address of no known type
)

func (r Reply) Error() string {
	texts := [...]string{"succeeded", "general failure", "not allowed by the rules", "network unreachable",
		"host unreachable", "connection refused", "no answer in time", "command not supported", "type of address not supported"}
	if int(r) < len(texts) {
		return texts[r]
	}
	return fmt.Sprintf("reply %d", byte(r))
}

// replyTo returns the reply that tells of an error.
func replyTo(err error) Reply {
	var reply Reply
	var dns *net.DNSError
	var timeout net.Error
	switch {
	case errors.As(err, &reply) && reply != succeeded:
		return reply
	case errors.As(err, &dns) && dns.IsNotFound:
		return HostUnreachable
	case is(err, syscall.ECONNREFUSED):
		return ConnectionRefused
	case is(err, syscall.EHOSTUNREACH, syscall.EHOSTDOWN):
		return HostUnreachable
	case is(err, syscall.ENETUNREACH, syscall.ENETDOWN, syscall.EADDRNOTAVAIL):
		return NetworkUnreachable // the last one is a host without the IP version
	case is(err, syscall.EACCES, syscall.EPERM):
		return NotAllowed
	case is(err, syscall.EAFNOSUPPORT):
		return AddressTypeNotSupported
	case is(err, context.DeadlineExceeded, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return TTLExpired // ETIMEDOUT too
	}
	return GeneralFailure
}

func is[E error](err error, targets ...E) bool {
	for _, t := range targets {
		if errors.Is(err, t) {
			return true
		}
	}
	return false
}

// statusTo returns what tells of an error in HTTP: the status, and the type of error
// for Proxy-Status (RFC 9209 section 2.3).
func statusTo(err error) (status int, proxyError string) {
	var dns *net.DNSError
	isDNS := errors.As(err, &dns)
	switch replyTo(err) {
	case NotAllowed:
		return http.StatusForbidden, "http_request_denied"
	case ConnectionRefused:
		return http.StatusBadGateway, "connection_refused"
	case TTLExpired:
		if isDNS {
			return http.StatusGatewayTimeout, "dns_timeout"
		}
		return http.StatusGatewayTimeout, "connection_timeout"
	case NetworkUnreachable, HostUnreachable, AddressTypeNotSupported:
		if isDNS {
			return http.StatusBadGateway, "dns_error"
		}
		return http.StatusBadGateway, "destination_ip_unroutable"
	}
	switch {
	case isDNS:
		return http.StatusBadGateway, "dns_error"
	case is(err, io.EOF, io.ErrUnexpectedEOF), is(err, syscall.ECONNRESET, syscall.EPIPE):
		return http.StatusBadGateway, "connection_terminated"
	}
	return http.StatusServiceUnavailable, "destination_unavailable"
}
