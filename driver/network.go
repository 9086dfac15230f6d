package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"

	"github.com/quicvpn/quicvpn/driver/hub"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// A network is one of the engine's.
type network struct {
	driver *Driver
	dir    string
	log    *slog.Logger
	hub    *hub.Hub
	drops  packet.Drops

	mu     sync.Mutex // guards what follows
	record *record
	exits  map[string]*exit
	joined map[string]*endpoint // by the engine's ID
	idle   map[string]time.Time // since when check has seen that an endpoint is not joined
	last   int                  // the number that was given last
	closed bool
}

// mainExit is the name of the network's own exit.
const mainExit = "client"

// newNetwork makes a network out of its record. Its exits do not run yet.
func (d *Driver) newNetwork(r *record) *network {
	n := &network{
		driver: d,
		dir:    filepath.Join(d.cfg.StateDir, "networks", r.ID),
		log:    d.cfg.Log.With("network", short(r.ID)),
		record: r,
		exits:  make(map[string]*exit),
		joined: make(map[string]*endpoint),
	}
	n.hub = hub.New(hub.Config{
		Subnets: r.Subnets, Own: r.Gateways, Internal: r.Internal, NoNames: r.NoDNS,
		Drops: &n.drops, Log: n.log, Lost: n.lost,
	})
	return n
}

func short(id string) string { return id[:min(len(id), 12)] }

// createNetwork makes a network, connects it to its gateway and stores it. After
// an error nothing of it is left, because no DeleteNetwork follows.
func (d *Driver) createNetwork(r *networkRequest) (any, error) {
	record, wait, err := d.recordOf(r)
	if err != nil {
		return nil, err
	}
	n := d.newNetwork(record)
	if err := d.add(n); err != nil {
		return nil, err
	}
	err = os.Mkdir(n.dir, 0o700)
	if err == nil {
		err = n.record.save(n.dir)
	}
	if err == nil {
		err = n.makeExits()
	}
	if err == nil {
		n.runExits()
	}
	if err == nil && wait > 0 && !record.Internal {
		err = n.exits[mainExit].wait(wait)
	}
	if err != nil {
		d.remove(n)
		return nil, err
	}
	n.log.Info("network created", "subnets", record.Subnets, "internal", record.Internal)
	return struct{}{}, nil
}

// recordOf checks the parameters of a new network.
func (d *Driver) recordOf(r *networkRequest) (*record, time.Duration, error) {
	o, err := networkOptionsOf(r.Options, d.cfg.TokenFile)
	if err != nil {
		return nil, 0, err
	}
	n := &record{
		Version: recordVersion, ID: r.NetworkID, Boot: d.boot,
		Internal: yes(r.Options, optionInternal), IPv6: yes(r.Options, optionIPv6),
		MTU: o.mtu, Queues: o.queues, HostDNS: o.hostDNS, NoDNS: o.noDNS, NoProxy: o.noProxy, TCP: o.tcp,
	}
	if !n.Internal {
		n.Exits = []*exitRecord{{Name: mainExit, Token: o.tokenText}}
	}
	for _, data := range append(r.IPv4Data, r.IPv6Data...) {
		if err := n.addSubnet(data); err != nil {
			return nil, 0, err
		}
	}
	if n.Internal && len(n.Subnets) == 0 {
		return nil, 0, errors.New("an internal network needs the engine's own addresses: leave out --ipam-driver null or --internal")
	}
	if err := checkOverlap(n.Subnets); err != nil {
		return nil, 0, err
	}
	if !n.Internal && !n.HostDNS {
		if err := hostFiles("/").checkResolvers(); err != nil {
			return nil, 0, err
		}
	}
	if o.shown {
		d.cfg.Log.Warn("-o token shows the join token to everybody who may run `docker network inspect`: use -o token-file", "network", short(n.ID))
	}
	return n, o.wait, nil
}

