package tunnel

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"
)

// The capsules of CONNECT-IP (RFC 9484, section 4.7). Each one that arrives
// replaces what the last of its type said.
const (
	capsuleAddressAssign      http3.CapsuleType = 1
	capsuleAddressRequest     http3.CapsuleType = 2
	capsuleRouteAdvertisement http3.CapsuleType = 3
)

// What one capsule may cost us.
const (
	maxCapsuleLength  = 64 << 10
	maxCapsuleEntries = 1000
)

// A capsule is one of addressAssign, addressRequest and routeAdvertisement, or
// one of our own: peerList and leave.
type capsule interface {
	capsuleType() http3.CapsuleType
	// check returns why the capsule would be malformed.
	check() error
	appendValue(b []byte) []byte
}

// An addressAssign lists all the prefixes that its receiver may send from.
type addressAssign []assignedAddress

// An addressRequest asks for addresses. 0.0.0.0 and :: stand for any address of
// their family.
type addressRequest []requestedAddress

// An assignedAddress is an entry of an addressAssign.
type assignedAddress struct {
	// RequestID is that of the request it answers; zero if it answers none.
	RequestID uint64
	// Prefix is 0.0.0.0/32 or ::/128 where a request is turned down.
	Prefix netip.Prefix
}

// A requestedAddress is an entry of an addressRequest; its ID is not zero and is
// never used again.
type requestedAddress = assignedAddress

// refused reports whether the address is a no to a request.
func (a assignedAddress) refused() bool {
	return a.Prefix.IsSingleIP() && a.Prefix.Addr().IsUnspecified()
}

func (addressAssign) capsuleType() http3.CapsuleType  { return capsuleAddressAssign }
func (addressRequest) capsuleType() http3.CapsuleType { return capsuleAddressRequest }

func (c addressAssign) appendValue(b []byte) []byte  { return appendAddresses(b, c) }
func (c addressRequest) appendValue(b []byte) []byte { return appendAddresses(b, c) }

func (c addressAssign) check() error { return checkAddresses(c) }

func (c addressRequest) check() error {
	if len(c) == 0 {
		return errors.New("no address")
	}
	seen := make(map[uint64]bool, len(c))
	for _, a := range c {
		if a.RequestID == 0 {
			return errors.New("request ID 0")
		}
		if seen[a.RequestID] {
			return fmt.Errorf("request ID %d twice", a.RequestID)
		}
		seen[a.RequestID] = true
	}
	return checkAddresses(c)
}

func checkAddresses(as []assignedAddress) error {
	if len(as) > maxCapsuleEntries {
		return errTooManyEntries
	}
	for _, a := range as {
		if err := checkAddr(a.Prefix.Addr()); err != nil {
			return err
		}
		if !a.Prefix.IsValid() || a.Prefix != a.Prefix.Masked() {
			return fmt.Errorf("prefix %v has address bits beyond its length", a.Prefix)
		}
	}
	return nil
}

var errTooManyEntries = fmt.Errorf("more than %d entries", maxCapsuleEntries)

// checkAddr refuses, beside what no capsule can hold, the IPv4-mapped addresses:
// a rule for IPv4 must not be evaded by a spelling of IPv6.
func checkAddr(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return errors.New("no valid address")
	case a.Is4In6():
		return fmt.Errorf("IPv4-mapped address %v", a)
	case a.Zone() != "":
		return fmt.Errorf("address %v has a zone", a)
	}
	return nil
}

// writeCapsule writes a capsule in one piece.
func writeCapsule(w io.Writer, c capsule) error {
	if err := c.check(); err != nil {
		return fmt.Errorf("%s capsule: %w", capsuleName(c.capsuleType()), err)
	}
	var b bytes.Buffer
	if err := http3.WriteCapsule(&b, c.capsuleType(), c.appendValue(nil)); err != nil {
		return err
	}
	_, err := w.Write(b.Bytes())
	return err
}

