package packet

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// A Header is what the house wants to know of a packet's headers.
type Header struct {
	Version  uint8 // 4 or 6
	Proto    uint8 // the transport protocol, after IPv6 extension headers
	HopLimit uint8 // IPv4: TTL
	// TrafficClass holds DSCP and ECN as they are on the wire.
	TrafficClass uint8
	Src, Dst     netip.Addr
	// SrcPort and DstPort are zero where there is no TCP or UDP header to read.
	SrcPort, DstPort uint16
	// IPLen is the offset of the transport header.
	IPLen int
	// HeaderLen is the offset of the payload of TCP or UDP. It equals IPLen for
	// other protocols, and for fragments whose transport header is not there or
	// not whole.
	HeaderLen int
	// Fragment says that this is one of several fragments, FragmentOffset where
	// in the datagram it lies, in bytes. An IPv6 packet whose only fragment is
	// itself (RFC 6946) is not a fragment.
	Fragment       bool
	FragmentOffset int
	DontFragment   bool // IPv4 only; no router fragments IPv6
}

// Plain reports that the IP header has neither options nor extension headers.
func (h *Header) Plain() bool {
	return h.Version == 4 && h.IPLen == ipv4Len || h.Version == 6 && h.IPLen == ipv6Len
}

// transport reports whether a whole TCP or UDP header lies at IPLen.
func (h *Header) transport() bool { return h.HeaderLen > h.IPLen }

const (
	ipv4Len = 20 // without options
	ipv6Len = 40 // without extension headers
	tcpLen  = 20 // without options
	udpLen  = 8

	// maxExtensions bounds the chain of IPv6 extension headers that is followed.
	maxExtensions = 12
)

// IPv6 extension headers (RFC 8200 section 4).
const (
	hopByHop    = 0
	routing     = 43
	fragment    = 44
	authHeader  = 51
	noNext      = 59
	destOptions = 60
)

var (
	errShort      = errors.New("shorter than its headers")
	errVersion    = errors.New("neither IPv4 nor IPv6")
	errLength     = errors.New("the length in its IP header is not its own")
	errHeader     = errors.New("a header length that cannot be")
	errExtensions = errors.New("too many IPv6 extension headers")
)

// Parse reads the headers of one packet or super-packet. It refuses a packet
// whose length is not exactly what its IP header says, and one whose TCP or UDP
// header is not whole although it is no fragment. It does not verify checksums.
func Parse(b []byte) (h Header, err error) {
	switch {
	case len(b) == 0:
		err = errShort
	case b[0]>>4 == 4:
		err = h.parse4(b)
	case b[0]>>4 == 6:
		err = h.parse6(b)
	default:
		err = errVersion
	}
	return h, err
}

func (h *Header) parse4(b []byte) error {
	if len(b) < ipv4Len {
		return errShort
	}
	if int(binary.BigEndian.Uint16(b[2:])) != len(b) {
		return errLength
	}
	if err := h.read4(b); err != nil {
		return err
	}
	return h.parseTransport(b)
}

// read4 reads an IPv4 header, of which 20 bytes at least are there.
func (h *Header) read4(b []byte) error {
	n := int(b[0]&0x0f) * 4
	if n < ipv4Len {
		return errHeader
	}
	if n > len(b) {
		return errShort
	}
	frag := binary.BigEndian.Uint16(b[6:])
	h.Version = 4
	h.Proto = b[9]
	h.HopLimit = b[8]
	h.TrafficClass = b[1]
	h.Src = netip.AddrFrom4([4]byte(b[12:16]))
	h.Dst = netip.AddrFrom4([4]byte(b[16:20]))
	h.IPLen = n
	h.HeaderLen = n
	h.Fragment = frag&0x3fff != 0
	h.FragmentOffset = int(frag&0x1fff) * 8
	h.DontFragment = frag&0x4000 != 0
	return nil
}

func (h *Header) parse6(b []byte) error {
	if len(b) < ipv6Len {
		return errShort
	}
	if int(binary.BigEndian.Uint16(b[4:])) != len(b)-ipv6Len {
		return errLength
	}
	if err := h.read6(b); err != nil {
		return err
	}
	return h.parseTransport(b)
}

