package packet

import "errors"

const (
	// MinSegment is the smallest segment size that a peer may send: what TCP
	// has where nobody announced one (RFC 9293 section 3.7.1).
	MinSegment = 536
	// MaxSegments bounds the segments of a peer's super-packet.
	MaxSegments = 128

	maxHeaderLen = 256 // of a super-packet
)

// TCP flags.
const (
	tcpFIN = 1 << iota
	tcpSYN
	tcpRST
	tcpPSH
	tcpACK
	tcpURG
	tcpECE
	tcpCWR
)

var (
	errFlags         = errors.New("unknown flags")
	errPartial       = errors.New("a partial checksum where there can be none")
	errSuperProto    = errors.New("a super-packet of something that is neither TCP nor UDP, or of a fragment")
	errSuperSegment  = errors.New("a super-packet with segments under 536 bytes")
	errSuperSegments = errors.New("a super-packet without or with too many segments")
	errSuperHeader   = errors.New("a super-packet with a header that its segments cannot have")
)

// Check says whether a packet that came from a peer, and that Parse accepts, can
// be what its Segment and Flags claim. Nothing else of the sender's is believed:
// all offsets come from the packet itself.
func (p *Packet) Check(h Header) error {
	if p.Flags&^(Partial|Verified) != 0 {
		return errFlags
	}
	if p.Flags&Partial != 0 && (h.Fragment || !h.transport()) {
		return errPartial
	}
	if p.Segment == 0 {
		return nil
	}
	if h.Fragment || !h.transport() {
		return errSuperProto
	}
	if h.HeaderLen > maxHeaderLen {
		return errSuperHeader
	}
	if h.Proto == TCP && p.Data[h.IPLen+13]&(tcpSYN|tcpRST) != 0 {
		return errSuperHeader
	}
	if p.Segment < MinSegment {
		return errSuperSegment
	}
	n := len(p.Data) - h.HeaderLen
	if n == 0 || n > MaxSegments*int(p.Segment) {
		return errSuperSegments
	}
	return nil
}
