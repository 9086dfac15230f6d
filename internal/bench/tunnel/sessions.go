package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// opened is what openSessions prints once all its sessions are there.
const opened = "all sessions are open"

// idleSessions opens sessions to a fresh gateway, from a process of their own,
// and returns the gateway's resident memory before and after in MB.
func idleSessions(ctx context.Context, tb netlab.TB, binary string, count int) (before, after float64) {
	top := netlab.NewTopology(tb, netlab.LinkConfig{})
	tokenFile, gateway := startGateway(ctx, tb, top, binary)
	self, err := os.Executable()
	if err != nil {
		tb.Fatalf("find this program: %v", err)
	}
	if err := gateway.WaitLog(ctx, "listen"); err != nil {
		tb.Fatalf("%v", err)
	}
	before = memory(tb, gateway)
	client := top.Client.Start(ctx, self, "-idle-client", tokenFile, "-sessions", strconv.Itoa(count))
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	if err := client.WaitLog(ctx, opened); err != nil {
		tb.Fatalf("open %d sessions: %v", count, err)
	}
	time.Sleep(2 * time.Second) // what only the handshakes needed may go
	after = memory(tb, gateway)
	client.Kill()
	gateway.Kill()
	return before, after
}

// openSessions opens sessions, each with a key of its own, and keeps them until
// ctx ends. One that ends before is an error.
func openSessions(ctx context.Context, tokenFile string, count int) error {
	text, err := os.ReadFile(tokenFile)
	if err != nil {
		return err
	}
	t, err := token.Parse(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	gateway, err := netip.ParseAddrPort(t.Address)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	dialling := make(chan struct{}, 16)
	var open atomic.Int64
	for range count {
		group.Go(func() error {
			dialling <- struct{}{}
			_, key, err := ed25519.GenerateKey(rand.Reader)
			if err != nil {
				return err
			}
			dialer := tunnel.Dialer{Key: key, Pin: t.Pin, Secret: t.SecretText()}
			s, err := dialer.Dial(ctx, gateway)
			<-dialling
			if err != nil {
				return fmt.Errorf("open session %d: %w", open.Load()+1, err)
			}
			defer s.Close("the measurement is over")
			if open.Add(1) == int64(count) {
				fmt.Println(opened)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-s.Context().Done():
				return fmt.Errorf("a session ended: %w", context.Cause(s.Context()))
			}
		})
	}
	return group.Wait()
}
