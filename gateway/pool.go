package gateway

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
)

// defaultPool4 is a part of 10.0.0.0/8 that neither Docker nor the usual home
// and office networks take.
var defaultPool4 = netip.MustParsePrefix("10.91.0.0/16")

// gatewayHost is the gateway's own host number in each pool.
const gatewayHost = 1

// blockSize is how many host numbers a block has: those of a /24 and of a /120.
const blockSize = 256

// numbers say which addresses host numbers stand for: one in each of the two
// prefixes, so that a client's IPv4 and IPv6 addresses show the same one. A run
// is blockSize of them, from a multiple of it on.
type numbers struct {
	v4, v6 netip.Prefix
	end    uint32 // the first number that is too high
}

func newNumbers(v4, v6 netip.Prefix) numbers {
	end := uint64(1)<<(32-v4.Bits()) - 1 // without the broadcast address
	if host6 := 128 - v6.Bits(); host6 < 32 {
		end = min(end, 1<<host6)
	}
	return numbers{v4: v4, v6: v6, end: uint32(min(end, math.MaxUint32))}
}

// runs returns how many runs there are, of which the last may be cut short.
func (n *numbers) runs() uint32 { return (n.end + blockSize - 1) / blockSize }

// blockRuns returns the first run that may not be a block: one that has numbers
// which are no client's. Run 0, which has the gateway's, may not either.
func (n *numbers) blockRuns() uint32 { return n.end / blockSize }

// A pool hands out host numbers one by one, and whole runs of them as blocks.
//
// Numbers come from the bottom and blocks from the top, and a number from a run
// that has some already if it can: so both find room for as long as possible.
type pool struct {
	numbers
	next      uint32 // where the search for a free number starts
	nextBlock uint32 // the run below which the search for a free one starts
	used      map[uint32]struct{}
	taken     []uint16 // by run: how many of its numbers are used, or isBlock
}

const isBlock = math.MaxUint16

func newPool(v4, v6 netip.Prefix) pool {
	n := newNumbers(v4, v6)
	return pool{
		numbers:   n,
		next:      gatewayHost + 1,
		nextBlock: n.blockRuns(),
		used:      make(map[uint32]struct{}),
		taken:     make([]uint16, n.runs()),
	}
}

// allocate takes a free number. It goes around, so that a freed one is given to
// somebody else as late as possible.
func (p *pool) allocate() (host uint32, ok bool) {
	n, first := p.runs(), p.next/blockSize
	for i := range n + 1 {
		run := (first + i) % n
		from := run * blockSize
		if i == 0 {
			from = p.next
		}
		if run != 0 && p.taken[run] == 0 || p.taken[run] >= blockSize {
			continue
		}
		for host := from; host < (run+1)*blockSize; host++ {
			if p.take(host) {
				return host, true
			}
		}
	}
	if run := slices.Index(p.taken, 0); run >= 0 {
		host = max(uint32(run)*blockSize, gatewayHost+1)
		return host, p.take(host)
	}
	return 0, false
}

// take takes a given number, unless it is taken or not a client's.
func (p *pool) take(host uint32) bool {
	if host <= gatewayHost || host >= p.end || p.taken[host/blockSize] == isBlock {
		return false
	}
	if _, taken := p.used[host]; taken {
		return false
	}
	p.used[host] = struct{}{}
	p.taken[host/blockSize]++
	p.next = host + 1
	return true
}

// free takes back what take or allocate gave.
func (p *pool) free(host uint32) {
	delete(p.used, host)
	p.taken[host/blockSize]--
}

// allocateBlock takes a free run, and goes around as well.
func (p *pool) allocateBlock() (run uint32, ok bool) {
	n := p.blockRuns()
	for i := range n {
		if run = (p.nextBlock + n - 1 - i) % n; p.takeBlock(run) {
			return run, true
		}
	}
	return 0, false
}

// takeBlock takes a given run, unless some of it is taken or not a client's.
func (p *pool) takeBlock(run uint32) bool {
	if run == 0 || run >= p.blockRuns() || p.taken[run] != 0 {
		return false
	}
	p.taken[run] = isBlock
	p.nextBlock = run
	return true
}

func (p *pool) freeBlock(run uint32) { p.taken[run] = 0 }

// addresses returns what a number stands for.
func (n *numbers) addresses(host uint32) (v4, v6 netip.Addr) {
	b4, b6 := n.v4.Addr().As4(), n.v6.Addr().As16()
	binary.BigEndian.PutUint32(b4[:], binary.BigEndian.Uint32(b4[:])+host)
	low := b6[8:] // a carry out of it would need more than 32 host bits in it
	binary.BigEndian.PutUint64(low, binary.BigEndian.Uint64(low)+uint64(host))
	return netip.AddrFrom4(b4), netip.AddrFrom16(b6)
}

// number is the reverse of addresses; ok is false where they do not belong
// together.
func (n *numbers) number(v4, v6 netip.Addr) (host uint32, ok bool) {
	if !v4.Is4() || !n.v4.Contains(v4) {
		return 0, false
	}
	host, _ = n.of(v4)
	if w4, w6 := n.addresses(host); w4 != v4 || w6 != v6 {
		return 0, false
	}
	return host, true
}

// of returns the number of one address; ok is false if it has none. It may be
// none of a client's.
func (n *numbers) of(a netip.Addr) (host uint32, ok bool) {
	switch {
	case n.v4.Contains(a):
		b, base := a.As4(), n.v4.Addr().As4()
		return binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(base[:]), true
	case n.v6.Contains(a):
		b, base := a.As16(), n.v6.Addr().As16()
		host := binary.BigEndian.Uint64(b[8:]) - binary.BigEndian.Uint64(base[8:])
		return uint32(host), host <= math.MaxUint32 && [8]byte(b[:8]) == [8]byte(base[:8])
	}
	return 0, false
}

// block returns the prefixes of a run.
func (n *numbers) block(run uint32) (v4, v6 netip.Prefix) {
	a4, a6 := n.addresses(run * blockSize)
	return netip.PrefixFrom(a4, 24), netip.PrefixFrom(a6, 120)
}

// run is the reverse of block; ok is false where they do not belong together.
func (n *numbers) run(v4, v6 netip.Prefix) (run uint32, ok bool) {
	host, ok := n.number(v4.Addr(), v6.Addr())
	if !ok || v4.Bits() != 24 || v6.Bits() != 120 || host%blockSize != 0 {
		return 0, false
	}
	return host / blockSize, true
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
