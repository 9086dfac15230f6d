package publish

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// open listens on the first free host port of p.
func open(p Port, to *container) (server, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if len(to.Addrs) == 0 {
		return nil, fmt.Errorf("publish %v: the container has no IP address", p)
	}
	for try := p; ; try.HostPort++ {
		s, err := try.open(to)
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) || try.HostPort == p.last() {
			return nil, fmt.Errorf("publish %v: %w", p, p.explain(err))
		}
	}
}

// open listens on HostPort alone.
func (p Port) open(to *container) (server, error) {
	// Without an address Go listens on one socket for both IP versions, or for
	// IPv4 where the host has no IPv6.
	network, addr := p.Protocol, netip.AddrPortFrom(p.HostIP, p.HostPort).String()
	switch {
	case !p.HostIP.IsValid():
		addr = fmt.Sprintf(":%d", p.HostPort)
	case p.HostIP.Is4():
		network += "4"
	default:
		network += "6"
	}
	config := net.ListenConfig{}
	config.SetMultipathTCP(false) // its sockets cannot be spliced
	if p.Protocol == "tcp" {
		ln, err := config.Listen(context.Background(), network, addr)
		if err != nil {
			return nil, err
		}
		return &tcpServer{ln: ln.(*net.TCPListener), to: to, published: p}, nil
	}
	config.Control = wantDestination
	pc, err := config.ListenPacket(context.Background(), network, addr)
	if err != nil {
		return nil, err
	}
	return newUDPServer(pc.(*net.UDPConn), p, to), nil
}

// wantDestination has the kernel tell for each datagram the address that it was
// sent to.
func wantDestination(network, _ string, c syscall.RawConn) error {
	level, option := unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO // of IPv4 too, in mapped form
	if strings.HasSuffix(network, "4") {
		level, option = unix.IPPROTO_IP, unix.IP_PKTINFO
	}
	var failed error
	err := c.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), level, option, 1) })
	return errors.Join(err, failed)
}

// explain says what to do about an error of the host's socket.
func (p Port) explain(err error) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE) && p.last() != p.HostPort:
		return fmt.Errorf("host ports %s/%s are all in use: stop what uses one of them or publish other ports", p.host(), p.Protocol)
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("host port %s/%s is in use: stop what uses it or publish another port", p.host(), p.Protocol)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("%v is no address of this host: publish on one that it has, or on all", p.HostIP)
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("host port %s/%s needs the capability NET_BIND_SERVICE: give it to the driver, or publish a port from 1024 up", p.host(), p.Protocol)
	case errors.Is(err, unix.EAFNOSUPPORT):
		return fmt.Errorf("this host has no IPv6: publish on an IPv4 address: %w", err)
	}
	return err
}
