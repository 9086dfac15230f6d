package sidecar

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
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

// farAway is the round trip time to the gateway from which TCPAuto takes flows.
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
	if l.cfg.TCP == TCPAuto && s.RTT() < farAway {
		return false
	}
	return !slices.ContainsFunc(l.Peers(), func(p netip.Prefix) bool { return p.Contains(to.Addr()) })
}

// An ender stands between a device and a link: it ends what is to be carried as
// flows, and lets the rest pass as packets.
type ender struct {
	link  *Link
	stack *netstack.Stack // nil where all pass
}

// newEnder returns an ender whose answers go to out.
func newEnder(link *Link, out tunnel.Sink) (*ender, error) {
	e := &ender{link: link}
	if link.cfg.TCP == TCPPacket {
		return e, nil
	}
	var err error
	e.stack, err = netstack.New(netstack.Config{
		MTU: maxMTU,
		Output: func(pkts []packet.Packet) {
			h, err := packet.Parse(pkts[0].Data)
			if err != nil {
				link.cfg.Drops.Add(packet.DropMalformed, len(pkts))
				return
			}
			out.WritePackets(int(packet.FlowHash(h, pkts[0].Data)>>1), pkts)
		},
		Dial: func(ctx context.Context, _, to netip.AddrPort) (net.Conn, error) {
			return link.Dial(ctx, "tcp", to.String())
		},
		Drops: link.cfg.Drops,
	})
	return e, err
}

// Close resets the connections that are ended here.
func (e *ender) Close() error {
	if e.stack == nil {
		return nil
	}
	return e.stack.Close()
}

// send takes packets as Link.Send does.
func (e *ender) send(queue int, pkts []packet.Packet, errs tunnel.Sink) {
	if e.stack == nil {
		e.link.Send(queue, pkts, errs)
		return
	}
	for len(pkts) > 0 {
		ended, n := e.run(pkts)
		if ended {
			e.stack.Input(pkts[:n])
		} else {
			e.link.Send(queue, pkts[:n], errs)
		}
		pkts = pkts[n:]
	}
}

// run returns for how many packets the first one's answer holds.
func (e *ender) run(pkts []packet.Packet) (ended bool, n int) {
	ended = e.ends(&pkts[0])
	for n = 1; n < len(pkts) && e.ends(&pkts[n]) == ended; n++ {
	}
	return ended, n
}

func (e *ender) ends(p *packet.Packet) bool {
	h, err := packet.Parse(p.Data)
	if err != nil || h.Proto != packet.TCP {
		return false
	}
	switch e.stack.Takes(p, h) {
	case netstack.Held:
		return true
	case netstack.Begins:
		return e.link.EndsTCP(netip.AddrPortFrom(h.Dst, h.DstPort))
	}
	return false
}
