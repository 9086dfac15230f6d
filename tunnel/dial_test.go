package tunnel

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// narrowPath forwards UDP to an address and swallows what is larger than limit.
func narrowPath(t *testing.T, to netip.AddrPort, limit int) netip.AddrPort {
	t.Helper()
	front, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	backs := make(map[netip.AddrPort]*net.UDPConn) // by client
	replies := make(chan struct{}, 64)
	go func() {
		defer close(done)
		b := make([]byte, 2000)
		for {
			n, client, err := front.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			back := backs[client]
			if back == nil {
				if back, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to)); err != nil {
					t.Error(err)
					return
				}
				backs[client] = back
				replies <- struct{}{}
				go func() {
					defer func() { <-replies }()
					b := make([]byte, 2000)
					for {
						n, err := back.Read(b)
						if err != nil {
							return
						}
						if n <= limit {
							front.WriteToUDPAddrPort(b[:n], client)
						}
					}
				}()
			}
			if n <= limit {
				back.Write(b[:n])
			}
		}
	}()
	t.Cleanup(func() {
		front.Close()
		<-done
		for _, back := range backs {
			back.Close()
		}
		for range cap(replies) {
			replies <- struct{}{}
		}
	})
	return addrPort(front.LocalAddr())
}

// A path that swallows large packets, and says nothing, costs one more second
// for each size, and no more.
func TestDialFindsTheSizeOfASilentPath(t *testing.T) {
	for limit, want := range map[int]struct {
		mtu  int // at least, at once
		took time.Duration
	}{
		1452: {1350, 0},
		1350: {1280, fallbackDelay},
		1210: {1150, 2 * fallbackDelay},
	} {
		g := startGateway(t, ServerConfig{})
		start := time.Now()
		s := dial(t, g.dialer(t), narrowPath(t, g.Addr(), limit))
		if took := time.Since(start); took < want.took || took > want.took+fallbackDelay {
			t.Errorf("a path for %d bytes took %v, want about %v", limit, took, want.took)
		}
		if s.MTU() < want.mtu || s.MTU() > limit {
			t.Errorf("a path for %d bytes: MTU %d, want at least %d", limit, s.MTU(), want.mtu)
		}
		server := <-g.serve
		atClient, atServer := receive(t, s), receive(t, server)
		s.Send(0, []packet.Packet{{Data: udpPacket(client4, far4, s.MTU())}}, nil)
		atServer.wait(t, 1)
		server.Send(0, []packet.Packet{{Data: udpPacket(far4, client4, server.MTU())}}, nil)
		atClient.wait(t, 1)
	}
}

// Of attempts beside each other only one may hear why nobody answers.
func TestMoreTelling(t *testing.T) {
	silent, told := &attempt{err: errors.New("timeout")}, &attempt{err: errors.New("timeout"), lost: unix.ECONNREFUSED}
	for _, order := range [][]*attempt{{silent, told}, {told, silent}, {silent, told, silent}} {
		var got *attempt
		for _, a := range order {
			got = moreTelling(got, a)
		}
		if got != told {
			t.Errorf("of %d attempts the one that was told why is not chosen", len(order))
		}
	}
}

// A port where nobody listens is said as such, while there is time for an
// answer and when it is up.
func TestDialClosedPort(t *testing.T) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	closed := addrPort(c.LocalAddr())
	c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
	defer cancel()
	d := &Dialer{Key: newKey(t)}
	if _, err := d.Dial(ctx, closed); !errors.Is(err, unix.ECONNREFUSED) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial = %v, want that the port is closed", err)
	}
}
