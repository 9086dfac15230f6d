package sidecar

import (
	"context"
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

// checkWay fails where the kernel knows no way to the gateway. A session takes
// that for packets that were lost, and waits for better times.
func checkWay(ctx context.Context, gateway netip.AddrPort) error {
	conn, err := dialMarked(ctx, "udp", gateway.String())
	if err != nil {
		return err
	}
	return conn.Close()
}
