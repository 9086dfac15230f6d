package tunnel

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// capsuleTypeIgnored is one of the types that are reserved for nothing, so that
// every peer ignores it (RFC 9297, section 5.4).
const capsuleTypeIgnored http3.CapsuleType = 0x17

// requestStream is the CONNECT-IP request at the client or at the server.
type requestStream interface {
	io.Reader
	io.Writer
	StreamID() quic.StreamID
	SendDatagram(b []byte) error
	ReceiveDatagram(ctx context.Context) ([]byte, error)
	SetWriteDeadline(t time.Time) error
}

// A control is a session's request stream, on which capsules go both ways.
type control struct {
	requestStream
	mu sync.Mutex // held while a capsule is written
}

func (c *control) send(cs ...capsule) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range cs {
		if err := writeCapsule(c, one); err != nil {
			return err
		}
	}
	return nil
}

// ping makes the peer acknowledge size bytes: as much as fills a packet, so
// that it proves the path for what the tunnel carries and not for less.
func (c *control) ping(size int) error {
	b := make([]byte, max(size, 3))
	b[0] = byte(capsuleTypeIgnored)
	// A varint of two bytes (RFC 9000, section 16) says the length of the rest.
	binary.BigEndian.PutUint16(b[1:], 1<<14|uint16(len(b)-3))
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.Write(b)
	return err
}

// sendGrant tells a client its addresses and routes.
func (c *control) sendGrant(g Grant) error {
	routes, err := routesTo(g.Routes)
	if err != nil {
		return err
	}
	return c.send(assign(g, nil), routes)
}

// readGrant reads capsules until addresses and routes are there.
func readGrant(r io.Reader, g *Grant) error {
	parser := http3.NewCapsuleParser(r)
	var addresses, routes bool
	for !addresses || !routes {
		c, err := readCapsule(parser)
		if err != nil {
			return err
		}
		switch c := c.(type) {
		case addressAssign:
			addresses = true
			g.Addresses, g.Block = c.own() // each list replaces the last
		case routeAdvertisement:
			routes = true
			if g.Routes, err = c.prefixes(); err != nil {
				return err
			}
		}
	}
	if len(g.Addresses) == 0 {
		return errors.New("the gateway assigned no address")
	}
	return nil
}

// own returns the addresses that are assigned, and the first block of each IP
// version.
func (c addressAssign) own() (addrs []netip.Addr, blocks []netip.Prefix) {
	for _, a := range c {
		known := func(b netip.Prefix) bool { return b.Addr().Is4() == a.Prefix.Addr().Is4() }
		switch {
		case a.refused():
		case a.Prefix.IsSingleIP():
			addrs = append(addrs, a.Prefix.Addr())
		case !slices.ContainsFunc(blocks, known):
			blocks = append(blocks, a.Prefix)
		}
	}
	return addrs, blocks
}

// assign lists a client's addresses, each as the answer to the first request
// for one of its family, and its blocks. Requests for which there is none are
// turned down.
func assign(g Grant, requests addressRequest) addressAssign {
	answered := make([]bool, len(requests))
	var list addressAssign
	for _, a := range g.Addresses {
		entry := assignedAddress{Prefix: netip.PrefixFrom(a, a.BitLen())}
		for i, r := range requests {
			if !answered[i] && r.Prefix.Addr().BitLen() == a.BitLen() {
				entry.RequestID, answered[i] = r.RequestID, true
				break
			}
		}
		list = append(list, entry)
	}
	for _, b := range g.Block {
		list = append(list, assignedAddress{Prefix: b})
	}
	for i, r := range requests {
		if !answered[i] {
			none := unspecified(r.Prefix.Addr())
			list = append(list, assignedAddress{r.RequestID, netip.PrefixFrom(none, none.BitLen())})
		}
	}
	return list
}

// serve hands what the peer sends to handle until one of them fails, and
// returns why.
func (c *control) serve(handle func(capsule) error) error {
	parser := http3.NewCapsuleParser(c)
	for {
		got, err := readCapsule(parser)
		if err != nil {
			return err
		}
		if err := handle(got); err != nil {
			return err
		}
	}
}
