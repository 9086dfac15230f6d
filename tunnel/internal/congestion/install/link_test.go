package install

import (
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// A link is one direction of a path: a drop-tail queue in front of a constant
// rate, then a delay. Several connections may share it.
type link struct {
	linkConfig
	rand *rand.Rand

	mu    sync.Mutex
	free  time.Time // when all in the queue has left
	last  time.Time // latest arrival, to keep the order
	train chan flight
	done  chan struct{}

	sent, dropped int64 // packets
}

type linkConfig struct {
	rate   float64       // bytes a second
	delay  time.Duration // one way
	queue  float64       // bytes
	loss   float64       // share of packets
	jitter time.Duration // most, added to delay, without reordering
	clump  time.Duration // arrivals wait for the next multiple
}

type flight struct {
	at   time.Time
	data []byte
	from net.Addr
	to   *endpoint
}

func newLink(cfg linkConfig, seed uint64) *link {
	l := &link{linkConfig: cfg, rand: rand.New(rand.NewPCG(seed, 1)), train: make(chan flight, 1<<17), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		for f := range l.train {
			time.Sleep(time.Until(f.at))
			f.to.deliver(f)
		}
	}()
	return l
}

// close waits for what is on its way. Nothing may be sent any more.
func (l *link) close() {
	close(l.train)
	<-l.done
}

func (l *link) send(data []byte, from net.Addr, to *endpoint) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.sent++
	if l.rand.Float64() < l.loss {
		return
	}
	if l.backlog(now).Seconds()*l.rate+float64(len(data)) > l.queue {
		l.dropped++
		return
	}
	if l.free.Before(now) {
		l.free = now
	}
	l.free = l.free.Add(time.Duration(float64(len(data)) / l.rate * 1e9))
	at := l.free.Add(l.delay)
	if l.jitter > 0 {
		at = at.Add(time.Duration(l.rand.Int64N(int64(l.jitter))))
	}
	if l.clump > 0 {
		at = at.Truncate(l.clump).Add(l.clump)
	}
	if at.Before(l.last) {
		at = l.last
	}
	l.last = at
	l.train <- flight{at, slices.Clone(data), from, to}
}

func (l *link) backlog(now time.Time) time.Duration { return max(0, l.free.Sub(now)) }

// queueDelay returns how long a packet that comes now would wait.
func (l *link) queueDelay() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.backlog(time.Now())
}

// setRate changes the rate; what is queued leaves at the old one.
func (l *link) setRate(rate float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rate = rate
}

// An endpoint is one end of links, as a net.PacketConn.
type endpoint struct {
	addr *net.UDPAddr
	out  *link
	peer func(net.Addr) *endpoint
	in   chan flight

	once     sync.Once
	closed   chan struct{}
	mu       sync.Mutex
	deadline time.Time
	wake     chan struct{}
}

func newEndpoint(addr *net.UDPAddr, out *link, peer func(net.Addr) *endpoint) *endpoint {
	return &endpoint{addr: addr, out: out, peer: peer, in: make(chan flight, 1<<13), closed: make(chan struct{}), wake: make(chan struct{}, 1)}
}

func (e *endpoint) deliver(f flight) {
	select {
	case e.in <- f:
	case <-e.closed:
	}
}

func (e *endpoint) WriteTo(b []byte, addr net.Addr) (int, error) {
	if to := e.peer(addr); to != nil {
		e.out.send(b, e.addr, to)
	}
	return len(b), nil
}

func (e *endpoint) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		e.mu.Lock()
		var timeout <-chan time.Time
		if !e.deadline.IsZero() {
			timeout = time.After(time.Until(e.deadline))
		}
		e.mu.Unlock()
		select {
		case f := <-e.in:
			return copy(b, f.data), f.from, nil
		case <-e.closed:
			return 0, nil, net.ErrClosed
		case <-timeout:
			return 0, nil, os.ErrDeadlineExceeded
		case <-e.wake:
		}
	}
}

func (e *endpoint) SetReadDeadline(t time.Time) error {
	e.mu.Lock()
	e.deadline = t
	e.mu.Unlock()
	select {
	case e.wake <- struct{}{}:
	default:
	}
	return nil
}

func (e *endpoint) Close() error {
	e.once.Do(func() { close(e.closed) })
	return nil
}

func (e *endpoint) LocalAddr() net.Addr              { return e.addr }
func (e *endpoint) SetDeadline(t time.Time) error    { return e.SetReadDeadline(t) }
func (e *endpoint) SetWriteDeadline(time.Time) error { return nil }
func (e *endpoint) SetReadBuffer(int) error          { return nil }
func (e *endpoint) SetWriteBuffer(int) error         { return nil }
