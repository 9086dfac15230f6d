package tunnel

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
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

	headerAnnounced       = "Quicvpn-Announced"        // Grant.Announced, comma-separated
	headerAnnounceRefused = "Quicvpn-Announce-Refused" // Grant.AnnounceRefused
)

// What a client asks for beside RFC 9484, in headers of its request.
const (
	headerBlock    = "Quicvpn-Block"    // Join.Block, a boolean of RFC 9651
	headerAnnounce = "Quicvpn-Announce" // Join.Announce, comma-separated
	headerNames    = "Quicvpn-Names"    // Join.Names, a token
)

// maxAnnounce bounds what a client may announce.
const maxAnnounce = 16

func grantToHeader(g Grant, h http.Header) {
	h.Set(headerNetwork, g.Network)
	h.Set(headerGateway, join(g.Gateway))
	h.Set(headerPeers, join(g.Peers))
	if len(g.Announced) > 0 {
		h.Set(headerAnnounced, join(g.Announced))
	}
	if g.AnnounceRefused != "" {
		h.Set(headerAnnounceRefused, printable(g.AnnounceRefused))
	}
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
	if g.Announced, err = split(h.Get(headerAnnounced), netip.ParsePrefix); err != nil {
		return g, fmt.Errorf("%s: %w", headerAnnounced, err)
	}
	g.AnnounceRefused = printable(h.Get(headerAnnounceRefused))
	return g, nil
}

func (d *Dialer) wishToHeader(h http.Header) {
	if d.Block {
		h.Set(headerBlock, "?1")
	}
	if len(d.Announce) > 0 {
		h.Set(headerAnnounce, join(d.Announce))
	}
	if d.Names != NamesPrivate {
		h.Set(headerNames, string(d.Names))
	}
}

// wishFromHeader reads what a client asks for. Its errors are *RefusedError.
func wishFromHeader(h http.Header, join *Join) error {
	switch block := h.Values(headerBlock); {
	case len(block) == 0 || len(block) == 1 && block[0] == "?0":
	case len(block) == 1 && block[0] == "?1":
		join.Block = true
	default:
		return refuseWish("bad-block", "the header %s is neither ?1 nor ?0 (RFC 9651, section 3.3.6)", headerBlock)
	}
	switch names := h.Values(headerNames); {
	case len(names) == 0:
	case len(names) == 1 && (Names(names[0]) == NamesAll || Names(names[0]) == NamesOff):
		join.Names = Names(names[0])
	default:
		return refuseWish("bad-names", "the header %s is neither %s nor %s", headerNames, NamesAll, NamesOff)
	}
	lines := h.Values(headerAnnounce)
	if len(lines) == 0 {
		return nil
	}
	fields := strings.Split(strings.Join(lines, ","), ",") // RFC 9110, section 5.3
	if len(fields) > maxAnnounce {
		return refuseWish("bad-announce", "%d announced prefixes are more than %d: announce broader ones", len(fields), maxAnnounce)
	}
	for _, field := range fields {
		p, err := netip.ParsePrefix(strings.Trim(field, " \t"))
		if err == nil {
			err = checkAddr(p.Addr())
		}
		if err != nil {
			return refuseWish("bad-announce", "the announced prefix %q is not one of IPv4 or IPv6, as in 172.18.0.0/16", clip(field))
		}
		if p != p.Masked() {
			return refuseWish("bad-announce", "the announced prefix %s has bits set beyond its length: announce %s", p, p.Masked())
		}
		if i := slices.IndexFunc(join.Announce, p.Overlaps); i >= 0 {
			return refuseWish("bad-announce", "the announced prefixes %s and %s overlap: announce one of them", join.Announce[i], p)
		}
		join.Announce = append(join.Announce, p)
	}
	return nil
}

func refuseWish(code, format string, args ...any) error {
	return &RefusedError{Status: http.StatusBadRequest, Code: code, Text: fmt.Sprintf(format, args...)}
}

// clip bounds what an answer repeats.
func clip(text string) string {
	const most = 64
	if len(text) > most {
		return text[:most]
	}
	return text
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
