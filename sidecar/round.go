package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"
)

// round makes one attempt with every address of the gateway, each a while after
// the one before or once that has failed. Addresses known from before are
// dialled while the name is resolved again. The first session wins, the others
// are closed.
func (c *connector) round(ctx context.Context) (session, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()

	type outcome struct {
		s    session
		addr netip.Addr
		took time.Duration
		err  error
	}
	outcomes := make(chan outcome)
	attempt := func(a netip.Addr) {
		c.losers.Go(func() {
			started := time.Now()
			s, err := c.open(ctx, a)
			select {
			case outcomes <- outcome{s, a, time.Since(started), err}:
			case <-ctx.Done():
				if s != nil {
					s.Close(quicker)
				}
			}
		})
	}

	todo := c.targets(nil)
	resolved := c.resolve(ctx)
	var tried []netip.Addr
	var errs []error
	pending := 0
	stagger := time.NewTimer(0)
	defer stagger.Stop()
	c.allowAll(todo)
	for {
		if len(todo) == 0 && pending == 0 && resolved == nil {
			return nil, worst(errs)
		}
		select {
		case r := <-resolved:
			resolved = nil
			if r.err != nil {
				// With addresses from before that is half as bad.
				errs = append(errs, r.err)
				continue
			}
			all := c.targets(r.addrs)
			c.allowAll(append(slices.Clone(tried), all...))
			todo = slices.DeleteFunc(all, func(a netip.Addr) bool { return slices.Contains(tried, a) })
			if pending == 0 {
				stagger.Reset(0)
			} else {
				stagger.Reset(c.stagger())
			}
		case <-stagger.C:
			if len(todo) == 0 {
				continue
			}
			tried = append(tried, todo[0])
			attempt(todo[0])
			pending++
			todo = todo[1:]
			stagger.Reset(c.stagger())
		case o := <-outcomes:
			pending--
			if o.err == nil {
				c.answered(o.addr, o.took)
				return o.s, nil
			}
			errs = append(errs, c.explain(o.addr, o.err))
			stagger.Reset(0)
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				errs = append(errs, c.unanswered(pending))
			}
			return nil, worst(append(errs, ctx.Err()))
		}
	}
}

// open dials one address.
func (c *connector) open(ctx context.Context, a netip.Addr) (session, error) {
	s, err := c.dial(ctx, netip.AddrPortFrom(a, c.port))
	if err != nil {
		return nil, err
	}
	if err := c.check(s); err != nil {
		s.Close("the client cannot use what it was given")
		return nil, err
	}
	return s, nil
}

// resolution is the outcome of a lookup.
type resolution struct {
	addrs []netip.Addr
	err   error
}

// resolve looks the gateway's name up; the channel is nil for a host that is an
// address.
func (c *connector) resolve(ctx context.Context) <-chan resolution {
	if _, err := netip.ParseAddr(c.host); err == nil {
		return nil
	}
	ch := make(chan resolution, 1)
	c.losers.Go(func() {
		addrs, err := c.lookup(ctx, c.host)
		if err == nil && len(addrs) == 0 {
			err = errNoAddress
		}
		if err != nil {
			ch <- resolution{err: c.unresolved(err)}
			return
		}
		c.mu.Lock()
		c.known = addrs
		c.mu.Unlock()
		ch <- resolution{addrs: addrs}
	})
	return ch
}

// targets orders addresses for dialling: those given, or else those known.
func (c *connector) targets(addrs []netip.Addr) []netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	if literal, err := netip.ParseAddr(c.host); err == nil {
		return []netip.Addr{literal.Unmap()}
	}
	if addrs == nil {
		addrs = c.known
	}
	return targets(addrs, c.best)
}

// allowAll allows the addresses, and that of the session in use.
func (c *connector) allowAll(addrs []netip.Addr) {
	c.mu.Lock()
	remote := c.remote
	c.mu.Unlock()
	var all []netip.AddrPort
	for _, a := range addrs {
		all = append(all, netip.AddrPortFrom(a, c.port))
	}
	if remote.IsValid() {
		all = append(all, remote)
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	c.allow(slices.Compact(all))
}

// stagger is how long the next address waits for the one before. Where sessions
// take longer to open it is longer, for the reason of overdue.
func (c *connector) stagger() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return min(max(2*c.dialTime, 250*time.Millisecond), 2*time.Second)
}

func (c *connector) answered(a netip.Addr, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.best, c.dialTime = a, took
}

func (c *connector) address() string { return net.JoinHostPort(c.host, strconv.Itoa(int(c.port))) }

// unanswered is the error of attempts that the round's timeout cut off.
func (c *connector) unanswered(pending int) error {
	if pending == 0 {
		return c.unresolved(errors.New("no answer from the name servers"))
	}
	return c.explain(netip.Addr{}, fmt.Errorf("handshake: %w", context.DeadlineExceeded))
}
