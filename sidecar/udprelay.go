package sidecar

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/socks5"
)

const (
	// maxUDPFlows bounds the destinations of one association, and maxAllUDPFlows
	// those of all. For one destination more than the first, that one gives way for
	// which there was nothing for the longest time.
	maxUDPFlows    = 256
	maxAllUDPFlows = 4096
	// maxUDPWaiting is how many datagrams wait until a destination's flow is open.
	maxUDPWaiting = 16
	// udpQueue is how many datagrams wait for the client.
	udpQueue = 64
	// udpDialTime bounds the opening of a flow.
	udpDialTime = 10 * time.Second
	// udpIdleTime ends a flow that had no datagram for so long: what a NAT must keep
	// at least (RFC 4787, section 4.3).
	udpIdleTime = 2 * time.Minute
	// udpWriteTime bounds the sending of a datagram that is longer than shortDatagram,
	// and may have to wait until the path is free.
	udpWriteTime  = time.Second
	shortDatagram = 1100
	// udpRefusedTime is for how long datagrams to a destination are dropped whose
	// flow could not be opened, or ended badly.
	udpRefusedTime = time.Second
)

// A udpConn is what a relay uses of a *tunnel.UDPFlow.
type udpConn interface {
	Write(b []byte) (int, error)
	// Receive returns a datagram that is the caller's.
	Receive() ([]byte, error)
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
	Close() error
}

// udpRelays are the relays of the clients' datagrams.
type udpRelays struct {
	dial func(ctx context.Context, address string) (udpConn, error)
	open atomic.Int64 // flows
}

// relay returns the relay of one association.
func (u *udpRelays) relay() *udpRelay {
	r := &udpRelay{all: u, flows: make(map[socks5.Addr]*udpFlow), received: make(chan received, udpQueue)}
	r.ctx, r.end = context.WithCancel(context.Background())
	return r
}

// A udpRelay exchanges datagrams with hosts for one client, by a flow of its own
// (CONNECT-UDP) for each destination. It implements socks5.PacketRelay.
//
//  1. Send finds the destination's flow, or makes one, and gives it the datagram.
//  2. udpFlow.run opens the flow, meanwhile datagrams wait, and then receives.
//  3. Receive takes a datagram of any flow.
type udpRelay struct {
	all      *udpRelays
	ctx      context.Context
	end      context.CancelFunc
	running  sync.WaitGroup // the flows' run
	received chan received

	mu    sync.Mutex // guards flows
	flows map[socks5.Addr]*udpFlow
}

// received is a datagram and where it was sent from.
type received struct {
	b    []byte
	from socks5.Addr
}

var errTooManyFlows = errors.New("too many destinations")

func (r *udpRelay) Send(b []byte, to socks5.Addr) error {
	f, err := r.flow(to)
	if err != nil {
		return err
	}
	return f.send(b)
}

// flow returns the flow to a destination.
func (r *udpRelay) flow(to socks5.Addr) (*udpFlow, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f := r.flows[to]; f != nil {
		return f, nil
	}
	if r.ctx.Err() != nil {
		return nil, net.ErrClosed
	}
	if len(r.flows) >= maxUDPFlows {
		r.evictLocked()
	}
	if r.all.open.Add(1) > maxAllUDPFlows {
		r.all.open.Add(-1)
		return nil, errTooManyFlows
	}
	f := &udpFlow{to: to, relay: r}
	f.ctx, f.end = context.WithCancel(r.ctx)
	f.touch()
	r.flows[to] = f
	r.running.Go(f.run)
	return f, nil
}

// evictLocked ends the flow that was quiet for the longest time.
func (r *udpRelay) evictLocked() {
	var oldest *udpFlow
	for _, f := range r.flows {
		if oldest == nil || f.last.Load() < oldest.last.Load() {
			oldest = f
		}
	}
	delete(r.flows, oldest.to)
	oldest.end()
}

func (r *udpRelay) forget(f *udpFlow) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.flows[f.to] == f {
		delete(r.flows, f.to)
	}
	r.all.open.Add(-1)
}

func (r *udpRelay) Receive() ([]byte, socks5.Addr, error) {
	select {
	case d := <-r.received:
		return d.b, d.from, nil
	case <-r.ctx.Done():
		return nil, socks5.Addr{}, net.ErrClosed
	}
}

// Close ends Receive and all flows, and returns when they have ended.
func (r *udpRelay) Close() error {
	r.end()
	r.running.Wait()
	return nil
}

// A udpFlow is the way to one destination.
type udpFlow struct {
	to    socks5.Addr
	relay *udpRelay
	ctx   context.Context
	end   context.CancelFunc
	last  atomic.Int64 // when there was a datagram, in Unix nanoseconds

	mu      sync.Mutex // guards what follows
	conn    udpConn    // nil until it is open, and where that failed
	waiting [][]byte
}

func (f *udpFlow) touch() { f.last.Store(time.Now().UnixNano()) }

var errFlowBusy = errors.New("the way to the destination is not open")

func (f *udpFlow) send(b []byte) error {
	f.touch()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conn != nil {
		return f.write(b)
	}
	if len(f.waiting) >= maxUDPWaiting {
		return errFlowBusy
	}
	f.waiting = append(f.waiting, append([]byte(nil), b...))
	return nil
}

// write does not wait long: datagrams to all other destinations wait meanwhile.
func (f *udpFlow) write(b []byte) error {
	if len(b) > shortDatagram {
		_ = f.conn.SetWriteDeadline(time.Now().Add(udpWriteTime)) // Write tells of what is wrong
	}
	_, err := f.conn.Write(b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		f.end() // a part may be written
	}
	return err
}

// run lives as long as the flow.
func (f *udpFlow) run() {
	defer f.relay.forget(f)
	defer f.end()
	ctx, cancel := context.WithTimeout(f.ctx, udpDialTime)
	conn, err := f.relay.all.dial(ctx, f.to.String())
	cancel()
	if err == nil {
		stop := context.AfterFunc(f.ctx, func() { conn.Close() })
		f.opened(conn)
		err = f.receive(conn)
		stop()
		conn.Close()
	}
	if err != nil {
		// Each further datagram would ask again.
		sleep(f.ctx, udpRefusedTime)
	}
}

// opened sends what has waited.
func (f *udpFlow) opened(conn udpConn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conn = conn
	for _, b := range f.waiting {
		_ = f.write(b) // one that is lost, as on any way
	}
	f.waiting = nil
}

// receive returns nil when the flow was idle or is not wanted any more.
func (f *udpFlow) receive(conn udpConn) error {
	_ = conn.SetReadDeadline(time.Now().Add(udpIdleTime)) // Receive tells of what is wrong
	for {
		b, err := conn.Receive()
		switch {
		case f.ctx.Err() != nil:
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			idleAt := time.Unix(0, f.last.Load()).Add(udpIdleTime)
			if time.Until(idleAt) <= 0 {
				return nil
			}
			_ = conn.SetReadDeadline(idleAt)
			continue
		case err != nil:
			return err
		}
		f.touch()
		select {
		case f.relay.received <- received{b, f.to}:
		case <-f.ctx.Done():
			return nil
		}
	}
}
