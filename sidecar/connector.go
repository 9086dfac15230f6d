package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/tunnel"
)

const (
	// attemptTimeout ends an attempt to open a session; a satellite's handshake
	// fits, with losses.
	attemptTimeout = 10 * time.Second
	// silence is how long an answer may be owed before the session is held for
	// dead; on long paths it is four round trips.
	silence = 1500 * time.Millisecond
	// glance is how often a session is looked at.
	glance = 250 * time.Millisecond
	// settled is how long a session lives that shows that nothing is wrong with
	// connecting: after it the next attempt starts at once.
	settled = 10 * time.Second
	// probing is how long a new session is given to find out what its path carries.
	probing = 3 * time.Second
)

// A connector keeps a session to the gateway: it opens one, watches it, and
// opens the next one when it ends or falls silent, until its context ends.
//
//  1. run: connect, adopt, watch, over and over
//  2. connect: rounds of attempts with a back-off between them
//  3. round: resolve the name, dial every address, the first session wins
//  4. watch: until the session has ended, or another took its place
type connector struct {
	host string // a name or an address
	port uint16
	hint string // what to do where the name cannot be resolved

	dial   func(ctx context.Context, gateway netip.AddrPort) (session, error)
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	// check refuses a session that cannot be used.
	check func(session) error
	// allow is called with all the addresses that may be dialled from now on,
	// before they are.
	allow func(gateways []netip.AddrPort)
	// adopt makes a session the one in use and returns the sink for what it
	// receives; refresh is called when its MTU or peers have changed, drop when it
	// has ended.
	adopt   func(session) tunnel.Sink
	refresh func(session)
	drop    func(session)
	// fail is called with what is wrong, in words for people, and with nil when
	// it has passed without another session.
	fail func(error)
	// moved receives a value when the way to the gateway has changed: it is worth
	// to try at once.
	moved <-chan struct{}
	log   *slog.Logger

	losers sync.WaitGroup                // what is left behind and ends by itself
	silent atomic.Pointer[silentSession] // beside which another one is looked for

	// again gives the pauses between sessions that ended before they were settled,
	// due is the end of the latest. These and said belong to connect while it runs.
	again backoff
	due   time.Time
	said  repeated

	mu       sync.Mutex    // guards what follows
	known    []netip.Addr  // the gateway's addresses as last resolved
	best     netip.Addr    // the one that answered last
	dialTime time.Duration // how long that took; zero before the first session
	remote   netip.AddrPort
}

// A running session is one that is received from.
type running struct {
	session
	since time.Time
	ended chan struct{} // closed after why is set
	why   error
}

func (c *connector) run(ctx context.Context) {
	defer c.losers.Wait()
	c.log.Info("connecting", "gateway", c.address())
	next := c.connect(ctx)
	for next != nil {
		s := c.start(next)
		next = c.watch(ctx, s)
		c.stop(ctx, s, next)
		if next == nil && ctx.Err() == nil {
			next = c.connect(ctx)
		}
	}
}

// start puts a session in use.
func (c *connector) start(s session) *running {
	r := &running{session: s, since: time.Now(), ended: make(chan struct{})}
	c.mu.Lock()
	c.remote = s.Remote()
	c.mu.Unlock()
	sink := c.adopt(s)
	c.log.Info("connected", "gateway", s.Remote(), "mtu", s.MTU(), "congestion", s.Congestion())
	go func() {
		defer close(r.ended)
		r.why = s.Receive(sink)
	}()
	return r
}

// stop ends a session of which next takes the place, if there is one.
func (c *connector) stop(ctx context.Context, s *running, next session) {
	reason := "the client stops"
	if next != nil {
		reason = "another session takes its place"
	}
	if next == nil {
		c.drop(s.session)
	}
	end := func() {
		s.Close(reason)
		<-s.ended
	}
	if ctx.Err() != nil {
		end()
		return
	}
	// The old session's goodbye must not hold up the new one.
	c.losers.Go(end)
}

