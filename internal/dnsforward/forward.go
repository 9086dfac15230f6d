package dnsforward

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

const (
	// patience is how long a name server has before the next is asked as well,
	// or the same again if there is none.
	patience = 1250 * time.Millisecond
	// maxAttempts is also how many name servers of a list the C library asks.
	// All attempts together end before those who ask give up: Docker's resolver
	// after 4 seconds, the C library after 5.
	maxAttempts = 3
	timeLimit   = maxAttempts * patience

	// complaints is how often the log tells that no name server answers.
	complaints = time.Minute
)

// A Config says where a Forwarder's answers come from.
type Config struct {
	// Servers are the name servers; none means those of File.
	Servers []netip.AddrPort
	// File is a resolv.conf(5), which is read anew when it changes; empty means
	// /etc/resolv.conf.
	File string
	// Loops reports the addresses of name servers that would ask the forwarder
	// in turn, for ever. They are not asked. Nil means that there are none.
	Loops func(netip.Addr) bool
	// Dial connects to a name server by "udp" or "tcp"; nil means a net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Log is where the forwarder speaks; nil discards.
	Log *slog.Logger
}

// A Forwarder passes messages on. It is safe for concurrent use.
type Forwarder struct {
	cfg     Config
	servers servers

	// quiet is until when the log does not complain, in Unix nanoseconds.
	quiet atomic.Int64

	queries, refused, failed atomic.Uint64
}

// New returns a Forwarder. Of name servers given by name it accepts none that
// loops; those of a file are left out, because the file may change.
func New(cfg Config) (*Forwarder, error) {
	if cfg.Loops == nil {
		cfg.Loops = func(netip.Addr) bool { return false }
	}
	if cfg.Dial == nil {
		cfg.Dial = new(net.Dialer).DialContext
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	for _, s := range cfg.Servers {
		if err := check(s); err != nil {
			return nil, err
		}
		if cfg.Loops(s.Addr()) {
			return nil, fmt.Errorf("name server %s: clients have addresses there, and queries could go round for ever: name a server elsewhere", s)
		}
	}
	f := &Forwarder{cfg: cfg}
	f.servers.cfg = &f.cfg
	return f, nil
}

func check(s netip.AddrPort) error {
	if a := s.Addr(); !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || s.Port() == 0 {
		return fmt.Errorf("name server %s: not the address of one", s)
	}
	return nil
}

// Counters returns what became of queries, those that are not zero: how many
// there were, how many of them were refused, and how many found no answer.
func (f *Forwarder) Counters() map[string]uint64 {
	m := make(map[string]uint64)
	for name, c := range map[string]*atomic.Uint64{"queries": &f.queries, "refused": &f.refused, "failed": &f.failed} {
		if n := c.Load(); n > 0 {
			m[name] = n
		}
	}
	return m
}

// Exchange returns the answer to a query that came by "udp" or "tcp", which is
// also how it is passed on. What gets no answer from a name server gets one that
// says so. The answer is nil where none is due, because the message is not a
// query. Over UDP an answer is at most MaxUDP bytes.
func (f *Forwarder) Exchange(ctx context.Context, network string, query []byte) []byte {
	if !isQuery(query) {
		return nil
	}
	f.queries.Add(1)
	q, code := judge(query)
	if code != dns.RcodeSuccess {
		f.refused.Add(1)
		return reply(query, code)
	}
	answer, err := f.ask(ctx, network, query, q)
	if err != nil {
		f.failed.Add(1)
		f.complain(err)
		return reply(query, dns.RcodeServerFailure)
	}
	if network == "udp" {
		answer = truncate(answer, query)
	}
	return answer
}

type result struct {
	answer []byte
	err    error
}

// ask asks one name server after the other. One that is only slow may still
// answer when the next has been asked: the first good answer counts. Without one,
// a bad one is better than none.
//
// It begins with the first of the list every time. To remember who did not answer
// would let a client who asks for names of dead zones turn the others away from a
// server that alone knows the names of the house.
func (f *Forwarder) ask(ctx context.Context, network string, query []byte, q question) ([]byte, error) {
	list := f.servers.list()
	if len(list) == 0 {
		return nil, errors.New("none is named")
	}
	ctx, cancel := context.WithTimeout(ctx, timeLimit)
	results := make(chan result, maxAttempts)
	asked, open := 0, 0
	var attempts sync.WaitGroup
	defer func() {
		cancel()
		attempts.Wait()
	}()
	next := func() {
		server := list[asked%len(list)]
		asked++
		open++
		attempts.Go(func() {
			answer, err := f.askOne(ctx, network, server, query, q)
			results <- result{answer, err}
		})
	}
	next()
	tick := time.NewTicker(patience)
	defer tick.Stop()
	var bad result
	for {
		select {
		case <-tick.C:
			if asked < maxAttempts {
				next()
			}
			continue
		case r := <-results:
			open--
			if r.err == nil && !isBad(r.answer) {
				return r.answer, nil
			}
			if bad.answer == nil {
				bad = r
			}
		}
		if asked < min(len(list), maxAttempts) {
			next()
			tick.Reset(patience)
		} else if open == 0 {
			return bad.answer, bad.err
		}
	}
}

// complain tells in the log that no name server answers, now and then: there is
// always a name somewhere that nobody answers for.
func (f *Forwarder) complain(err error) {
	now := time.Now()
	until := f.quiet.Load()
	if now.UnixNano() < until || !f.quiet.CompareAndSwap(until, now.Add(complaints).UnixNano()) {
		return
	}
	f.cfg.Log.Warn("no name server answers a query of a client", "servers", f.servers.list(), "error", err)
}
