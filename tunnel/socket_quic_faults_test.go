package tunnel

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
)

// The end of a connection reaches the peer before the socket is gone.
func TestSocketQUICClose(t *testing.T) {
	p := newSocketPair(t)
	serverTLS, clientTLS := socketTLS(t)
	server := openSocket(t, p.b, listenAt(addrB4))
	str := &quic.Transport{Conn: server}
	defer str.Close()
	ln, err := str.Listen(serverTLS, socketQUIC())
	if err != nil {
		t.Fatal(err)
	}
	client := openSocket(t, p.a, listenAt(netip.IPv4Unspecified()))
	ctr := &quic.Transport{Conn: client}
	c := dialSocket(t, ctr, socketPort(server, addrB4), clientTLS, socketQUIC())
	peer, err := ln.Accept(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.OpenUniStream()
	if err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error)
	go func() { // busy, so that segments are held
		_, err := io.Copy(s, payload(1, 1<<40))
		wrote <- err
	}()
	rs, err := peer.AcceptUniStream(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, rs, 1<<20); err != nil {
		t.Fatal(err)
	}
	c.CloseWithError(42, "enough")
	if err := errors.Join(ctr.Close(), client.Close()); err != nil {
		t.Error(err)
	}
	<-wrote
	select {
	case <-peer.Context().Done():
		var closed *quic.ApplicationError
		if err := context.Cause(peer.Context()); !errors.As(err, &closed) || closed.ErrorCode != 42 || closed.ErrorMessage != "enough" {
			t.Errorf("the peer saw %v", err)
		}
	case <-time.After(patience):
		t.Error("the peer did not see the end")
	}
}

// Closing the socket below busy connections ends them and all goroutines.
func TestSocketCloseBelowQUIC(t *testing.T) {
	p := newSocketPair(t)
	serverTLS, clientTLS := socketTLS(t)
	server := openSocket(t, p.b, listenAt(addrB4))
	str := &quic.Transport{Conn: server}
	ln, err := str.Listen(serverTLS, socketQUIC())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept(context.Background())
			if err != nil {
				return
			}
			wg.Go(func() {
				if s, err := c.OpenUniStream(); err == nil {
					_, err = io.Copy(s, payload(1, 1<<40))
					if err == nil {
						t.Error("endless bytes ended")
					}
				}
			})
		}
	})
	client := openSocket(t, p.a, listenAt(netip.IPv4Unspecified()))
	ctr := &quic.Transport{Conn: client}
	for range 3 {
		c := dialSocket(t, ctr, socketPort(server, addrB4), clientTLS, socketQUIC())
		s, err := c.AcceptUniStream(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { io.Copy(io.Discard, s) })
	}
	time.Sleep(100 * time.Millisecond)
	var all sync.WaitGroup
	for _, s := range []*socket{server, client} {
		all.Go(func() {
			if err := s.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
	all.Wait()
	for _, tr := range []*quic.Transport{str, ctr} {
		if err := tr.Close(); err != nil {
			t.Errorf("close transport: %v", err)
		}
	}
	wg.Wait()
}

// A connection outlives its network: a link that is down, a firewall.
func TestSocketQUICSurvives(t *testing.T) {
	p := newSocketPair(t)
	serverTLS, clientTLS := socketTLS(t)
	server := openSocket(t, p.b, socketConfig{})
	serveSocket(t, server, serverTLS)
	client := openSocket(t, p.a, listenAt(netip.IPv4Unspecified()))
	tr := &quic.Transport{Conn: client}
	defer tr.Close()
	c := dialSocket(t, tr, socketPort(server, addrB4), clientTLS, socketQUIC())
	done := make(chan struct{})
	go func() {
		defer close(done)
		exchange(t, c, 20<<20, 20<<20)
	}()
	for range 2 {
		time.Sleep(50 * time.Millisecond)
		for _, f := range [][2]func(){
			{p.ia.Down, p.ia.Up},
			{p.ib.Down, p.ib.Up},
			{func() {
				p.a.Nft(`table inet t { chain c { type filter hook output priority 0; policy drop; }; }`)
			}, func() { p.a.Nft("delete table inet t") }},
		} {
			f[0]()
			time.Sleep(50 * time.Millisecond)
			f[1]()
		}
	}
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("the transfer did not end")
	}
	t.Logf("client %+v", client.Stats())
	if err := context.Cause(c.Context()); err != nil {
		t.Errorf("the connection ended: %v", err)
	}
}

// quic-go's own packets make a router's refusal known: those of a handshake that
// are too large, and the probes for a larger MTU.
func TestSocketQUICPathMTU(t *testing.T) {
	for _, tc := range []struct {
		name string
		to   netip.Addr
		mtu  int
		size uint16
	}{
		{"IPv4 probes", serverAddr4, 1400, 1200},
		{"IPv6 probes", serverAddr6, 1400, 1200},
		{"IPv4 handshake", serverAddr4, 1300, 1452},
		{"IPv6 handshake", serverAddr6, 1300, 1452},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newRoutedPair(t, tc.mtu)
			serverTLS, clientTLS := socketTLS(t)
			server := openSocket(t, p.server, socketConfig{})
			serveSocket(t, server, serverTLS)
			cfg, events := tooBigEvents(listenAt(netip.IPv4Unspecified()))
			if tc.to.Is6() {
				cfg.Listen = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
			}
			tr := &quic.Transport{Conn: openSocket(t, p.client, cfg)}
			defer tr.Close()
			conf := socketQUIC()
			conf.InitialPacketSize = tc.size
			to := socketPort(server, tc.to)
			if tc.size == 1452 {
				ctx, cancel := context.WithCancel(context.Background())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					if c, err := tr.Dial(ctx, to, clientTLS, conf); err == nil {
						t.Errorf("a handshake with packets of %d bytes succeeded", conf.InitialPacketSize)
						c.CloseWithError(0, "")
					}
				}()
				if got, want := nextEvent(t, events), (tooBigEvent{to.AddrPort(), tc.mtu}); got != want {
					t.Errorf("%v, want %v", got, want)
				}
				cancel()
				<-ended
				// With what was learned it works.
				conf.InitialPacketSize = uint16(packetSizeOf(tc.to, tc.mtu))
			}
			c := dialSocket(t, tr, to, clientTLS, conf)
			exchange(t, c, 5<<20, 5<<20)
			if tc.size != 1452 {
				if got, want := nextEvent(t, events), (tooBigEvent{to.AddrPort(), tc.mtu}); got != want {
					t.Errorf("%v, want %v", got, want)
				}
			}
		})
	}
}

// packetSizeOf returns the UDP payload of an IP packet.
func packetSizeOf(to netip.Addr, mtu int) int {
	if to.Is4() {
		return mtu - 28
	}
	return mtu - 48
}
