package gateway

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// ICMP and ICMPv6 echo.
const (
	echoReply4   = 0
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply6   = 129

	icmpHeader = 8
	// answerHopLimit is that of an answer, which starts at the gateway.
	answerHopLimit = 64
)

// answerEcho makes an echo request into the reply, in place, and reports whether
// it was one. Fragments are not: who pings the gateway with more than fits a
// packet learns nothing from the answer.
func answerEcho(b []byte, h *packet.Header) bool {
	if h.Fragment || !h.Plain() || len(b) < h.IPLen+icmpHeader {
		return false
	}
	t := b[h.IPLen:]
	var kind byte
	switch {
	case h.Proto == packet.ICMP && h.Version == 4 && t[0] == echoRequest4 && t[1] == 0:
		kind = echoReply4
		swap(b[12:16], b[16:20])
		// The swap leaves the header's checksum as it is, the hop limit does not.
		was := binary.BigEndian.Uint16(b[8:])
		b[8] = answerHopLimit
		updateChecksum(b[10:], was, binary.BigEndian.Uint16(b[8:]))
	case h.Proto == packet.ICMPv6 && h.Version == 6 && t[0] == echoRequest6 && t[1] == 0:
		kind = echoReply6
		swap(b[8:24], b[24:40])
		b[7] = answerHopLimit
	default:
		return false
	}
	was := binary.BigEndian.Uint16(t)
	t[0] = kind
	updateChecksum(t[2:], was, binary.BigEndian.Uint16(t))
	return true
}

func swap(a, b []byte) {
	for i := range a {
		a[i], b[i] = b[i], a[i]
	}
}

// updateChecksum follows the change of one word (RFC 1624, equation 3).
func updateChecksum(sum []byte, was, is uint16) {
	n := uint32(^binary.BigEndian.Uint16(sum)) + uint32(^was) + uint32(is)
	n = n>>16 + n&0xffff
	n = n>>16 + n&0xffff
	binary.BigEndian.PutUint16(sum, ^uint16(n))
}

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
	if !p.limit.allow(time.Now()) {
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

// A limiter lets answers through at a rate, and a burst of them before. The zero
// value is ready; it is safe for concurrent use.
type limiter struct {
	// next is when the answers so far will have used up the rate, in Unix
	// nanoseconds.
	next atomic.Int64
}

const (
	answerInterval = 10 * time.Millisecond
	answerBurst    = 100
)

func (l *limiter) allow(at time.Time) bool {
	now := at.UnixNano()
	for {
		next := l.next.Load()
		from := max(next, now)
		if from-now > int64(answerInterval)*(answerBurst-1) {
			return false
		}
		if l.next.CompareAndSwap(next, from+int64(answerInterval)) {
			return true
		}
	}
}
