package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
)

// An Egress says how clients' packets leave the gateway.
type Egress int

const (
	// EgressAuto is EgressKernel where the gateway may, and EgressUserspace elsewhere.
	EgressAuto Egress = iota
	// EgressKernel is by a TUN device, forwarding and firewall rules, which takes the
	// capability NET_ADMIN and /dev/net/tun.
	EgressKernel
	// EgressUserspace is by ordinary sockets, which takes no privilege.
	EgressUserspace
)

func (e Egress) String() string {
	switch e {
	case EgressAuto:
		return "auto"
	case EgressKernel:
		return "kernel"
	case EgressUserspace:
		return "userspace"
	}
	return "Egress(" + strconv.Itoa(int(e)) + ")"
}

// An outside is the gateway's way out.
type outside interface {
	// exits are where packets leave.
	exits() []exit
	// leaves6 says whether IPv6 leaves, too.
	leaves6() bool
	// isHost reports whether an address is one of the gateway's host.
	isHost(netip.Addr) bool
	// admit prepares for a client's packets.
	admit(Client)
	// netNS is the namespace by which packets leave.
	netNS() *netNS
	// start has a router's packets leave, and those that come go to the router, until
	// ctx ends.
	start(ctx context.Context, group *errgroup.Group, r *router)
	close() error
	String() string
}

// openOutside opens the way out that the configuration says.
func openOutside(how Egress, cfg egressConfig) (outside, error) {
	if how == EgressAuto {
		how = EgressKernel
		if err := mayForward(); err != nil {
			how = EgressUserspace
			cfg.log.Info("clients' packets leave by ordinary sockets (--egress userspace)", "reason", err)
		}
	}
	if how == EgressUserspace {
		u, err := openUserspace(cfg)
		if err != nil {
			return nil, err
		}
		return u, nil
	}
	e, err := openEgress(cfg)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// mayForward reports why the kernel's way out is not the gateway's to use.
func mayForward() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("the gateway lacks the capability NET_ADMIN")
	}
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("the gateway has no TUN devices: %w", err)
	}
	return f.Close()
}

func (e *egress) exits() (all []exit) {
	for _, q := range e.dev.Queues() {
		all = append(all, q)
	}
	return all
}

func (e *egress) String() string { return "kernel, by interface " + e.cfg.iface }

func (e *egress) leaves6() bool { return e.ipv6 }

func (e *egress) netNS() *netNS { return e.ns }

func (e *egress) start(ctx context.Context, group *errgroup.Group, r *router) {
	group.Go(func() error { return e.keep(ctx) })
	for i, q := range e.dev.Queues() {
		group.Go(func() error { return e.readKernel(ctx, r, i, q) })
	}
	group.Go(func() error {
		<-ctx.Done()
		return e.dev.Close() // ends readKernel
	})
}

// readKernel hands what one queue of the TUN device has to the router.
func (e *egress) readKernel(ctx context.Context, r *router, queue int, q *tun.Queue) error {
	pkts := make([]packet.Packet, batchSize)
	for {
		n, err := q.Read(pkts)
		if ctx.Err() != nil && errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read from interface %s: %w", e.cfg.iface, err)
		}
		r.fromKernel(queue, pkts[:n])
	}
}