// watch returns when the session has ended, or with the session that is to take
// its place because it fell silent.
func (c *connector) watch(ctx context.Context, s *running) session {
	tick := time.NewTicker(glance)
	defer tick.Stop()
	var q quiet
	probed := time.After(probing)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.ended:
			c.judge(s)
			why := whyEnded(s.why)
			c.fail(fmt.Errorf("the session ended: %s", why))
			if times, say := c.said.say(why, time.Now()); say {
				c.log.Warn("the session ended; connecting again", "why", why, "times", times)
			}
			return nil
		case <-s.MTUChanged():
			c.refresh(s.session)
		case <-s.PeersChanged():
			c.refresh(s.session)
		case <-probed:
			c.refresh(s.session)
		case now := <-tick.C:
			at, waiting := s.LastReceived()
			if q.after(now, at, waiting) < max(silence, 4*s.RTT()) {
				continue
			}
			c.judge(s)
			c.fail(errSilent)
			c.log.Warn("the gateway does not answer; connecting beside the old session")
			if next := c.replace(ctx, s, at); next != nil {
				return next
			}
			q = quiet{}
		}
	}
}

// judge decides how soon the next session is opened: at once after one that
// lived long enough, else with growing pauses.
func (c *connector) judge(s *running) {
	if time.Since(s.since) >= settled {
		c.again, c.due, c.said = backoff{}, time.Time{}, repeated{}
		return
	}
	c.due = s.since.Add(c.again.next(s.since))
}

// connect returns a session, or nil when ctx has ended.
func (c *connector) connect(ctx context.Context) session {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type failure struct {
		round int
		err   error
	}
	won := make(chan session)
	failed := make(chan failure)
	start := func(round int) {
		c.losers.Go(func() {
			s, err := c.round(ctx)
			if err != nil {
				select {
				case failed <- failure{round, err}:
				case <-ctx.Done():
				}
				return
			}
			select {
			case won <- s:
			case <-ctx.Done():
				s.Close(quicker)
			}
		})
	}
	var back backoff
	started, due := time.Now(), c.due
	select {
	case <-c.moved: // while there was a session
		c.again = backoff{}
		if soon := started.Add(backoffFirst); due.After(soon) {
			due = soon
		}
	default:
	}
	next := time.NewTimer(time.Until(due))
	defer next.Stop()
	for round := 0; ; {
		select {
		case <-ctx.Done():
			return nil
		case s := <-won:
			return s
		case f := <-failed:
			c.fail(f.err)
			if times, say := c.said.say(f.err.Error(), time.Now()); say {
				c.log.Warn("cannot connect; trying again for as long as it takes", "error", f.err, "times", times)
			}
			if f.round == round {
				next.Reset(time.Until(due))
			}
		case <-c.moved:
			// The network is another one now; but changes come in bursts.
			back, c.again = backoff{}, backoff{}
			due = started.Add(backoffFirst)
			next.Reset(time.Until(due))
		case <-next.C:
			round++
			started = time.Now()
			start(round)
			pause := back.next(started)
			due = started.Add(pause)
			next.Reset(max(pause, c.overdue()))
		}
	}
}

// overdue is how long a round is waited for before the next one starts beside
// it. Two attempts must not come to their end together, because the gateway
// then ends one session for the other.
func (c *connector) overdue() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dialTime == 0 {
		return 1500 * time.Millisecond
	}
	return min(max(2*c.dialTime, 500*time.Millisecond), 3*time.Second)
}

// whyEnded puts the end of a session into words.
func whyEnded(err error) string {
	if err == nil {
		return "closed"
	}
	if timedOut(err) {
		return "nothing was heard of the gateway for too long"
	}
	if strings.Contains(err.Error(), "replaced by a newer session of the same client") {
		return err.Error() + ": another machine uses a copy of this state directory, and each client needs one of its own"
	}
	return err.Error()
}

// targets returns the gateway's addresses to dial: the one that answered last
// first, then IPv6 and IPv4 in turns (RFC 8305, section 4).
func targets(addrs []netip.Addr, best netip.Addr) []netip.Addr {
	const most = 16
	var six, four, all []netip.Addr
	for _, a := range addrs {
		switch a = a.Unmap(); {
		case slices.Contains(all, a):
		case a == best:
			all = append(all, a)
		case a.Is4() && !slices.Contains(four, a):
			four = append(four, a)
		case a.Is6() && !slices.Contains(six, a):
			six = append(six, a)
		}
	}
	for i := range max(len(six), len(four)) {
		if i < len(six) {
			all = append(all, six[i])
		}
		if i < len(four) {
			all = append(all, four[i])
		}
	}
	return all[:min(len(all), most)]
}

// errNoAddress is what a name without addresses is.
var errNoAddress = errors.New("the name has no address")

// quicker is why the loser of a race is closed.
const quicker = "another attempt was quicker"
