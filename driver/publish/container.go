package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/nsenter"
)

// limit is the number of TCP connections, and of UDP clients, that a port has at a
// time. A TCP connection costs up to six descriptors: two sockets and the pipes of
// two splices.
const limit = 4096

// A UDP client is forgotten when nothing came from it, and nothing for it, for
// this long, as by the kernel's connection tracking: sooner where the app has never
// answered.
const (
	idleUnanswered = 30 * time.Second
	idleAnswered   = 2 * time.Minute
)

// dialTimeout bounds how long a client waits for a container whose backlog is
// full.
const dialTimeout = 10 * time.Second

// A Target is the container that ports are published of.
type Target struct {
	// Sandbox is the path of its network namespace.
	Sandbox string
	// Addrs are its own addresses. A client reaches that of its own IP version
	// where there is one, else the first.
	Addrs []netip.Addr
}

// A container makes the sockets inside a target's namespace.
type container struct {
	Target
	log                          *slog.Logger
	limit                        int
	idleUnanswered, idleAnswered time.Duration
	gone                         sync.Once // guards the message that the namespace is gone
}

// addrs returns the container's addresses in the order in which a client tries
// them.
func (c *container) addrs(client netip.Addr) []netip.Addr {
	var same, other []netip.Addr
	for _, a := range c.Addrs {
		if a.Is4() == client.Unmap().Is4() {
			same = append(same, a)
		} else {
			other = append(other, a)
		}
	}
	return append(same, other...)
}

// dialTCP connects to a port of the container for a client. An app that listens
// by one IP version alone is found there, since a client such as a browser, which
// would try the other, has an answer already: the listener's.
func (c *container) dialTCP(ctx context.Context, client netip.Addr, port uint16) (*net.TCPConn, error) {
	var refused error
	for _, a := range c.addrs(client) {
		conn, err := c.dial(ctx, unix.SOCK_STREAM, netip.AddrPortFrom(a, port))
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		if refused = err; !errors.Is(err, unix.ECONNREFUSED) {
			break
		}
	}
	return nil, refused
}

// dialUDP returns a socket that is connected to a port of the container.
func (c *container) dialUDP(ctx context.Context, client netip.Addr, port uint16) (*net.UDPConn, error) {
	conn, err := c.dial(ctx, unix.SOCK_DGRAM, netip.AddrPortFrom(c.addrs(client)[0], port))
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

// dial makes a socket inside the namespace, which it belongs to from then on, and
// connects it outside: no thread waits there for the container.
//
// Entering costs a thread, about 0.1 ms. One that stayed inside would be cheaper,
// and would keep the namespace and the TUN device in it alive when the container
// has ended.
func (c *container) dial(ctx context.Context, kind int, to netip.AddrPort) (net.Conn, error) {
	var f *os.File
	err := nsenter.Do(c.Sandbox, func() (err error) {
		f, err = socket(kind, to)
		return err
	})
	if errors.Is(err, nsenter.ErrGone) {
		c.gone.Do(func() {
			c.log.Warn("clients of published ports are refused, because the container's network namespace is gone", "namespace", c.Sandbox)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("make a socket for the container's %v: %w", to, err)
	}
	defer f.Close()
	conn, err := c.connect(ctx, f, to)
	if err != nil {
		return nil, fmt.Errorf("connect to the container's %v: %w", to, err)
	}
	return conn, nil
}

func socket(kind int, to netip.AddrPort) (*os.File, error) {
	family := unix.AF_INET6
	if to.Addr().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	return os.NewFile(uintptr(fd), "socket"), nil
}

func (c *container) connect(ctx context.Context, f *os.File, to netip.AddrPort) (net.Conn, error) {
	if err := f.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { f.SetDeadline(time.Unix(1, 0)) })()
	err := connect(f, to)
	if errors.Is(err, unix.EADDRNOTAVAIL) {
		if err := c.reusePorts(); err != nil {
			return nil, err
		}
		err = connect(f, to)
	}
	if err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

// connect waits by the runtime's poller. A repeated connect(2) tells the outcome
// of the first.
func connect(f *os.File, to netip.AddrPort) error {
	var addr unix.Sockaddr = &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
	if to.Addr().Is4() {
		addr = &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Write(func(fd uintptr) bool {
		result = unix.Connect(int(fd), addr)
		return result != unix.EINPROGRESS && result != unix.EALREADY
	})
	if err != nil {
		return err // of the wait
	}
	return os.NewSyscallError("connect", result)
}

// reusePorts lets connections inside the namespace take source ports of others
// that are in TIME_WAIT, a second later and told apart by timestamps (RFC 6191).
// All connections to a port come from one address, and its 28,000 source ports
// would last for 470 connections a second, since each waits for a minute after
// the client closed it. The container is left as it is until it comes to that.
func (c *container) reusePorts() error {
	const key = "/proc/sys/net/ipv4/tcp_tw_reuse" // of IPv6 too
	err := nsenter.Do(c.Sandbox, func() error { return os.WriteFile(key, []byte("1"), 0) })
	if err != nil {
		return fmt.Errorf("all source ports are in use, and those of ended connections cannot be reused: %w; "+
			"run the container with --sysctl net.ipv4.tcp_tw_reuse=1", err)
	}
	return nil
}
