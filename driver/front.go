package driver

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/driver/hub"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/sidecar"
)

// proxyPort is where the network's own address is a proxy (RFC 1928, section 3).
const proxyPort = 1080

// maxConnsPerAddr is a quarter of what a proxy has room for.
const maxConnsPerAddr = 2048

// A front answers the containers of an exit on this host: it is the proxy at the
// network's own addresses, and ends TCP connections that go as flows. Both have one
// TCP, which is not there before it is needed.
type front struct {
	*sidecar.Ender
	exit  *exit
	own   []netip.Addr // the network's own addresses
	proxy bool         // there is one
	open  func() bool  // opens its listeners, once

	ctx     context.Context // ends with close
	end     context.CancelFunc
	serving errgroup.Group
}

func newFront(x *exit) *front {
	r := x.network.record
	f := &front{Ender: sidecar.NewEnder(x.link, x.hub.Answer), exit: x, own: r.Gateways, proxy: !r.NoProxy}
	f.ctx, f.end = context.WithCancel(context.Background())
	f.open = sync.OnceValue(func() bool {
		err := f.listen()
		if err != nil && !errors.Is(err, net.ErrClosed) {
			x.network.log.Error("the network's proxy cannot be opened", "error", err)
		}
		return err == nil
	})
	return f
}

// Ends is hub.Local's.
func (f *front) Ends(p *packet.Packet, h packet.Header) bool {
	if !slices.Contains(f.own, h.Dst) {
		return f.Ender.Ends(p, h)
	}
	// Nobody beyond this host has that address: what is not for the proxy is refused.
	return f.proxy && (h.Proto == packet.TCP || h.Proto == packet.UDP) && f.open()
}

// listen opens the proxy.
func (f *front) listen() error {
	stack, err := f.Stack()
	if err != nil {
		return err
	}
	proxy := f.exit.link.Proxy()
	// A container has an address of each IP version, and is not to take all.
	proxy.MaxConnsPerClient = maxConnsPerAddr
	proxy.ListenPacket = func(local netip.Addr) (net.PacketConn, error) {
		return stack.ListenPacket(netip.AddrPortFrom(local, 0))
	}
	for _, own := range f.own {
		l, err := stack.Listen(netip.AddrPortFrom(own, proxyPort))
		if err != nil {
			return err
		}
		f.serving.Go(func() error { return proxy.Serve(f.ctx, l) })
	}
	return nil
}

// close ends the proxy and all connections, and returns when they are over.
func (f *front) close() error {
	f.exit.hub.SetLocal(nil)
	f.end()
	return errors.Join(f.Close(), f.serving.Wait())
}

var _ hub.Local = (*front)(nil)
