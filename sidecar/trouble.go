package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A trouble is why an attempt failed, said for people.
type trouble struct {
	weight weight
	text   string
	cause  error
}

func (t *trouble) Error() string { return t.text }
func (t *trouble) Unwrap() error { return t.cause }

// A weight orders troubles: an answer that was no says more than no answer, and
// no answer more than no way.
type weight int

const (
	noWay weight = iota
	noName
	noAnswer
	answered
)

// explain puts an attempt's error into words. Without an address it concerns
// all that were tried.
func (c *connector) explain(a netip.Addr, err error) error {
	where := c.address()
	if a.IsValid() && a.String() != c.host {
		where += " (" + a.String() + ")"
	}
	t := &trouble{weight: answered, text: err.Error(), cause: err}
	var refused *tunnel.RefusedError
	// A timeout may carry the reason for it, and comes last.
	switch {
	case errors.As(err, &refused):
	case errors.Is(err, tunnel.ErrPin), errors.Is(err, tunnel.ErrNotYetValid), errors.Is(err, tunnel.ErrExpired):
	case errors.Is(err, unix.ECONNREFUSED):
		t.text = fmt.Sprintf("nothing listens at %s by UDP: is the gateway running there?", where)
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EADDRNOTAVAIL),
		errors.Is(err, unix.ENETDOWN), errors.Is(err, unix.EAFNOSUPPORT):
		t.weight = noWay
		t.text = fmt.Sprintf("no way to %s from here: %v: is the network up?", where, errno(err))
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		t.weight = noWay
		t.text = fmt.Sprintf("a firewall in this namespace refuses packets to %s: %v", where, errno(err))
	case timedOut(err):
		t.weight = noAnswer
		t.text = fmt.Sprintf("no answer from %s: UDP to it seems blocked on the way (a firewall, a security group, a port that is not forwarded), or the gateway is down", where)
	}
	return t
}

// unresolved puts the error of a lookup into words.
func (c *connector) unresolved(err error) error {
	return &trouble{weight: noName, cause: err,
		text: fmt.Sprintf("the gateway's name %s cannot be resolved: %v: %s", c.host, withoutPorts(err), c.hint)}
}

// withoutPorts shortens the error of a lookup to what is the same each time.
func withoutPorts(err error) string {
	var dns *net.DNSError
	if errors.As(err, &dns) {
		switch {
		case dns.IsNotFound:
			return "there is no such name"
		case dns.IsTimeout:
			return "no answer from the name servers"
		}
	}
	return err.Error()
}

// worst returns the error that says most.
func worst(errs []error) (found error) {
	for _, err := range errs {
		if found == nil || heavier(err, found) {
			found = err
		}
	}
	return found
}

// heavier reports that a says more than b, which is an error.
func heavier(a, b error) bool { return b != nil && weightOf(a) > weightOf(b) }

// weightOf is below all weights for what was not explained.
func weightOf(err error) weight {
	var t *trouble
	if errors.As(err, &t) {
		return t.weight
	}
	return noWay - 1
}

// timedOut reports that nobody answered. The QUIC library's idle and handshake
// timeouts say so too.
func timedOut(err error) bool {
	var t net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &t) && t.Timeout()
}

// errno returns the system's part of an error.
func errno(err error) error {
	var e unix.Errno
	if errors.As(err, &e) {
		return e
	}
	return err
}

// repeated holds back what is said again and again. The zero value is ready.
type repeated struct {
	said map[string]*saying
}

type saying struct {
	times int
	last  time.Time // when it was said, not held back
}

// say counts text, and reports whether it should be said: the first time, every
// tenth time and once a minute. Numbers in it do not make it another text.
func (r *repeated) say(text string, now time.Time) (times int, say bool) {
	text = strings.Map(func(c rune) rune {
		if c >= '0' && c <= '9' {
			return -1
		}
		return c
	}, text)
	if r.said == nil || len(r.said) >= 16 {
		r.said = make(map[string]*saying)
	}
	s := r.said[text]
	if s == nil {
		s = new(saying)
		r.said[text] = s
	}
	s.times++
	if s.times > 1 && s.times%10 != 0 && now.Sub(s.last) < time.Minute {
		return s.times, false
	}
	s.last = now
	return s.times, true
}
