package socks5

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
)

// An Addr is where a client wants to go: an IP address, or a name that is resolved
// elsewhere, and a port. It is comparable.
type Addr struct {
	IP   netip.Addr // invalid where there is a name
	Name string
	Port uint16
}

// String returns the address as net.Dial takes it.
func (a Addr) String() string {
	host := a.Name
	if a.IP.IsValid() {
		host = a.IP.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(a.Port)))
}

func addrFrom(p netip.AddrPort) Addr { return Addr{IP: p.Addr(), Port: p.Port()} }

// Types of addresses (RFC 1928 section 5).
const (
	typeIPv4 = 1
	typeName = 3
	typeIPv6 = 4
)

var (
	errAddrType = fmt.Errorf("unknown type of address: %w", AddressTypeNotSupported)
	errName     = errors.New("not a name of a host")
	errPort     = errors.New("the port must be 1 to 65535")
)

// readAddr reads an address with its type and port, and no further.
func readAddr(r io.Reader) (Addr, error) {
	b := make([]byte, 2, maxAddr) // the type, and a name's length or a first byte
	if _, err := io.ReadFull(r, b); err != nil {
		return Addr{}, unexpected(err)
	}
	size, err := addrSize(b)
	if err != nil {
		return Addr{}, err
	}
	if _, err := io.ReadFull(r, b[2:size]); err != nil {
		return Addr{}, unexpected(err)
	}
	a, _, err := cutAddr(b[:size])
	return a, err
}

// maxAddr is the size of an address with the longest name.
const maxAddr = 2 + 255 + 2

// addrSize tells from its first two bytes what size an address has.
func addrSize(b []byte) (int, error) {
	switch b[0] {
	case typeIPv4:
		return 1 + 4 + 2, nil
	case typeIPv6:
		return 1 + 16 + 2, nil
	case typeName:
		return 2 + int(b[1]) + 2, nil
	}
	return 0, errAddrType
}

// cutAddr takes an address with its type and port off the front of b.
func cutAddr(b []byte) (a Addr, rest []byte, err error) {
	if len(b) < 2 {
		return a, nil, io.ErrUnexpectedEOF
	}
	size, err := addrSize(b)
	if err != nil {
		return a, nil, err
	}
	if len(b) < size {
		return a, nil, io.ErrUnexpectedEOF
	}
	b, rest = b[:size], b[size:]
	a.Port = binary.BigEndian.Uint16(b[size-2:])
	if b[0] == typeName {
		return a, rest, a.setHost(string(b[2 : size-2]))
	}
	ip, _ := netip.AddrFromSlice(b[1 : size-2])
	a.IP = ip.Unmap()
	return a, rest, nil
}

// parseAddr splits "host:port", the form of HTTP (RFC 9110 section 7.2).
func parseAddr(hostport string) (a Addr, err error) {
	host, port, err := net.SplitHostPort(hostport)
	if err != nil {
		return a, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return a, errPort
	}
	a.Port = uint16(n)
	return a, a.setHost(host)
}

// setHost sets a host that is a name or, as some clients send them, an IP address
// in words. A name is checked for what could mean something else further on:
// whoever resolves it need not expect slashes, colons or white space.
func (a *Addr) setHost(host string) error {
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() == "" {
		a.IP = ip.Unmap()
		return nil
	}
	if len(host) == 0 || len(host) > 254 { // a name of 253 and its last dot
		return errName
	}
	for _, c := range []byte(host) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '.', c == '_':
		default:
			return errName
		}
	}
	a.Name = host
	return nil
}

// append appends the address with its type and port to b. The zero value is
// 0.0.0.0:0, which stands for "none".
func (a Addr) append(b []byte) []byte {
	switch ip := a.IP.Unmap(); {
	case a.Name != "" && !ip.IsValid():
		b = append(b, typeName, byte(len(a.Name)))
		b = append(b, a.Name...)
	case ip.Is6():
		b = append(b, typeIPv6)
		b = append(b, ip.AsSlice()...)
	case ip.Is4():
		b = append(b, typeIPv4)
		b = append(b, ip.AsSlice()...)
	default:
		b = append(b, typeIPv4, 0, 0, 0, 0)
	}
	return binary.BigEndian.AppendUint16(b, a.Port)
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
