// Package userspace is a way out for the packets of clients that takes no privilege:
// they leave by ordinary sockets of the gateway's host, and what comes back is made
// into packets.
//
//   - A UDP socket, or one for ICMP echo, stands for each endpoint of a client, whatever
//     it sends to (RFC 4787, endpoint-independent mapping), and takes answers only from
//     addresses that were sent to.
//   - TCP connections end in package netstack, which answers when the gateway has
//     connected.
//   - What else there is, is refused.
//
// It does not judge where a client may go: who calls Write has, and Config.Dial does.
package userspace

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/netstack"
)

// A Config says what an Exit works for. All but Log and Drops is required.
type Config struct {
	// Do calls a function in the network namespace by which packets leave.
	Do func(func() error) error
	// Dial connects for a client's TCP, if the client may reach the address.
	Dial func(ctx context.Context, from, to netip.AddrPort) (net.Conn, error)
	// Owner names who has a client's address now, or returns "" for nobody.
	Owner func(netip.Addr) string
	// Take has a client's address take a place for a socket, which release gives back.
	Take func(from netip.Addr) (release func(), ok bool)
	// Answer takes packets for clients, which it borrows. All packets of a flow have
	// one queue, of Queues.
	Answer func(queue int, pkts []packet.Packet)
	Queues int
	// Refuse answers a client's packet by an ICMP error.
	Refuse func(orig []byte, why packet.Unreachable)
	// Exceeded answers one whose hop limit ran out.
	Exceeded func(orig []byte)
	Drops    *packet.Drops
	Log      *slog.Logger
}

const (
	// mtu of what the TCP sends is one that each session carries.
	mtu = 1280
	// sweepInterval is how often flows are looked at that may be over.
	sweepInterval = 5 * time.Second
	// absence is for how long a client may be away, as in an outage, without losing
	// its flows.
	absence = 30 * time.Second
)

// An Exit takes packets that leave. It is safe for concurrent use.
type Exit struct {
	cfg   Config
	stack *netstack.Stack
	echo  bool // ICMP echo may leave

	mu      sync.Mutex // guards what follows, and additions to running
	closed  bool
	flows   map[key]*flow
	conns   map[*conn]struct{}
	running sync.WaitGroup
}

// New returns an Exit, which lives until Close.
func New(cfg Config) (*Exit, error) {
	e := &Exit{cfg: cfg, flows: make(map[key]*flow), conns: make(map[*conn]struct{})}
	if e.cfg.Log == nil {
		e.cfg.Log = slog.New(slog.DiscardHandler)
	}
	if e.cfg.Drops == nil {
		e.cfg.Drops = new(packet.Drops)
	}
	err := cfg.Do(func() error { return mayPing() })
	if e.echo = err == nil; !e.echo {
		e.cfg.Log.Warn("pings of clients are refused: the kernel lets this user open no socket for them; "+
			"run `sysctl -w net.ipv4.ping_group_range=\"0 2147483647\"` and start the gateway anew", "error", err)
	}
	e.stack, err = netstack.New(netstack.Config{MTU: mtu, Dial: e.dial, Output: e.output, Drops: e.cfg.Drops})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// Close ends all flows and returns when that is done.
func (e *Exit) Close() error {
	e.mu.Lock()
	e.closed = true
	for _, f := range e.flows {
		f.sock.close()
	}
	e.mu.Unlock()
	err := e.stack.Close()
	e.running.Wait()
	return err
}

// Run ends flows that are idle, and those of clients that are gone, until ctx ends.
func (e *Exit) Run(ctx context.Context) {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			e.sweep(now)
		}
	}
}

