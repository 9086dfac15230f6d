package gateway

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
)

// defaultPool4 is a part of 10.0.0.0/8 that neither Docker nor the usual home
// and office networks take.
var defaultPool4 = netip.MustParsePrefix("10.91.0.0/16")

// gatewayHost is the gateway's own host number in each pool.
const gatewayHost = 1

// A pool hands out host numbers. A number stands for one address in each of the
// two prefixes, so that a client's IPv4 and IPv6 addresses show the same one.
type pool struct {
	v4, v6 netip.Prefix
	end    uint32 // the first number that is too high
	next   uint32 // where the search for a free one starts
	used   map[uint32]struct{}
}

func newPool(v4, v6 netip.Prefix) pool {
	end := uint64(1)<<(32-v4.Bits()) - 1 // without the broadcast address
	if host6 := 128 - v6.Bits(); host6 < 32 {
		end = min(end, 1<<host6)
	}
	return pool{
		v4: v4, v6: v6,
		end:  uint32(min(end, math.MaxUint32)),
		next: gatewayHost + 1,
		used: make(map[uint32]struct{}),
	}
}

// allocate takes a free number. It goes around, so that a freed one is given to
// somebody else as late as possible.
func (p *pool) allocate() (host uint32, ok bool) {
	const first = gatewayHost + 1
	if uint32(len(p.used)) >= p.end-first {
		return 0, false
	}
	for host = p.next; ; host++ {
		if host >= p.end {
			host = first
		}
		if p.take(host) {
			return host, true
		}
	}
}

// take takes a given number, unless it is taken or not a client's.
func (p *pool) take(host uint32) bool {
	if host <= gatewayHost || host >= p.end {
		return false
	}
	if _, taken := p.used[host]; taken {
		return false
	}
	p.used[host] = struct{}{}
	p.next = host + 1
	return true
}

func (p *pool) free(host uint32) { delete(p.used, host) }

// addresses returns what a number stands for.
func (p *pool) addresses(host uint32) (v4, v6 netip.Addr) {
	b4, b6 := p.v4.Addr().As4(), p.v6.Addr().As16()
	binary.BigEndian.PutUint32(b4[:], binary.BigEndian.Uint32(b4[:])+host)
	low := b6[8:] // a carry out of it would need more than 32 host bits in it
	binary.BigEndian.PutUint64(low, binary.BigEndian.Uint64(low)+uint64(host))
	return netip.AddrFrom4(b4), netip.AddrFrom16(b6)
}

// number is the reverse of addresses; ok is false where they do not belong
// together.
func (p *pool) number(v4, v6 netip.Addr) (host uint32, ok bool) {
	if !v4.Is4() || !p.v4.Contains(v4) {
		return 0, false
	}
	a, base := v4.As4(), p.v4.Addr().As4()
	host = binary.BigEndian.Uint32(a[:]) - binary.BigEndian.Uint32(base[:])
	if w4, w6 := p.addresses(host); w4 != v4 || w6 != v6 {
		return 0, false
	}
	return host, true
}

// checkPool4 and checkPool6 say what is wrong with a pool; nil if nothing is.
func checkPool4(p netip.Prefix) error {
	return checkPool("IPv4", p, p.Addr().Is4(), 8, 30)
}

func checkPool6(p netip.Prefix) error {
	return checkPool("IPv6", p, p.Addr().Is6() && !p.Addr().Is4In6(), 16, 126)
}

func checkPool(version string, p netip.Prefix, family bool, minBits, maxBits int) error {
	a := p.Addr()
	switch {
	case !p.IsValid() || !family:
		return fmt.Errorf("the %s pool %s is not an %s prefix", version, p, version)
	case p != p.Masked():
		return fmt.Errorf("the %s pool %s has bits set beyond its length: did you mean %s?", version, p, p.Masked())
	case p.Bits() < minBits || p.Bits() > maxBits:
		return fmt.Errorf("the %s pool %s is not between a /%d and a /%d", version, p, minBits, maxBits)
	case a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.Is4() && a.As4()[0] >= 224:
		return fmt.Errorf("the %s pool %s is not one of unicast addresses: take a private one", version, p)
	}
	return nil
}
