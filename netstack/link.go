package netstack

import (
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// maxPacket is the longest packet that leaves: a super-packet, too, has to say its
// length in the IP header.
const maxPacket = 65535

// A link is what gVisor has for a network device. It says that checksums of what
// comes are verified, and that it cuts super-packets itself; their checksums, and
// those of all segments but a few of TCP, are then partial.
type link struct {
	mtu    uint32
	output func([]packet.Packet)
	up     atomic.Pointer[stack.NetworkDispatcher]
	closed atomic.Bool
}

var (
	_ stack.LinkEndpoint = (*link)(nil)
	_ stack.GSOEndpoint  = (*link)(nil)
)

// deliver hands a packet, with headers of n bytes, to gVisor, which keeps a copy.
// They have a piece of memory of their own: gVisor copies the whole piece, and be it
// 64 KiB, where it reads headers of a packet that is kept elsewhere too.
func (l *link) deliver(b []byte, n int) {
	up := l.up.Load()
	if up == nil {
		return
	}
	proto := header.IPv4ProtocolNumber
	if b[0]>>4 == 6 {
		proto = header.IPv6ProtocolNumber
	}
	in := buffer.MakeWithView(buffer.NewViewWithData(b[:n]))
	if len(b) > n {
		// It does not fail.
		_ = in.Append(buffer.NewViewWithData(b[n:]))
	}
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: in})
	(*up).DeliverNetworkPacket(proto, p)
	p.DecRef()
}

// An outPacket is a packet in one piece.
type outPacket struct {
	pkts [1]packet.Packet
	data [maxPacket]byte
}

var outPackets = sync.Pool{New: func() any { return new(outPacket) }}

// WritePackets is what gVisor sends by: a packet a call, mostly.
func (l *link) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	out := outPackets.Get().(*outPacket)
	defer outPackets.Put(out)
	for _, p := range list.AsSlice() {
		if l.closed.Load() || p.Size() > maxPacket {
			continue
		}
		n := 0
		for _, b := range p.AsSlices() {
			n += copy(out.data[n:], b)
		}
		out.pkts[0] = packet.Packet{Data: out.data[:n:n]}
		if gso := p.GSOOptions; gso.Type != stack.GSONone && gso.NeedsCsum {
			out.pkts[0].Flags = packet.Partial
			if p.Data().Size() > int(gso.MSS) {
				out.pkts[0].Segment = gso.MSS
			}
		}
		l.output(out.pkts[:])
	}
	return list.Len(), nil
}

// GSOMaxSize bounds the headers and the payload of a super-packet.
func (*link) GSOMaxSize() uint32 { return maxPacket }

func (*link) SupportedGSO() stack.SupportedGSO { return stack.HostGSOSupported }

func (*link) Capabilities() stack.LinkEndpointCapabilities { return stack.CapabilityRXChecksumOffload }

// Attach is called with nil where the device is removed.
func (l *link) Attach(up stack.NetworkDispatcher) {
	if up == nil {
		l.up.Store(nil)
		return
	}
	l.up.Store(&up)
}

func (l *link) IsAttached() bool { return l.up.Load() != nil }

func (l *link) MTU() uint32 { return l.mtu }

// What follows is for devices of another kind.

func (*link) SetMTU(uint32)                           {}
func (*link) MaxHeaderLength() uint16                 { return 0 }
func (*link) LinkAddress() tcpip.LinkAddress          { return "" }
func (*link) SetLinkAddress(tcpip.LinkAddress)        {}
func (*link) Wait()                                   {}
func (*link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }
func (*link) AddHeader(*stack.PacketBuffer)           {}
func (*link) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (*link) Close()                                  {}
func (*link) SetOnCloseAction(func())                 {}