func (e *Exit) sweep(now time.Time) {
	var lost []*conn
	e.mu.Lock()
	for _, f := range e.flows {
		if now.Sub(time.Unix(0, f.used.Load())) > time.Duration(f.idle.Load()) || e.gone(&f.owned, f.key.from.Addr(), now) {
			f.sock.close() // which ends its reader, and that the flow
		}
	}
	for c := range e.conns {
		if e.gone(&c.owned, c.from, now) {
			lost = append(lost, c)
		}
	}
	e.mu.Unlock()
	for _, c := range lost {
		c.Reset()
	}
}

// owned is what belongs to a client.
type owned struct {
	owner string
	away  time.Time // since when, if it is
}

// gone reports whether a client has been away for long, or another has its address.
// The caller has the lock.
func (e *Exit) gone(o *owned, from netip.Addr, now time.Time) bool {
	switch e.cfg.Owner(from) {
	case o.owner:
		o.away = time.Time{}
		return false
	case "":
		if o.away.IsZero() {
			o.away = now
		}
		return now.Sub(o.away) > absence
	}
	return true
}

// Write takes packets that clients may send, and borrows them.
func (e *Exit) Write(pkts []packet.Packet) error {
	for i := range pkts {
		pkt := &pkts[i]
		h, err := packet.Parse(pkt.Data)
		if err != nil {
			e.cfg.Drops.Add(packet.DropMalformed, 1)
			continue
		}
		if h.HopLimit <= 1 {
			e.cfg.Drops.Add(packet.DropHopLimit, 1)
			e.cfg.Exceeded(pkt.Data)
			continue
		}
		switch {
		case h.Fragment:
			// A socket sends whole datagrams.
			e.refuse(pkt, packet.AdminProhibited)
		case h.Proto == packet.TCP:
			e.stack.Input(pkts[i : i+1])
		case h.Proto == packet.UDP:
			e.sendUDP(pkt, h)
		case isEcho(pkt.Data, h) && e.echo:
			e.sendEcho(pkt, h)
		default:
			e.refuse(pkt, packet.AdminProhibited)
		}
	}
	return nil
}

func (e *Exit) refuse(pkt *packet.Packet, why packet.Unreachable) {
	e.cfg.Drops.Add(packet.DropDestination, 1)
	e.cfg.Refuse(pkt.Data, why)
}

// output takes what the TCP sends.
func (e *Exit) output(pkts []packet.Packet) {
	start, run := 0, -1
	for i := range pkts {
		queue := 0
		if h, err := packet.Parse(pkts[i].Data); err == nil {
			queue = int(packet.FlowHash(h, pkts[i].Data) % uint32(e.cfg.Queues))
		}
		if queue != run && i > start {
			e.cfg.Answer(run, pkts[start:i])
			start = i
		}
		run = queue
	}
	if start < len(pkts) {
		e.cfg.Answer(run, pkts[start:])
	}
}

// A conn is a TCP connection that a client has.
type conn struct {
	*net.TCPConn
	owned
	from netip.Addr
	end  func()
}

func (e *Exit) dial(ctx context.Context, from, to netip.AddrPort) (net.Conn, error) {
	owner := e.cfg.Owner(from.Addr())
	release, ok := e.cfg.Take(from.Addr())
	if !ok || owner == "" {
		if ok {
			release()
		}
		e.cfg.Drops.Add(packet.DropQueueFull, 1)
		return nil, errors.New("the client has as many sockets as it may")
	}
	up, err := e.cfg.Dial(ctx, from, to)
	if err != nil {
		release()
		return nil, err
	}
	c := &conn{TCPConn: up.(*net.TCPConn), owned: owned{owner: owner}, from: from.Addr()}
	c.end = sync.OnceFunc(func() {
		e.mu.Lock()
		delete(e.conns, c)
		e.mu.Unlock()
		release()
	})
	e.mu.Lock()
	e.conns[c] = struct{}{}
	e.mu.Unlock()
	return c, nil
}

// Reset aborts the connection.
func (c *conn) Reset() error {
	return errors.Join(c.SetLinger(0), c.Close())
}

func (c *conn) Close() error {
	c.end()
	return c.TCPConn.Close()
}
