package netstack

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// A conn is an open connection. Its errors are those of a *net.TCPConn.
type conn struct {
	stack         *Stack
	ep            tcpip.Endpoint
	events        *waiter.Queue
	local, remote netip.AddrPort

	reading sync.Mutex // guards dst
	dst     tcpip.SliceWriter
	writing sync.Mutex // guards src
	src     bytes.Reader

	readable, writable gate
	closed             atomic.Bool
}

func newConn(s *Stack, ep tcpip.Endpoint, events *waiter.Queue) *conn {
	c := &conn{stack: s, ep: ep, events: events}
	if a, err := ep.GetLocalAddress(); err == nil {
		c.local = addrPort(a.Addr, a.Port)
	}
	if a, err := ep.GetRemoteAddress(); err == nil {
		c.remote = addrPort(a.Addr, a.Port)
	}
	idle, interval := tcpip.KeepaliveIdleOption(keepIdle), tcpip.KeepaliveIntervalOption(keepInterval)
	// Options like these are set at any time.
	_ = ep.SetSockOpt(&idle)
	_ = ep.SetSockOpt(&interval)
	_ = ep.SetSockOptInt(tcpip.KeepaliveCountOption, keepCount)
	ep.SocketOptions().SetKeepAlive(true)
	// That the share of others changes does not fail.
	if share, _ := s.buffers.add(1); share < startBuffer {
		ep.SocketOptions().SetReceiveBufferSize(int64(share), true)
	}
	c.readable.init(events, waiter.ReadableEvents|waiter.EventHUp|waiter.EventErr)
	c.writable.init(events, waiter.WritableEvents|waiter.EventHUp|waiter.EventErr)
	return c
}

// A gate is where one waits until a connection is ready, or a deadline.
type gate struct {
	entry waiter.Entry
	ready chan struct{} // something has changed
	// deadline is in nanoseconds since the stack began; zero is none.
	deadline atomic.Int64
	timer    *time.Timer // of who waits
}

func (g *gate) init(events *waiter.Queue, mask waiter.EventMask) {
	g.ready = make(chan struct{}, 1)
	g.entry.Init(g, mask)
	events.EventRegister(&g.entry)
}

// NotifyEvent is gVisor's call, with locks held.
func (g *gate) NotifyEvent(waiter.EventMask) { g.wake() }

func (g *gate) wake() {
	select {
	case g.ready <- struct{}{}:
	default:
	}
}

func (g *gate) set(s *Stack, t time.Time) {
	var at int64
	if !t.IsZero() {
		at = max(int64(t.Sub(s.began)), 1)
	}
	g.deadline.Store(at)
	g.wake()
}

// expired reports whether the deadline has passed.
func (g *gate) expired(s *Stack) bool {
	at := g.deadline.Load()
	return at != 0 && at <= int64(time.Since(s.began))
}

// wait waits until something may have changed.
func (g *gate) wait(s *Stack) {
	at := g.deadline.Load()
	if at == 0 {
		<-g.ready
		return
	}
	left := time.Duration(at) - time.Since(s.began)
	if g.timer == nil {
		g.timer = time.NewTimer(left)
	} else {
		g.timer.Reset(left)
	}
	select {
	case <-g.ready:
		g.timer.Stop()
	case <-g.timer.C:
	}
}

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	for len(b) > 0 {
		if err := c.may(&c.readable); err != nil {
			return 0, c.failed("read", err)
		}
		c.dst = b
		res, err := c.ep.Read(&c.dst, tcpip.ReadOptions{})
		c.dst = nil
		switch err.(type) {
		case nil:
			c.ep.ModerateRecvBuf(res.Count)
			return res.Count, nil
		case *tcpip.ErrWouldBlock:
			c.readable.wait(c.stack)
		case *tcpip.ErrClosedForReceive:
			if c.closed.Load() {
				return 0, c.failed("read", net.ErrClosed)
			}
			return 0, io.EOF
		default:
			return 0, c.failed("read", errorOf(err))
		}
	}
	return 0, nil
}

