package netlab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// A Ping is a series of echo requests.
type Ping struct {
	To netip.Addr
	// Count of requests; zero means one.
	Count int
	// Interval between them; zero means 100 ms.
	Interval time.Duration
	// Size of the payload; 8 at least.
	Size int
	// Wait for the last answer; zero means a second.
	Wait time.Duration
}

// Ping sends echo requests from the namespace, at their pace whatever comes
// back, waits for the last answer, and returns the round-trip times of those
// that were answered, in ascending order.
func (n *NS) Ping(ctx context.Context, p Ping) (rtts []time.Duration, err error) {
	network, local := "ip4:icmp", "0.0.0.0"
	var request, reply icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	protocol := 1
	if p.To.Is6() {
		network, local, protocol = "ip6:ipv6-icmp", "::", 58
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	if p.Interval == 0 {
		p.Interval = 100 * time.Millisecond
	}
	if p.Wait == 0 {
		p.Wait = time.Second
	}
	p.Count = max(p.Count, 1)

	var conn *icmp.PacketConn
	if err := n.Do(func() error {
		conn, err = icmp.ListenPacket(network, local)
		return err
	}); err != nil {
		return nil, fmt.Errorf("ping from %s: %w", n.Name, err)
	}
	defer conn.Close()

	id := rand.IntN(1 << 16)
	start := time.Now()
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 64<<10)
		for len(rtts) < p.Count {
			size, _, err := conn.ReadFrom(buf)
			if err != nil {
				return // the deadline, or closed
			}
			now := time.Since(start)
			m, err := icmp.ParseMessage(protocol, buf[:size])
			if err != nil || m.Type != reply {
				continue
			}
			if e, ok := m.Body.(*icmp.Echo); ok && e.ID == id && len(e.Data) >= 8 {
				rtts = append(rtts, now-time.Duration(binary.BigEndian.Uint64(e.Data)))
			}
		}
	})
	err = func() error {
		data := make([]byte, max(p.Size, 8))
		for seq := range p.Count {
			if seq > 0 && sleep(ctx, p.Interval) != nil {
				return ctx.Err()
			}
			binary.BigEndian.PutUint64(data, uint64(time.Since(start)))
			m := icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: seq, Data: data}}
			raw, err := m.Marshal(nil)
			if err != nil {
				return err
			}
			if _, err := conn.WriteTo(raw, &net.IPAddr{IP: p.To.AsSlice()}); err != nil {
				return fmt.Errorf("ping %s from %s: %w", p.To, n.Name, err)
			}
		}
		return nil
	}()
	last := time.Now().Add(p.Wait)
	if err != nil {
		last = time.Now()
	}
	err = errors.Join(err, conn.SetReadDeadline(last))
	wg.Wait()
	slices.Sort(rtts)
	return rtts, err
}

// WaitPing returns once an echo request from the namespace is answered.
func (n *NS) WaitPing(ctx context.Context, to netip.Addr) error {
	for {
		rtts, err := n.Ping(ctx, Ping{To: to, Wait: 5 * retry})
		if len(rtts) > 0 {
			return nil
		}
		if sleep(ctx, retry) != nil {
			return fmt.Errorf("wait for an answer of %s: %w (%v)", to, ctx.Err(), err)
		}
	}
}
