package sidecar

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/settings"
	"github.com/quicvpn/quicvpn/netstack"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A TCPMode says how TCP connections that come as packets go to the gateway.
type TCPMode int

const (
	// TCPAuto carries a connection as a flow where the way to the gateway is long,
	// as it is when the connection begins, and as packets where it is short.
	TCPAuto TCPMode = iota
	// TCPPacket carries all of them as packets: TCP works from end to end, and
	// outlives the gateway's restart.
	TCPPacket
	// TCPFlow ends all of them here and has the gateway connect: each goes through
	// the tunnel as a stream of its own, which a long way with losses does not slow.
	TCPFlow
)

func (m TCPMode) String() string {
	switch m {
	case TCPAuto:
		return "auto"
	case TCPPacket:
		return "packet"
	case TCPFlow:
		return "flow"
	}
	return "TCPMode(" + strconv.Itoa(int(m)) + ")"
}

// MarshalText and UnmarshalText are for files.
func (m TCPMode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

func (m *TCPMode) UnmarshalText(text []byte) (err error) {
	*m, err = settings.Named(TCPAuto, TCPPacket, TCPFlow)(string(text))
	return err
}

// farAway is the round trip time to the gateway, at its shortest, from which TCPAuto
// takes flows.
const farAway = 5 * time.Millisecond

// namePort is that of name servers.
const namePort = 53

// EndsTCP reports whether a connection to an address, which begins now, is to be
// ended on this side and carried as a flow. Those to other members of the network,
// and to the gateway itself, never are: there is nobody to dial for them. Nor are
// those to name servers, in whose place the gateway answers.
func (l *Link) EndsTCP(to netip.AddrPort) bool {
	if l.cfg.TCP == TCPPacket || to.Port() == namePort {
		return false
	}
	s := l.session()
	if s == nil {
		return l.cfg.TCP == TCPFlow // Dial waits for one
	}
	if l.cfg.TCP == TCPAuto && s.MinRTT() < farAway {
		return false
	}
	return !slices.ContainsFunc(l.Peers(), func(p netip.Prefix) bool { return p.Contains(to.Addr()) })
}

// An Ender ends TCP connections that come as packets, where LinkConfig.TCP says so,
// and has the gateway of a link open them anew. It costs nothing before the first.
type Ender struct {
	link *Link
	out  func(queue int, pkts []packet.Packet)

	stack atomic.Pointer[netstack.Stack] // nil before the first
	mu    sync.Mutex                     // guards over, and who makes the stack
	over  bool
}

// NewEnder returns an Ender whose answers go to out, which must not block. All
// packets of a connection come with one queue number.
func NewEnder(link *Link, out func(queue int, pkts []packet.Packet)) *Ender {
	return &Ender{link: link, out: out}
}

// Stack returns what ends the connections, for those who listen there. It returns
// net.ErrClosed after Close.
func (e *Ender) Stack() (*netstack.Stack, error) {
	if s := e.stack.Load(); s != nil {
		return s, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if s := e.stack.Load(); s != nil {
		return s, nil
	}
	if e.over {
		return nil, net.ErrClosed
	}
	s, err := netstack.New(netstack.Config{
		MTU:    maxMTU,
		Output: e.output,
		Dial: func(ctx context.Context, _, to netip.AddrPort) (net.Conn, error) {
			return e.link.Dial(ctx, "tcp", to.String())
		},
		Drops: e.link.cfg.Drops,
	})
	if err == nil {
		e.stack.Store(s)
	}
	return s, err
}

func (e *Ender) output(pkts []packet.Packet) {
	h, err := packet.Parse(pkts[0].Data)
	if err != nil {
		e.link.cfg.Drops.Add(packet.DropMalformed, len(pkts))
		return
	}
	e.out(int(packet.FlowHash(h, pkts[0].Data)>>1), pkts)
}

// Close resets the connections that are ended here.
func (e *Ender) Close() error {
	e.mu.Lock()
	e.over = true
	e.mu.Unlock()
	if s := e.stack.Load(); s != nil {
		return s.Close()
	}
	return nil
}

// Ends reports whether a packet that leaves, with its header, is one for Input.
func (e *Ender) Ends(p *packet.Packet, h packet.Header) bool {
	if h.Proto != packet.TCP || h.Fragment {
		return false
	}
	claim := netstack.Foreign
	s := e.stack.Load()
	if s != nil {
		claim = s.Takes(p, h)
	} else if begins(p, h) {
		claim = netstack.Begins
	}
	switch claim {
	case netstack.Held:
		return true
	case netstack.Begins:
		if !e.link.EndsTCP(netip.AddrPortFrom(h.Dst, h.DstPort)) {
			return false
		}
		if s == nil {
			if _, err := e.Stack(); err != nil {
				e.link.cfg.Log.Debug("connections cannot be ended here; they pass as packets", "error", err)
				return false
			}
		}
		return true
	}
	return false
}

// begins reports whether a packet of TCP begins a connection.
func begins(p *packet.Packet, h packet.Header) bool {
	const fin, syn, rst, ack = 1, 2, 4, 16
	return h.HeaderLen > h.IPLen && p.Data[h.IPLen+13]&(fin|syn|rst|ack) == syn
}

// Input takes packets of which Ends is true, which it borrows. It does not block.
func (e *Ender) Input(pkts []packet.Packet) {
	if s := e.stack.Load(); s != nil {
		s.Input(pkts)
	}
}

// send passes on what a device reads: to the gateway as packets, but for what is to
// be ended.
func (e *Ender) send(queue int, pkts []packet.Packet, errs tunnel.Sink) {
	start, run := 0, false
	for i := range pkts {
		ends := false
		if h, err := packet.Parse(pkts[i].Data); err == nil {
			ends = e.Ends(&pkts[i], h)
		}
		if ends != run {
			e.pass(queue, pkts[start:i], run, errs)
			start, run = i, ends
		}
	}
	e.pass(queue, pkts[start:], run, errs)
}

func (e *Ender) pass(queue int, pkts []packet.Packet, ends bool, errs tunnel.Sink) {
	switch {
	case len(pkts) == 0:
	case ends:
		e.Input(pkts)
	default:
		e.link.Send(queue, pkts, errs)
	}
}
