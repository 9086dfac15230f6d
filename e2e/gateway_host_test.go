package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// TestGatewayDevice has something else on the gateway's host break its device,
// as a network manager or a person does. Clients soon go on, in their sessions.
func TestGatewayDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c := w.client0()
	c.join(w.token)
	for _, damage := range []string{
		"ip link set quicvpn-gw down",
		"ip link set quicvpn-gw down; ip link set quicvpn-gw up",
		"ip route flush dev quicvpn-gw; ip -6 route flush dev quicvpn-gw",
		"ip addr flush dev quicvpn-gw",
	} {
		if out, err := w.Gateway.Command(w.ctx, "sh", "-c", damage).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", damage, err, out)
		}
		for _, server := range servers {
			ctx, cancel := context.WithTimeout(w.ctx, 3*time.Second)
			if err := c.ns.WaitPing(ctx, server); err != nil {
				t.Errorf("after %q %s is not reached: %v", damage, server, err)
			}
			cancel()
		}
		c.checkPages()
	}
	c.checkTunnel()
}

// TestFloodOfConnections has a client open all connections to a service that it
// gets. Other clients still reach that service from where they like.
func TestFloodOfConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	w.startGateway()
	c, other := w.client0(), w.addClient("other")
	c.join(w.token)
	other.join(w.token)
	service := netip.AddrPortFrom(netlab.ServerAddr4, 7)
	goesOn, err := c.ns.DialContext(w.ctx, "udp4", service.String())
	if err != nil {
		t.Fatal(err)
	}
	defer goesOn.Close()
	if err := echo(goesOn, "before"); err != nil {
		t.Fatal(err)
	}
	if err := c.ns.Do(func() error {
		n, err := flood(service)
		if n < 1000 {
			t.Errorf("a client got no more than %d connections", n)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for n := range 20 {
		conn, err := other.ns.DialContext(w.ctx, "udp4", service.String())
		if err != nil {
			t.Fatal(err)
		}
		if err := echo(conn, fmt.Sprint("other ", n)); err != nil {
			t.Errorf("another client, connection %d: %v", n, err)
		}
		conn.Close()
	}
	if err := echo(goesOn, "after"); err != nil {
		t.Errorf("the connection from before the flood: %v", err)
	}
}

// flood opens connections to an echo service from one port after the other,
// until there is no answer any more.
func flood(to netip.AddrPort) (opened int, err error) {
	const batch = 64
	for port, silent := 1024, 0; port+batch <= 1<<16 && silent < 3; port += batch {
		n, err := open(to, port, batch)
		if err != nil {
			return opened, err
		}
		opened += n
		if silent++; n > 0 {
			silent = 0
		}
	}
	return opened, nil
}

// open opens connections from a range of ports and returns how many were
// answered.
func open(to netip.AddrPort, port, count int) (answered int, err error) {
	var waiting []int
	for p := port; p < port+count; p++ {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: p}); err != nil {
			continue // another's: one connection less
		}
		waiting = append(waiting, fd)
	}
	for range 3 { // some packets are lost
		for _, fd := range waiting {
			if err := unix.Sendto(fd, []byte("flood"), 0, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
				return answered, err
			}
		}
		for begun := time.Now(); len(waiting) > 0 && time.Since(begun) < 50*time.Millisecond; time.Sleep(time.Millisecond) {
			all := len(waiting)
			waiting = slices.DeleteFunc(waiting, func(fd int) bool {
				_, _, err := unix.Recvfrom(fd, make([]byte, 16), unix.MSG_DONTWAIT)
				return err == nil
			})
			answered += all - len(waiting)
		}
	}
	return answered, nil
}

// echo wants a text back, of which a packet may be lost.
func echo(conn net.Conn, text string) error {
	var err error
	for range 5 {
		if _, err = conn.Write([]byte(text)); err != nil {
			continue // an ICMP error about the packet before
		}
		if err = conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		buf := make([]byte, 100)
		var n int
		if n, err = conn.Read(buf); err == nil {
			if string(buf[:n]) == text {
				return nil
			}
			err = fmt.Errorf("got %q", buf[:n])
		}
	}
	return fmt.Errorf("no echo of %q: %w", text, err)
}
