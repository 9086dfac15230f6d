package tunnel

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/quic-go/quic-go/http3"
	"go4.org/netipx"
)

// maxRoutePrefixes bounds what the ranges of one capsule may grow to: one range
// of IPv6 can take 250 prefixes.
const maxRoutePrefixes = 4096

// A routeAdvertisement lists all the destinations that its receiver may send to,
// ordered by IP version, protocol and address, none twice.
type routeAdvertisement []ipRoute

// An ipRoute is a range of addresses, both ends included.
type ipRoute struct {
	Start, End netip.Addr
	// Protocol is the one IP protocol that may be sent there beside ICMP; zero
	// stands for all.
	Protocol uint8
}

func (routeAdvertisement) capsuleType() http3.CapsuleType { return capsuleRouteAdvertisement }

func (c routeAdvertisement) check() error {
	if len(c) > maxCapsuleEntries {
		return errTooManyEntries
	}
	for i, b := range c {
		if err := errors.Join(checkAddr(b.Start), checkAddr(b.End)); err != nil {
			return err
		}
		if b.Start.BitLen() != b.End.BitLen() {
			return fmt.Errorf("range %v-%v of two IP versions", b.Start, b.End)
		}
		if b.Start.Compare(b.End) > 0 {
			return fmt.Errorf("range %v-%v runs backwards", b.Start, b.End)
		}
		if i == 0 {
			continue
		}
		a := c[i-1]
		switch {
		case a.Start.BitLen() != b.Start.BitLen():
			if b.Start.Is4() {
				return errors.New("IPv4 after IPv6")
			}
		case a.Protocol != b.Protocol:
			if a.Protocol > b.Protocol {
				return fmt.Errorf("protocol %d after %d", b.Protocol, a.Protocol)
			}
		case a.End.Compare(b.Start) >= 0:
			return fmt.Errorf("range %v-%v does not come after %v-%v", b.Start, b.End, a.Start, a.End)
		}
	}
	return c.checkOverlap()
}

// checkOverlap finds ranges for one protocol that a range for all protocols
// covers as well. The order of c is right by now.
func (c routeAdvertisement) checkOverlap() error {
	var all []ipRoute // ordered by address
	for _, r := range c {
		if r.Protocol == 0 {
			all = append(all, r)
			continue
		}
		i, _ := slices.BinarySearchFunc(all, r.Start, func(a ipRoute, start netip.Addr) int { return a.End.Compare(start) })
		// all[i] is the first that ends at or after the start.
		if i < len(all) && all[i].Start.Compare(r.End) <= 0 {
			return fmt.Errorf("range %v-%v is there for protocol %d and for all", r.Start, r.End, r.Protocol)
		}
	}
	return nil
}

func (c routeAdvertisement) appendValue(b []byte) []byte {
	for _, r := range c {
		b = append(b, ipVersion(r.Start))
		b = append(b, r.Start.AsSlice()...)
		b = append(b, r.End.AsSlice()...)
		b = append(b, r.Protocol)
	}
	return b
}

func parseRoutes(b []byte) (routeAdvertisement, error) {
	var c routeAdvertisement
	for len(b) > 0 {
		if len(c) == maxCapsuleEntries {
			return nil, errTooManyEntries
		}
		version := b[0]
		start, b2, err := parseAddr(version, b[1:])
		if err != nil {
			return nil, err
		}
		end, b2, err := parseAddr(version, b2)
		if err != nil {
			return nil, err
		}
		if len(b2) == 0 {
			return nil, io.ErrUnexpectedEOF
		}
		c = append(c, ipRoute{Start: start, End: end, Protocol: b2[0]})
		b = b2[1:]
	}
	return c, nil
}

// routesTo returns the fewest ranges that hold the prefixes, for all protocols.
func routesTo(prefixes []netip.Prefix) (routeAdvertisement, error) {
	var set netipx.IPSetBuilder
	for _, p := range prefixes {
		if err := checkAddr(p.Addr()); err != nil {
			return nil, fmt.Errorf("route %v: %w", p, err)
		}
		set.AddPrefix(p)
	}
	s, err := set.IPSet()
	if err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	var c routeAdvertisement
	for _, r := range s.Ranges() {
		c = append(c, ipRoute{Start: r.From(), End: r.To()})
	}
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	return c, nil
}

// prefixes returns the fewest prefixes that hold the ranges for all protocols.
// Ranges for one protocol are left out: no routing table can follow them.
func (c routeAdvertisement) prefixes() ([]netip.Prefix, error) {
	var set netipx.IPSetBuilder
	for _, r := range c {
		if r.Protocol == 0 {
			set.AddRange(netipx.IPRangeFrom(r.Start, r.End))
		}
	}
	s, err := set.IPSet()
	if err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	var ps []netip.Prefix
	for _, r := range s.Ranges() {
		if ps = r.AppendPrefixes(ps); len(ps) > maxRoutePrefixes {
			return nil, fmt.Errorf("routes: their ranges take more than %d prefixes", maxRoutePrefixes)
		}
	}
	return ps, nil
}
