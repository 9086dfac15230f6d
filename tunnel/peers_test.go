package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// waitPeers returns once the client's peers are those wanted.
func waitPeers(t *testing.T, s *Session, want []netip.Prefix) {
	t.Helper()
	deadline := time.After(patience)
	for !cmp.Equal(s.Peers(), want, compareNetip) {
		select {
		case <-s.PeersChanged():
		case <-deadline:
			t.Fatalf("peers are %v, want %v", s.Peers(), want)
		}
	}
}

func TestPeers(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	s := dial(t, g.dialer(t), g.Addr())
	receive(t, s)
	server := <-g.serve
	receive(t, server)

	// Adjoining prefixes stay what they are, in the order of their addresses.
	want := parsePrefixes([]string{"10.91.0.0/16", "172.18.0.0/16", "172.19.0.0/16", "fd00::/64"})
	if err := server.SetPeers([]netip.Prefix{want[3], want[2], want[0], want[1]}); err != nil {
		t.Fatal(err)
	}
	waitPeers(t, s, want)
	if err := server.SetPeers(want[:1]); err != nil {
		t.Fatal(err)
	}
	waitPeers(t, s, want[:1])
	if err := server.SetPeers(nil); err != nil {
		t.Fatal(err)
	}
	waitPeers(t, s, nil)

	for _, bad := range [][]string{{"10.0.0.0/8", "10.1.0.0/16"}, {"::ffff:10.0.0.0/104"}} {
		if err := server.SetPeers(parsePrefixes(bad)); err == nil {
			t.Errorf("%v were taken", bad)
		}
	}
	if err := server.SetPeers([]netip.Prefix{{}}); err == nil {
		t.Error("no prefix was taken for one")
	}
}

// A client that does not read holds up nobody, and gets the last list alone.
func TestPeersOfAStalledClient(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	s := dial(t, g.dialer(t), g.Addr()) // which does not receive yet
	server := <-g.serve
	receive(t, server)
	var list []netip.Prefix
	for i := range 900 {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	set := func(ps []netip.Prefix) {
		start := time.Now()
		if err := server.SetPeers(ps); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("SetPeers took %s", took)
		}
	}
	// Until one has waited for so long that the client's window must be full.
	for waiting := 0; waiting < 50; {
		before := server.peers.next.Load()
		set(list)
		if before == nil {
			waiting = 0
			continue
		}
		waiting++
		time.Sleep(10 * time.Millisecond)
	}
	last := list[:7]
	set(last)
	receive(t, s)
	waitPeers(t, s, last)
}

func TestLeave(t *testing.T) {
	left := make(chan Fingerprint, 1)
	g := startGateway(t, ServerConfig{Leave: func(id Fingerprint) error { left <- id; return nil }})
	d := g.dialer(t)
	twin, stranger := dial(t, d, g.Addr()), dial(t, g.dialer(t), g.Addr())
	receive(t, <-g.serve)
	receive(t, <-g.serve)
	s := dial(t, d, g.Addr())
	receive(t, s)
	server := <-g.serve
	ended := make(chan error, 1)
	go func() { ended <- server.Receive(newCollector()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := s.Leave(ctx); err != nil {
		t.Fatal(err)
	}
	if id := <-left; id != KeyFingerprint(d.Key.Public().(ed25519.PublicKey)) {
		t.Errorf("%v has left", id)
	}
	if err := <-ended; !errors.Is(err, errLeft) {
		t.Errorf("the gateway's session ended with %v", err)
	}
	if err := s.Leave(ctx); err != nil {
		t.Errorf("the second time: %v", err)
	}
	select {
	case <-twin.Context().Done():
	case <-ctx.Done():
		t.Error("another session of the same client goes on")
	}
	if stranger.Context().Err() != nil {
		t.Error("the session of another client has ended")
	}
}

func TestLeaveFails(t *testing.T) {
	g := startGateway(t, ServerConfig{Leave: func(Fingerprint) error { return errors.New("disk full") }})
	s := dial(t, g.dialer(t), g.Addr())
	receive(t, s)
	receive(t, <-g.serve)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := s.Leave(ctx); err == nil || !strings.Contains(err.Error(), "try again") {
		t.Errorf("Leave = %v", err)
	}
}

// A gateway that does not hear of leaving, or is gone, does not hold the client.
func TestLeaveIsNotHeard(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	s := dial(t, g.dialer(t), g.Addr())
	receive(t, s)
	receive(t, <-g.serve)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, errors.New("out of patience"))
	defer cancel()
	if err := s.Leave(ctx); err == nil || !strings.Contains(err.Error(), "out of patience") {
		t.Errorf("Leave = %v", err)
	}
	s.Close("")
	if err := s.Leave(t.Context()); err == nil {
		t.Error("a session that was closed has left")
	}
}