// addSubnet takes one range of the engine's IPAM.
func (r *record) addSubnet(data ipamData) error {
	pool, err := netip.ParsePrefix(data.Pool)
	if err != nil {
		return fmt.Errorf("the network's address range: %w", err)
	}
	if pool.Bits() == 0 {
		return nil // of the IPAM driver "null": the gateway gives the addresses
	}
	if !pool.Masked().Addr().Next().IsGlobalUnicast() {
		return fmt.Errorf("the subnet %v has no addresses for containers: choose another --subnet, such as 10.88.0.0/16", pool)
	}
	r.Subnets = append(r.Subnets, pool.Masked())
	if data.Gateway == "" {
		return nil
	}
	gateway, err := netip.ParsePrefix(data.Gateway)
	if err != nil {
		return fmt.Errorf("the network's own address: %w", err)
	}
	if !pool.Contains(gateway.Addr()) {
		return fmt.Errorf("the network's own address %v is not in its subnet %v: give another --gateway", gateway.Addr(), pool)
	}
	r.Gateways = append(r.Gateways, gateway.Addr())
	return nil
}

// checkOverlap refuses what the host itself can reach directly: one of the two
// could then be reached no more.
func checkOverlap(subnets []netip.Prefix) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list the host's interfaces: %w", err)
	}
	for _, link := range links {
		if link.Attrs().Flags&net.FlagLoopback != 0 {
			continue
		}
		addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		if err != nil {
			return fmt.Errorf("list the host's addresses: %w", err)
		}
		for _, a := range addrs {
			host, ok := netipx.FromStdIPNet(a.IPNet)
			for _, subnet := range subnets {
				if ok && host.Overlaps(subnet) {
					return fmt.Errorf("the subnet %v overlaps %v of the host's interface %s: choose another --subnet", subnet, host.Masked(), link.Attrs().Name)
				}
			}
		}
	}
	return nil
}

// add makes a network known, so that a second call for it is refused.
func (d *Driver) add(n *network) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.networks[n.record.ID] != nil || d.broken[n.record.ID] != nil {
		return fmt.Errorf("network %.12s is there already", n.record.ID)
	}
	d.networks[n.record.ID] = n
	return nil
}

// deleteNetwork gives up a network. One that is not known is fine: the engine
// forgets networks whatever the driver says.
func (d *Driver) deleteNetwork(r *networkRequest) (any, error) {
	d.mu.Lock()
	n := d.networks[r.NetworkID]
	_, broken := d.broken[r.NetworkID]
	delete(d.broken, r.NetworkID)
	d.mu.Unlock()
	if n != nil {
		d.remove(n)
		n.log.Info("network removed")
	} else if broken {
		// Whatever was wrong with it, it is not asked for any more.
		dir := filepath.Join(d.cfg.StateDir, "networks", r.NetworkID)
		d.cfg.Log.Warn("a network that could not be used was removed; the gateway was not told, and keeps its addresses until the client is removed there", "directory", dir)
		if err := os.RemoveAll(dir); err != nil {
			d.cfg.Log.Error("clean up", "error", err)
		}
	}
	return struct{}{}, nil
}

// leaveTimeout bounds the goodbye to a gateway.
const leaveTimeout = 2 * time.Second

// remove takes a network and everything of it away.
func (d *Driver) remove(n *network) {
	n.mu.Lock()
	n.closed = true
	for id := range n.joined {
		n.leaveLocked(id)
	}
	for _, e := range n.record.Endpoints {
		n.complain(deleteDevice(e.ID))
	}
	exits := n.exits
	n.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	var wg sync.WaitGroup
	for _, x := range exits {
		wg.Go(func() { x.leave(ctx) })
	}
	wg.Wait()
	n.close()
	n.complain(os.RemoveAll(n.dir))
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.networks, n.record.ID)
}

// close ends what runs, and leaves to containers and disk what they have.
func (n *network) close() {
	n.mu.Lock()
	n.closed = true
	var ports []*endpoint
	for _, e := range n.joined {
		ports = append(ports, e)
	}
	exits := n.exits
	n.mu.Unlock()
	for _, e := range ports {
		e.unpublish()
	}
	for _, x := range exits {
		x.stop()
	}
	n.complain(n.hub.Close())
	n.log.Info("stopped", "drops", n.drops.Snapshot())
}

// complain logs what nobody can be told.
func (n *network) complain(err error) {
	if err != nil {
		n.log.Error("clean up", "error", err)
	}
}

// saveLocked stores the record.
func (n *network) saveLocked() error {
	if n.closed {
		return errors.New("the network is being removed")
	}
	return n.record.save(n.dir)
}

// has reports whether the network has addresses of an IP version.
func (r *record) has(a netip.Addr) bool {
	if len(r.Subnets) == 0 {
		return a.Is4() || r.IPv6
	}
	for _, s := range r.Subnets {
		if s.Addr().Is4() == a.Is4() {
			return true
		}
	}
	return false
}
