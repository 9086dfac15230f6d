package sidecar

import (
	"context"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// A wayOut is how a link's own packets leave. Its zero value is for where nothing
// is in their way; a sidecar needs a mark to get past its tunnel, and tells its
// kill switch first.
type wayOut struct {
	// mark is the SO_MARK of the sockets; zero sets none.
	mark uint32
	// gateways is called with all the addresses that may be dialled from now on,
	// nameServer with one before it is asked. Both are optional.
	gateways   func([]netip.AddrPort)
	nameServer func(netip.AddrPort)
	// moved receives a value when the way to the gateway has changed; where it is
	// nil the link watches by itself.
	moved <-chan struct{}
	// kept is where resolv.conf is while the sidecar has written its own; empty
	// where it never does.
	kept string
	// hint says what to do where the gateway's name cannot be resolved.
	hint string
	// dial opens a session; nil means by QUIC.
	dial func(ctx context.Context, gateway netip.AddrPort) (session, error)
}

// dialMarked opens a socket that goes past what is in the way.
func dialMarked(ctx context.Context, mark uint32, network, address string) (net.Conn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		if mark == 0 {
			return nil
		}
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)) }); e != nil {
			return e
		}
		return err
	}}
	return d.DialContext(ctx, network, address)
}

// check fails where the kernel knows no way to the gateway. A session takes that
// for packets that were lost, and waits for better times.
func (o wayOut) check(ctx context.Context, gateway netip.AddrPort) error {
	conn, err := dialMarked(ctx, o.mark, "udp", gateway.String())
	if err != nil {
		return err
	}
	return conn.Close()
}