// Write implements net.Conn.
func (c *conn) Write(b []byte) (n int, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	defer c.src.Reset(nil)
	c.src.Reset(b)
	for n < len(b) {
		if err := c.may(&c.writable); err != nil {
			return n, c.failed("write", err)
		}
		done, err := c.ep.Write(&c.src, tcpip.WriteOptions{})
		n += int(done)
		switch err.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			c.writable.wait(c.stack)
		default:
			return n, c.failed("write", errorOf(err))
		}
	}
	return n, nil
}

// may returns why nothing is to be read or written any more.
func (c *conn) may(g *gate) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if g.expired(c.stack) {
		return os.ErrDeadlineExceeded
	}
	return nil
}

func (c *conn) failed(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// errorOf returns what the kernel calls an error of gVisor's.
func errorOf(err tcpip.Error) error {
	switch err.(type) {
	case *tcpip.ErrConnectionReset:
		return syscall.ECONNRESET
	case *tcpip.ErrTimeout:
		return syscall.ETIMEDOUT
	case *tcpip.ErrClosedForSend:
		return syscall.EPIPE
	case *tcpip.ErrAborted, *tcpip.ErrConnectionAborted:
		return syscall.ECONNABORTED
	case *tcpip.ErrPortInUse:
		return syscall.EADDRINUSE
	case *tcpip.ErrBadLocalAddress:
		return syscall.EADDRNOTAVAIL
	case *tcpip.ErrMessageTooLong:
		return syscall.EMSGSIZE
	}
	return fmt.Errorf("gVisor: %v", err)
}

// CloseWrite ends this side's direction.
func (c *conn) CloseWrite() error {
	if c.closed.Load() {
		return c.failed("close", net.ErrClosed)
	}
	if err := c.ep.Shutdown(tcpip.ShutdownWrite); err != nil {
		return c.failed("close", errorOf(err))
	}
	return nil
}

// Close implements net.Conn. What was written is still sent.
func (c *conn) Close() error {
	if c.closed.Swap(true) {
		return c.failed("close", net.ErrClosed)
	}
	c.ep.Close()
	c.over()
	return nil
}

// over is what the first of Close and Reset does last.
func (c *conn) over() {
	_, _ = c.stack.buffers.add(-1)
	c.readable.wake()
	c.writable.wake()
}

// Reset aborts the connection, by RST.
func (c *conn) Reset() error {
	first := !c.closed.Swap(true)
	c.ep.Abort()
	if first {
		c.over()
	}
	return nil
}

// Context returns a context that is done when nothing comes or goes any more: for
// who has read all and writes nothing it tells that the connection was reset.
func (c *conn) Context() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	lost := waiter.NewFunctionEntry(waiter.EventHUp|waiter.EventErr, func(waiter.EventMask) { cancel() })
	c.events.EventRegister(&lost)
	if !isOpen(c.ep) {
		cancel()
	}
	return ctx
}

// hangUp ends a connection, and returns when nothing of it is left. A peer that
// does not take the last bytes, or does not close its side, does not keep it. Nor
// does gVisor, which forgets that the peer has closed if it must repeat its FIN.
func (c *conn) hangUp() {
	changed, notify := waiter.NewChannelEntry(waiter.EventHUp)
	c.events.EventRegister(&changed)
	defer c.events.EventUnregister(&changed)
	limit := time.NewTimer(c.stack.linger)
	defer limit.Stop()
	_ = c.Close()
	for isOpen(c.ep) {
		select {
		case <-notify:
		case <-limit.C:
			c.ep.Abort()
		}
	}
	c.ep.Abort() // what would wait for late packets (RFC 9293, section 3.6.1)
}

// isOpen reports whether a peer has something to acknowledge or to close.
func isOpen(ep tcpip.Endpoint) bool {
	switch tcp.EndpointState(ep.State()) {
	case tcp.StateClose, tcp.StateError, tcp.StateTimeWait:
		return false
	}
	return true
}

// LocalAddr and RemoteAddr implement net.Conn, by *net.TCPAddr.
func (c *conn) LocalAddr() net.Addr  { return net.TCPAddrFromAddrPort(c.local) }
func (c *conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.remote) }

// SetDeadline, SetReadDeadline and SetWriteDeadline implement net.Conn.
func (c *conn) SetDeadline(t time.Time) error {
	c.readable.set(c.stack, t)
	c.writable.set(c.stack, t)
	return nil
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.readable.set(c.stack, t)
	return nil
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.writable.set(c.stack, t)
	return nil
}
