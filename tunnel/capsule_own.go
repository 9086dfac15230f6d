package tunnel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/quic-go/quic-go/http3"
	"go4.org/netipx"
)

// Capsules that only quicvpn peers send each other; all others skip them (RFC
// 9297, section 3.2).
const (
	capsulePeers http3.CapsuleType = 0x31767074
	capsuleLeave http3.CapsuleType = 0x31767075
)

// A peerList is what a gateway says of Grant.Peers when they change. It is in
// the form of a routeAdvertisement, of ranges for all protocols that are one
// prefix each.
type peerList routeAdvertisement

func (peerList) capsuleType() http3.CapsuleType { return capsulePeers }
func (c peerList) appendValue(b []byte) []byte  { return routeAdvertisement(c).appendValue(b) }
func peerListOf(ps []netip.Prefix) (c peerList, err error) {
	ps = slices.Clone(ps)
	slices.SortFunc(ps, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	for _, p := range ps {
		if !p.IsValid() || checkAddr(p.Addr()) != nil {
			return nil, fmt.Errorf("peers: %v is no prefix", p)
		}
		r := netipx.RangeOfPrefix(p)
		c = append(c, ipRoute{Start: r.From(), End: r.To()})
	}
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("peers: %w", err)
	}
	return c, nil
}

func (c peerList) check() error {
	for _, r := range c {
		if r.Protocol != 0 {
			return fmt.Errorf("range %v-%v for protocol %d", r.Start, r.End, r.Protocol)
		}
		if _, ok := netipx.IPRangeFrom(r.Start, r.End).Prefix(); !ok {
			return fmt.Errorf("range %v-%v is no prefix", r.Start, r.End)
		}
	}
	return routeAdvertisement(c).check()
}

func (c peerList) prefixes() []netip.Prefix {
	ps := make([]netip.Prefix, len(c))
	for i, r := range c {
		ps[i], _ = netipx.IPRangeFrom(r.Start, r.End).Prefix() // which check saw
	}
	return ps
}

// A leave says that the client will not come back: the gateway may forget it.
type leave struct{}

func (leave) capsuleType() http3.CapsuleType { return capsuleLeave }
func (leave) check() error                   { return nil }
func (leave) appendValue(b []byte) []byte    { return b }

func parseLeave(value []byte) (leave, error) {
	if len(value) > 0 {
		return leave{}, errors.New("it has a value")
	}
	return leave{}, nil
}
