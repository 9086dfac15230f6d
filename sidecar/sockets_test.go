package sidecar

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// Connections from an address of the tunnel end with it, others do not.
func TestEndConnections(t *testing.T) {
	for _, addrs := range [][2]string{{"192.0.2.1/24", "192.0.2.2/24"}, {"2001:db8::1/64", "2001:db8::2/64"}} {
		lab := netlab.New(t)
		client, server := lab.NS("client"), lab.NS("server")
		here, there := netip.MustParsePrefix(addrs[0]), netip.MustParsePrefix(addrs[1])
		lab.Link(client, server, netlab.LinkConfig{
			A: netlab.End{Name: "eth0", Addresses: []netip.Prefix{here}},
			B: netlab.End{Name: "eth0", Addresses: []netip.Prefix{there}},
		})
		listener, err := server.Listen("tcp", netip.AddrPortFrom(there.Addr(), 80).String())
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		conn, err := client.DialContext(ctx, "tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()

		for _, test := range []struct {
			own  netip.Addr
			want error
		}{{there.Addr(), context.DeadlineExceeded}, {here.Addr(), syscall.ECONNABORTED}} {
			if err := client.Do(func() error { return endConnections([]netip.Addr{test.own}) }); err != nil {
				t.Fatal(err)
			}
			conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			_, err := conn.Read(make([]byte, 1))
			if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
				err = context.DeadlineExceeded
			}
			if !errors.Is(err, test.want) {
				t.Errorf("%v, and the sockets of %v ended: read says %v, want %v", here, test.own, err, test.want)
			}
		}
	}
}
