// Package linksim emulates links between datagram sockets in memory: rate, delay,
// queue, jitter, loss. Inside testing/synctest its time is exact; on a wall clock
// timers distort it, and figures are worthless.
//
// It does not know what the datagrams are.
package linksim

import (
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// A Config describes one direction of a path.
type Config struct {
	Rate  float64       // bytes a second
	Delay time.Duration // one way
	// Queue is what may wait for the rate, in bytes; what comes beyond is dropped.
	Queue float64
	// Loss is the share of packets that are lost on the way.
	Loss float64
	// Burst has losses come together; the zero value has none.
	Burst Burst
	// Jitter is added to Delay, up to so much, without reordering.
	Jitter time.Duration
	// Clump has arrivals wait for its next multiple, as some radio links do.
	Clump time.Duration
	// Police is the bucket of a policer, in bytes: what comes faster than Rate for
	// longer is dropped, and nothing waits. Zero means a queue instead.
	Police float64
	// Seed is that of all chance.
	Seed uint64
}

// Burst is the loss model of Gilbert and Elliott: a link is good or bad, by chance,
// and loses packets while it is bad.
type Burst struct {
	Begin float64 // chance, with each packet, that it turns bad
	End   float64 // and good again
	Loss  float64 // while it is bad
}

// A Link is one direction of a path, which several sockets may share.
type Link struct {
	cfg  Config
	rand *rand.Rand

	mu     sync.Mutex
	bad    bool      // see Burst
	free   time.Time // when all in the queue has left
	tokens float64   // of the policer, at filled
	filled time.Time
	last   time.Time // the latest arrival, to keep the order
	closed bool
	train  chan flight
	done   chan struct{}

	sent, dropped int64 // packets
}

// flight is a packet on its way.
type flight struct {
	at   time.Time
	data []byte
	from net.Addr
	to   *Conn
}

// New returns a link, which lives until Close.
func New(cfg Config) *Link {
	l := &Link{cfg: cfg, rand: rand.New(rand.NewPCG(cfg.Seed, 1)), train: make(chan flight, 1<<17), done: make(chan struct{}),
		tokens: cfg.Police, filled: time.Now()}
	go func() {
		defer close(l.done)
		for f := range l.train {
			time.Sleep(time.Until(f.at))
			f.to.deliver(f)
		}
	}()
	return l
}

// Close drops what comes from now on, and waits for what is on its way.
func (l *Link) Close() {
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		close(l.train)
	}
	l.mu.Unlock()
	<-l.done
}

// SetRate changes the rate; what is queued leaves at the old one.
func (l *Link) SetRate(rate float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cfg.Rate = rate
}

// Wait returns how long a packet that comes now would wait in the queue.
func (l *Link) Wait() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.backlog(time.Now())
}

// Packets returns how many came, and how many of them did not fit the queue, or the
// policer's bucket.
func (l *Link) Packets() (sent, dropped int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent, l.dropped
}

func (l *Link) backlog(now time.Time) time.Duration { return max(0, l.free.Sub(now)) }

func (l *Link) send(data []byte, from net.Addr, to *Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	now := time.Now()
	l.sent++
	if l.loses() {
		return
	}
	if !l.admits(now, float64(len(data))) {
		l.dropped++
		return
	}
	if l.free.Before(now) {
		l.free = now
	}
	leaves := now
	if l.cfg.Police == 0 {
		l.free = l.free.Add(time.Duration(float64(len(data)) / l.cfg.Rate * 1e9))
		leaves = l.free
	}
	at := leaves.Add(l.cfg.Delay)
	if l.cfg.Jitter > 0 {
		at = at.Add(time.Duration(l.rand.Int64N(int64(l.cfg.Jitter))))
	}
	if l.cfg.Clump > 0 {
		at = at.Truncate(l.cfg.Clump).Add(l.cfg.Clump)
	}
	if at.Before(l.last) {
		at = l.last
	}
	l.last = at
	l.train <- flight{at, slices.Clone(data), from, to}
}

// loses throws the dice for one packet.
func (l *Link) loses() bool {
	if b := l.cfg.Burst; b.Begin > 0 {
		if l.bad {
			l.bad = l.rand.Float64() >= b.End
		} else {
			l.bad = l.rand.Float64() < b.Begin
		}
		if l.bad && l.rand.Float64() < b.Loss {
			return true
		}
	}
	return l.rand.Float64() < l.cfg.Loss
}

// admits reports whether a packet fits the queue, or what the policer allows.
func (l *Link) admits(now time.Time, size float64) bool {
	if l.cfg.Police == 0 {
		return l.backlog(now).Seconds()*l.cfg.Rate+size <= l.cfg.Queue
	}
	l.tokens = min(l.cfg.Police, l.tokens+now.Sub(l.filled).Seconds()*l.cfg.Rate)
	l.filled = now
	if l.tokens < size {
		return false
	}
	l.tokens -= size
	return true
}

// A Conn is one end of links, as a net.PacketConn.
type Conn struct {
	addr *net.UDPAddr
	out  *Link
	peer *Conn
	in   chan flight

	once     sync.Once
	closed   chan struct{}
	mu       sync.Mutex // guards deadline
	deadline time.Time
	wake     chan struct{}
}

// Connect returns two sockets that reach each other: what a sends goes by there, what
// b sends by back. Each n has addresses of its own.
func Connect(there, back *Link, n byte) (a, b *Conn) {
	a = newConn(net.IPv4(192, 0, 2, n), there)
	b = newConn(net.IPv4(198, 51, 100, n), back)
	a.peer, b.peer = b, a
	return a, b
}

func newConn(ip net.IP, out *Link) *Conn {
	return &Conn{addr: &net.UDPAddr{IP: ip, Port: 443}, out: out,
		in: make(chan flight, 1<<13), closed: make(chan struct{}), wake: make(chan struct{}, 1)}
}

func (c *Conn) deliver(f flight) {
	select {
	case c.in <- f:
	case <-c.closed:
	}
}

// WriteTo sends to the other end, whatever the address.
func (c *Conn) WriteTo(b []byte, _ net.Addr) (int, error) {
	select {
	case <-c.closed:
		return 0, net.ErrClosed
	default:
	}
	c.out.send(b, c.addr, c.peer)
	return len(b), nil
}

func (c *Conn) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		c.mu.Lock()
		var timeout <-chan time.Time
		if !c.deadline.IsZero() {
			timeout = time.After(time.Until(c.deadline))
		}
		c.mu.Unlock()
		select {
		case f := <-c.in:
			return copy(b, f.data), f.from, nil
		case <-c.closed:
			return 0, nil, net.ErrClosed
		case <-timeout:
			select {
			case <-c.closed:
				return 0, nil, net.ErrClosed
			default:
				return 0, nil, os.ErrDeadlineExceeded
			}
		case <-c.wake:
		}
	}
}

func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.deadline = t
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return nil
}

func (c *Conn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

func (c *Conn) LocalAddr() net.Addr              { return c.addr }
func (c *Conn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }
func (c *Conn) SetWriteDeadline(time.Time) error { return nil }

// SetReadBuffer and SetWriteBuffer are what quic-go asks of a socket.
func (c *Conn) SetReadBuffer(int) error  { return nil }
func (c *Conn) SetWriteBuffer(int) error { return nil }

var _ net.PacketConn = (*Conn)(nil)
