package gateway

import (
	"net/netip"
	"sync"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// An answer is an ICMP error in the making.
type answer struct {
	buf  []byte
	pkts [1]packet.Packet
}

var answers = sync.Pool{New: func() any { return &answer{buf: make([]byte, 0, 1280)} }}

func (p *port) answerUnreachable(queue int, orig []byte, why packet.Unreachable) {
	p.answer(queue, orig, func(dst []byte, from netip.Addr) []byte {
		return packet.AppendUnreachable(dst, orig, from, why)
	})
}

func (p *port) answerTimeExceeded(queue int, orig []byte) {
	p.answer(queue, orig, func(dst []byte, from netip.Addr) []byte {
		return packet.AppendTimeExceeded(dst, orig, from)
	})
}

// answer sends the client an ICMP error about its packet, unless it had many.
func (p *port) answer(queue int, orig []byte, appendTo func(dst []byte, from netip.Addr) []byte) {
	if !p.limit.Allow(time.Now()) {
		return
	}
	from := p.router.own4
	if orig[0]>>4 == 6 {
		from = p.router.own6
	}
	a := answers.Get().(*answer)
	defer answers.Put(a)
	b := appendTo(a.buf[:0], from)
	if b == nil {
		return
	}
	a.pkts[0] = packet.Packet{Data: b}
	p.session.Send(queue, a.pkts[:], nil)
}
