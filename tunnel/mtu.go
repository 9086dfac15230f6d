package tunnel

import (
	"net/netip"
	"sync/atomic"
)

const (
	// quicOverhead is what quic-go keeps free in a packet beside a datagram's
	// payload: short header with the longest connection ID, packet number, tag.
	quicOverhead = 37

	// firstPacketSize is the UDP payload that a handshake tries first. It leaves
	// room for discovery to grow, by which quic-go's pacer learns the true size.
	firstPacketSize = 1400
	// minPacketSize always fits (RFC 9000, section 14).
	minPacketSize = 1200
)

// fallbackSizes are tried one after the other when larger handshakes get no
// answer. The first still carries IPv6's 1,280 bytes in a datagram.
var fallbackSizes = [...]int{1320, minPacketSize}

// packetSize returns the UDP payload that an IP packet of mtu bytes carries.
func packetSize(remote netip.Addr, mtu int) int {
	if remote.Unmap().Is4() {
		return mtu - 20 - 8
	}
	return mtu - 40 - 8
}

// pathMTU is the largest packet that one datagram carries now.
type pathMTU struct {
	max     int // the configured cap; 0 is none
	mtu     atomic.Int32
	changed chan struct{}
}

func (p *pathMTU) update(space int) {
	if p.max > 0 {
		space = min(space, p.max)
	}
	if space <= 0 || p.mtu.Swap(int32(space)) == int32(space) {
		return
	}
	select {
	case p.changed <- struct{}{}:
	default:
	}
}
