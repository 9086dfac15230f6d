package sidecar

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// runAlone is Run without a TUN device: the session, and what goes through it by
// the proxies.
func (s *Sidecar) runAlone(ctx context.Context, proxies []net.Listener) error {
	probe, err := listenProbe()
	if err != nil {
		return err
	}
	defer probe.Close()
	var network atomic.Pointer[string]
	cfg := s.linkConfig()
	cfg.Connected = func(g tunnel.Grant) tunnel.Sink {
		network.Store(&g.Network)
		return unwanted{&s.drops}
	}
	link, err := newLink(cfg, wayOut{dial: s.dial, hint: hostHint})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return link.Run(ctx) })
	g.Go(func() error { return s.cfg.serveProxies(ctx, &link.dialer, proxies) })
	g.Go(func() error { return serveProbe(ctx, probe, link.answers) })
	g.Go(func() error {
		s.keepStatus(ctx, link, func(l LinkStatus) status {
			now := newStatus(l)
			now.Probe = probe.Addr().String()
			if name := network.Load(); name != nil {
				now.Network = *name
			}
			return now
		})
		return nil
	})
	err = g.Wait()
	s.cfg.Log.Info("stopped", "drops", s.drops.Snapshot())
	return err
}

// unwanted drops packets: there is no device for them.
type unwanted struct{ drops *packet.Drops }

func (u unwanted) WritePackets(_ int, pkts []packet.Packet) {
	u.drops.Add(packet.DropDevice, len(pkts))
}

// answers returns nil when the gateway has answered a request for a connection.
// The one that is asked for leads nowhere: the gateway refuses it, and that is an
// answer.
func (l *Link) answers(ctx context.Context) error {
	conn, err := l.DialTCP(ctx, "0.0.0.0:1")
	if err == nil {
		conn.Close()
	}
	if errors.Is(err, syscall.EACCES) {
		return nil
	}
	return err
}

// A probe is a socket by which a healthcheck, another process, has the sidecar ask
// the gateway. It belongs to the network namespace, as a TUN device would, and
// needs no file: paths of state directories may be too long for sockets.
func listenProbe() (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: "@quicvpn-" + rand.Text()})
	if err != nil {
		return nil, fmt.Errorf("open a socket for healthchecks: %w", err)
	}
	return l, nil
}

// probeTime bounds a probe: whoever has asked waits no longer.
const probeTime = 30 * time.Second

// probeGood is what a probe says when the gateway has answered; it says nothing when
// nobody waits any more, and otherwise why not.
const probeGood = "the gateway answers"

// serveProbe tells whoever connects whether the gateway answers. It asks for one
// at a time: everybody in the namespace may connect.
func serveProbe(ctx context.Context, l *net.UnixListener, answers func(context.Context) error) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			sleep(ctx, time.Second) // descriptors ran out
			continue
		}
		probe(ctx, conn, answers)
	}
}

func probe(ctx context.Context, conn net.Conn, answers func(context.Context) error) {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		conn.Read(make([]byte, 1)) // returns when the other end gives up
		cancel()
	}()
	if err := answers(ctx); err == nil {
		io.WriteString(conn, probeGood)
	} else if ctx.Err() == nil {
		io.WriteString(conn, err.Error())
	}
	conn.Close()
	<-gone
}

// askProbe returns how long the gateway took to answer the sidecar.
func askProbe(ctx context.Context, address string) (time.Duration, error) {
	started := time.Now()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", address)
	if err != nil {
		return 0, errors.New("there is no sidecar here: it was killed, or runs in another network namespace: start it again, or run the healthcheck in its container")
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	text, err := io.ReadAll(conn)
	switch {
	case err != nil || len(text) == 0:
		return 0, errUnanswered
	case string(text) != probeGood:
		return 0, fmt.Errorf("the gateway cannot be asked: %s", text)
	}
	return time.Since(started), nil
}