// readCapsule returns the next capsule and skips those of other types. After
// io.EOF the stream ended between capsules; after any other error it has to be
// aborted (RFC 9297, section 3.3).
func readCapsule(p *http3.CapsuleParser) (capsule, error) {
	for {
		typ, r, err := p.Next()
		if err != nil {
			return nil, err
		}
		name := capsuleName(typ)
		if name == "" {
			if err := r.Discard(); err != nil {
				return nil, err
			}
			continue
		}
		n := r.Remaining()
		if n > maxCapsuleLength {
			return nil, fmt.Errorf("%s capsule: %d bytes, more than %d", name, n, maxCapsuleLength)
		}
		value := make([]byte, n)
		if _, err := io.ReadFull(r, value); err != nil {
			return nil, fmt.Errorf("read %s capsule: %w", name, err)
		}
		c, err := parseCapsule(typ, value)
		if err == nil {
			err = c.check()
		}
		if err != nil {
			return nil, fmt.Errorf("%s capsule: %w", name, err)
		}
		return c, nil
	}
}

func capsuleName(typ http3.CapsuleType) string {
	switch typ {
	case capsuleAddressAssign:
		return "ADDRESS_ASSIGN"
	case capsuleAddressRequest:
		return "ADDRESS_REQUEST"
	case capsuleRouteAdvertisement:
		return "ROUTE_ADVERTISEMENT"
	case capsulePeers:
		return "PEERS"
	case capsuleLeave:
		return "LEAVE"
	}
	return ""
}

func parseCapsule(typ http3.CapsuleType, value []byte) (capsule, error) {
	switch typ {
	case capsuleAddressAssign:
		as, err := parseAddresses(value)
		return addressAssign(as), err
	case capsuleAddressRequest:
		as, err := parseAddresses(value)
		return addressRequest(as), err
	case capsulePeers:
		c, err := parseRoutes(value)
		return peerList(c), err
	case capsuleLeave:
		return parseLeave(value)
	default:
		return parseRoutes(value)
	}
}

func appendAddresses(b []byte, as []assignedAddress) []byte {
	for _, a := range as {
		b = quicvarint.Append(b, a.RequestID)
		b = append(b, ipVersion(a.Prefix.Addr()))
		b = append(b, a.Prefix.Addr().AsSlice()...)
		b = append(b, byte(a.Prefix.Bits()))
	}
	return b
}

func parseAddresses(b []byte) ([]assignedAddress, error) {
	var as []assignedAddress
	for len(b) > 0 {
		if len(as) == maxCapsuleEntries {
			return nil, errTooManyEntries
		}
		id, n, err := quicvarint.Parse(b)
		if err != nil {
			return nil, fmt.Errorf("request ID: %w", err)
		}
		if b = b[n:]; len(b) == 0 {
			return nil, io.ErrUnexpectedEOF
		}
		addr, b2, err := parseAddr(b[0], b[1:])
		if err != nil {
			return nil, err
		}
		if len(b2) == 0 {
			return nil, io.ErrUnexpectedEOF
		}
		p := netip.PrefixFrom(addr, int(b2[0]))
		if !p.IsValid() {
			return nil, fmt.Errorf("prefix length %d for %v", b2[0], addr)
		}
		as = append(as, assignedAddress{RequestID: id, Prefix: p})
		b = b2[1:]
	}
	return as, nil
}

func ipVersion(a netip.Addr) byte {
	if a.Is4() {
		return 4
	}
	return 6
}

// parseAddr takes an address of the IP version off b and returns what is left.
func parseAddr(version byte, b []byte) (netip.Addr, []byte, error) {
	var n int
	switch version {
	case 4:
		n = 4
	case 6:
		n = 16
	default:
		return netip.Addr{}, nil, fmt.Errorf("IP version %d", version)
	}
	if len(b) < n {
		return netip.Addr{}, nil, io.ErrUnexpectedEOF
	}
	addr, _ := netip.AddrFromSlice(b[:n]) // of a right length by now
	return addr, b[n:], nil
}
