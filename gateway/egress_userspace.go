package gateway

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sync/errgroup"

	"github.com/quicvpn/quicvpn/gateway/userspace"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// A userspaceEgress is the gateway's way out by ordinary sockets. It changes nothing
// of the host.
type userspaceEgress struct {
	cfg    egressConfig
	ns     *netNS
	watch  *nl.NetlinkSocket // tells of changes of addresses
	host   atomic.Pointer[map[netip.Addr]struct{}]
	exit   *userspace.Exit
	router *router // from start on
	places *shares // for sockets
	closed func() error
}

func openUserspace(cfg egressConfig) (_ *userspaceEgress, err error) {
	u := &userspaceEgress{cfg: cfg, places: newShares(int(min(maxGatewayFlows, max(descriptors()/2, 1))))}
	u.closed = sync.OnceValue(u.release)
	if u.ns, err = currentNetNS(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.close())
		}
	}()
	if err := u.ns.do(func() (err error) { u.watch, err = subscribe(); return err }); err != nil {
		return nil, err
	}
	if err := u.refresh(); err != nil {
		return nil, err
	}
	u.exit, err = userspace.New(userspace.Config{
		Do: u.ns.do, Dial: u.dial, Owner: u.owner, Take: u.take, Queues: cfg.queues,
		Answer: func(queue int, pkts []packet.Packet) { u.router.fromKernel(queue, pkts) },
		Refuse: func(orig []byte, why packet.Unreachable) {
			if p := u.portOf(orig); p != nil {
				p.answerUnreachable(0, orig, why)
			}
		},
		Exceeded: func(orig []byte) {
			if p := u.portOf(orig); p != nil {
				p.answerTimeExceeded(0, orig)
			}
		},
		Drops: cfg.drops, Log: cfg.log,
	})
	return u, err
}

// portOf returns the port of a packet's sender, or nil.
func (u *userspaceEgress) portOf(orig []byte) *port {
	h, err := packet.Parse(orig)
	if err != nil {
		return nil
	}
	return u.router.lookup(h.Src)
}

func (u *userspaceEgress) owner(from netip.Addr) string {
	if p := u.router.lookup(from); p != nil {
		return string(p.client.ID[:])
	}
	return ""
}

func (u *userspaceEgress) take(from netip.Addr) (release func(), ok bool) {
	p := u.router.lookup(from)
	if p == nil {
		return nil, false
	}
	return u.places.take(p.client.ID, from)
}

// dial connects for a client's TCP. The rules may have changed since the packet.
func (u *userspaceEgress) dial(ctx context.Context, from, to netip.AddrPort) (net.Conn, error) {
	p := u.router.lookup(from.Addr())
	if p == nil {
		return nil, syscall.EACCES
	}
	if err := p.mayDial(to.Addr()); err != nil {
		return nil, err
	}
	return u.ns.dial(ctx, "tcp", to.String())
}

func (u *userspaceEgress) refresh() error {
	return u.ns.do(func() error {
		host, err := hostAddrs()
		if err == nil {
			u.host.Store(&host)
		}
		return err
	})
}

func (u *userspaceEgress) exits() []exit { return []exit{u.exit} }

// leaves6 is true: a socket tells at once where IPv6 does not leave.
func (u *userspaceEgress) leaves6() bool { return true }

func (u *userspaceEgress) isHost(ip netip.Addr) bool {
	_, is := (*u.host.Load())[ip]
	return is
}

func (u *userspaceEgress) String() string { return "userspace" }

func (u *userspaceEgress) admit(Client) {}

func (u *userspaceEgress) netNS() *netNS { return u.ns }

func (u *userspaceEgress) start(ctx context.Context, group *errgroup.Group, r *router) {
	u.router = r
	group.Go(func() error {
		u.exit.Run(ctx)
		return nil
	})
	changed := make(chan struct{}, 1)
	group.Go(func() error {
		listen(u.watch, func(syscall.NetlinkMessage) bool { return true }, changed)
		return nil
	})
	group.Go(func() error {
		defer u.watch.Close() // ends listen
		tick := time.NewTicker(recheck)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
			case <-tick.C:
			}
			if err := u.refresh(); err != nil {
				u.cfg.log.Warn("the host's own addresses may not be complete", "error", err)
			}
		}
	})
}

func (u *userspaceEgress) close() error { return u.closed() }

func (u *userspaceEgress) release() error {
	var errs []error
	if u.exit != nil {
		errs = append(errs, u.exit.Close())
	}
	if u.watch != nil {
		u.watch.Close()
	}
	return errors.Join(append(errs, u.ns.close())...)
}