// read6 reads an IPv6 header, which is there, and its extension headers.
func (h *Header) read6(b []byte) error {
	h.Version = 6
	h.Proto = b[6]
	h.HopLimit = b[7]
	h.TrafficClass = b[0]<<4 | b[1]>>4
	h.Src = netip.AddrFrom16([16]byte(b[8:24]))
	h.Dst = netip.AddrFrom16([16]byte(b[24:40]))
	h.IPLen = ipv6Len
	err := h.parseExtensions(b)
	h.HeaderLen = h.IPLen
	return err
}

// parseExtensions walks to the transport header, or to what follows the fragment
// header of a fragment other than the first.
func (h *Header) parseExtensions(b []byte) error {
	for i := 0; ; i++ {
		switch h.Proto {
		case hopByHop, routing, destOptions, authHeader, fragment:
		default:
			return nil
		}
		if i == maxExtensions {
			return errExtensions
		}
		ext := b[h.IPLen:]
		if len(ext) < 8 {
			return errShort
		}
		n := 8 + int(ext[1])*8
		switch h.Proto {
		case authHeader:
			n = 8 + int(ext[1])*4 // RFC 4302: 32-bit words
		case fragment:
			n = 8
			at := binary.BigEndian.Uint16(ext[2:])
			h.Fragment = h.Fragment || at&^6 != 0
			h.FragmentOffset = int(at &^ 7)
		}
		if n > len(ext) {
			return errShort
		}
		h.Proto = ext[0]
		h.IPLen += n
		if h.FragmentOffset != 0 {
			return nil
		}
	}
}

func (h *Header) parseTransport(b []byte) error {
	if h.FragmentOffset != 0 {
		return nil
	}
	t := b[h.IPLen:]
	n := 0
	switch h.Proto {
	case TCP:
		if len(t) >= tcpLen {
			n = int(t[12]>>4) * 4
			if n < tcpLen {
				return errHeader
			}
		}
	case UDP:
		n = udpLen
	default:
		return nil
	}
	if n == 0 || n > len(t) {
		if h.Fragment {
			return nil // the rest of the header is in the next fragment
		}
		return errShort
	}
	h.HeaderLen = h.IPLen + n
	h.SrcPort = binary.BigEndian.Uint16(t)
	h.DstPort = binary.BigEndian.Uint16(t[2:])
	return nil
}

// FlowHash returns a number that all packets of one direction of a flow share:
// addresses, protocol and ports. Fragments lack the ports, all but the first: a
// datagram's fragments share a number of their own.
func FlowHash(h Header, b []byte) uint32 {
	var x uint64
	if h.Version == 4 {
		x = binary.LittleEndian.Uint64(b[12:])
	} else {
		x = binary.LittleEndian.Uint64(b[8:])
		for i := 16; i < ipv6Len; i += 8 {
			x = x*mix ^ x>>29 ^ binary.LittleEndian.Uint64(b[i:])
		}
	}
	x = x*mix ^ x>>29 ^ uint64(h.Proto)
	if !h.Fragment && h.transport() {
		x ^= uint64(binary.LittleEndian.Uint32(b[h.IPLen:])) << 16
	}
	x ^= x >> 32
	x *= mix
	return uint32(x >> 32)
}

const mix = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio

// DecrementHopLimit does what a router does to a packet that it forwards. It
// returns false, and leaves the packet as it is, where the hop limit would
// reach zero. b is a packet that Parse accepts.
func DecrementHopLimit(b []byte) bool {
	if b[0]>>4 == 6 {
		if b[7] <= 1 {
			return false
		}
		b[7]--
		return true
	}
	if b[8] <= 1 {
		return false
	}
	// RFC 1624 equation 3; only the high byte of the TTL and protocol word
	// changes, by one.
	sum := uint32(^binary.BigEndian.Uint16(b[10:])) + uint32(^binary.BigEndian.Uint16(b[8:]))
	b[8]--
	sum += uint32(binary.BigEndian.Uint16(b[8:]))
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum))
	return true
}
