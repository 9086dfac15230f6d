package tunnel

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"unicode"
)

// The request for a tunnel (RFC 9484, section 4): extended CONNECT to the
// default template with both variables open, which asks for any destination
// and any protocol.
const (
	protoConnectIP = "connect-ip"
	pathConnectIP  = "/.well-known/masque/ip/*/*/"
)

// What a gateway tells beside RFC 9484, in headers of its answer.
const (
	headerError   = "Quicvpn-Error"   // RefusedError.Code
	headerNetwork = "Quicvpn-Network" // Grant.Network
	headerGateway = "Quicvpn-Gateway" // Grant.Gateway, comma-separated
	headerPeers   = "Quicvpn-Peers"   // Grant.Peers, comma-separated
)

func grantToHeader(g Grant, h http.Header) {
	h.Set(headerNetwork, g.Network)
	h.Set(headerGateway, join(g.Gateway))
	h.Set(headerPeers, join(g.Peers))
}

// grantFromHeader reads what a quicvpn gateway tells; others tell nothing.
func grantFromHeader(h http.Header) (g Grant, err error) {
	g.Network = printable(h.Get(headerNetwork))
	if g.Gateway, err = split(h.Get(headerGateway), netip.ParseAddr); err != nil {
		return g, fmt.Errorf("%s: %w", headerGateway, err)
	}
	if g.Peers, err = split(h.Get(headerPeers), netip.ParsePrefix); err != nil {
		return g, fmt.Errorf("%s: %w", headerPeers, err)
	}
	return g, nil
}

func join[T fmt.Stringer](list []T) string {
	var b strings.Builder
	for i, v := range list {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(v.String())
	}
	return b.String()
}

func split[T any](text string, parse func(string) (T, error)) ([]T, error) {
	var list []T
	for field := range strings.SplitSeq(text, ",") {
		if field = strings.TrimSpace(field); field == "" {
			continue
		}
		v, err := parse(field)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, nil
}

// printable makes a peer's text fit for a log and a terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}

// gatewayAddr returns the gateway's address of an IP version, for the source of
// an ICMP error; the unspecified one if it has none.
func (s *Session) gatewayAddr(version uint8) netip.Addr {
	for _, a := range s.grant.Gateway {
		if a.Is4() == (version == 4) {
			return a
		}
	}
	if version == 4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
