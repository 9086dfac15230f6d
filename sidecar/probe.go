package sidecar

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// dialMarked opens a socket that goes past the tunnel.
func dialMarked(ctx context.Context, network, address string) (net.Conn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, Mark) }); e != nil {
			return e
		}
		return err
	}}
	return d.DialContext(ctx, network, address)
}

// A probe learns what a session takes for lost packets, so as to go on when the
// network recovers: that there is no way to the gateway, or that nothing listens
// there. It sends one byte, which is no QUIC packet, and listens for ICMP.
type probe struct {
	conn   net.Conn
	done   chan struct{}
	reason error // once done is closed
}

// newProbe fails where the kernel knows no way to the gateway.
func newProbe(ctx context.Context, gateway netip.AddrPort) (*probe, error) {
	conn, err := dialMarked(ctx, "udp", gateway.String())
	if err != nil {
		return nil, err
	}
	p := &probe{conn: conn, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		_, err := conn.Write([]byte{0})
		for err == nil { // nobody answers a byte, but who knows
			_, err = conn.Read(make([]byte, 1))
		}
		if !errors.Is(err, net.ErrClosed) {
			p.reason = err
		}
	}()
	return p, nil
}

// Close ends the probe and returns what it has learnt, if anything.
func (p *probe) Close() error {
	p.conn.Close()
	<-p.done
	return p.reason
}
