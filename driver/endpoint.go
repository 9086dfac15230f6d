package driver

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/driver/hub"
	"github.com/quicvpn/quicvpn/driver/publish"
	"github.com/quicvpn/quicvpn/tun"
)

// An endpoint is a container that has joined: its device is open.
type endpoint struct {
	record *endpointRecord
	device *tun.Device
	mtu    int // that the device has
	since  time.Time
	moved  bool // the device was seen in the sandbox
	ports  *publish.Listeners
}

func (e *endpoint) unpublish() {
	if e.ports != nil {
		e.ports.Close() // what is left of connections is not the engine's concern
		e.ports = nil
	}
}

// createEndpoint gives a container its addresses. After an error nothing is
// left, because no DeleteEndpoint follows.
func (d *Driver) createEndpoint(r *endpointRequest) (any, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	if r.Interface == nil {
		r.Interface = new(endpointInterface)
	}
	if mac := r.Options[optionMAC]; r.Interface.MacAddress != "" || mac != nil && string(mac) != "null" {
		return nil, errors.New("a TUN device has no MAC address: leave out --mac-address (mac_address in Compose)")
	}
	options, err := exitOptionsOf(r.Options)
	if err != nil {
		return nil, err
	}
	if !n.record.Internal && !n.record.HostDNS { // neither ever changes
		if err := hostFiles("/").checkResolvers(); err != nil {
			return nil, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.record.endpoint(r.EndpointID)
	if e == nil { // else the engine repeats its call
		if e, err = n.newEndpointLocked(r, options); err != nil {
			return nil, err
		}
	}
	var answer createEndpointResponse
	if len(n.record.Subnets) == 0 {
		for _, a := range e.Addrs {
			p := netip.PrefixFrom(a, a.BitLen()).String()
			if a.Is4() {
				answer.Interface.Address = p
			} else {
				answer.Interface.AddressIPv6 = p
			}
		}
	}
	return answer, nil
}

func (n *network) newEndpointLocked(r *endpointRequest, options exitOptions) (e *endpointRecord, err error) {
	if n.closed {
		return nil, errors.New("the network is being removed")
	}
	e = &endpointRecord{ID: r.EndpointID}
	for _, s := range []string{r.Interface.Address, r.Interface.AddressIPv6} {
		if s == "" {
			continue
		}
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("the container's address: %w", err)
		}
		e.Addrs = append(e.Addrs, p.Addr())
	}
	if n.record.Internal {
		if options.isSet() {
			return nil, errors.New("an internal network has no way out: leave out the container's --driver-opt")
		}
	} else if err := n.outsideLocked(e, options); err != nil {
		return nil, err
	}
	// The engine was killed, and its successor gives the address again.
	for _, old := range slices.Clone(n.record.Endpoints) {
		if slices.ContainsFunc(old.Addrs, func(a netip.Addr) bool { return slices.Contains(e.Addrs, a) }) {
			n.log.Info("an address is another container's now", "address", old.Addrs, "endpoint", short(old.ID))
			n.forgetLocked(old.ID)
		}
	}
	n.record.Endpoints = append(n.record.Endpoints, e)
	if err := n.saveLocked(); err != nil {
		n.record.removeEndpoint(e.ID)
		return nil, err
	}
	return e, nil
}

// outsideLocked gives a container what it is known by beyond this host.
func (n *network) outsideLocked(e *endpointRecord, options exitOptions) error {
	x, err := n.exitLocked(options)
	if err != nil {
		return err
	}
	e.Exit = x.Name
	if e.Number, err = n.record.freeNumber(x.Name, n.last); err != nil {
		return err
	}
	n.last = e.Number
	if len(n.record.Subnets) > 0 {
		return nil
	}
	if len(x.Block) == 0 {
		return fmt.Errorf("the gateway has leased no addresses to this network yet, and --ipam-driver null has no others: " +
			"start the container again when the gateway can be reached; the driver's log says why it cannot")
	}
	e.Addrs = slices.DeleteFunc(x.addrs(e.Number), func(a netip.Addr) bool { return !n.record.has(a) })
	return nil
}

// addrsLocked pairs a container's addresses with those that stand for them
// beyond this host.
func (n *network) addrsLocked(e *endpointRecord) (list []hub.Addr) {
	var outside []netip.Addr
	if x := n.record.exit(e.Exit); x != nil {
		outside = x.addrs(e.Number)
	}
	for _, a := range e.Addrs {
		pair := hub.Addr{Inside: a}
		if i := slices.IndexFunc(outside, func(o netip.Addr) bool { return o.Is4() == a.Is4() }); i >= 0 {
			pair.Outside = outside[i]
		}
		list = append(list, pair)
	}
	return list
}

// join makes the container's device, in the host's namespace: libnetwork moves
// it, gives it its addresses and raises it.
func (d *Driver) join(r *endpointRequest) (any, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.record.endpoint(r.EndpointID)
	if e == nil {
		return nil, fmt.Errorf("the driver does not know endpoint %.12s: start the container again", r.EndpointID)
	}
	n.leaveLocked(e.ID) // where the engine repeats its call
	if err := deleteDevice(e.ID); err != nil {
		return nil, err
	}
	mtu := n.mtuLocked(e)
	device, err := openDevice(e.ID, n.record.Queues, mtu, &n.drops)
	if err != nil {
		return nil, err
	}
	e.Sandbox = sandboxPath(r.SandboxKey)
	if err = n.attachLocked(e, device, mtu); err == nil {
		err = n.saveLocked()
	}
	if err != nil {
		n.leaveLocked(e.ID)
		return nil, errors.Join(err, device.Close(), deleteDevice(e.ID))
	}
	return n.joinResponseLocked(device.Name()), nil
}

// attachLocked connects a device with the hub.
func (n *network) attachLocked(e *endpointRecord, device *tun.Device, mtu int) error {
	port := hub.Port{ID: e.ID, Device: device, Addrs: n.addrsLocked(e)}
	if x := n.exits[e.Exit]; x != nil {
		port.Exit = x.hub
	}
	if err := n.hub.Attach(port); err != nil {
		return err
	}
	n.joined[e.ID] = &endpoint{record: e, device: device, mtu: mtu, since: time.Now()}
	return nil
}

func (n *network) joinResponseLocked(device string) joinResponse {
	// Without a gateway or this word the engine would add an interface to its own
	// bridge, and a route to the internet by it.
	// An internal network has one, too, as Docker's own have, where the hub refuses
	// what it is sent: where no network of a container has, an engine with
	// live-restore loses sight of its interfaces when it starts again. Networks that
	// are not internal come first.
	answer := joinResponse{InterfaceName: interfaceName{SrcName: device, DstPrefix: "eth"}, DisableGatewayService: true}
	gateways := n.record.Gateways
	if len(n.record.Subnets) == 0 {
		gateways = n.record.Exits[0].Gateway
	}
	for _, a := range gateways {
		if !n.record.has(a) {
			continue
		}
		if a.Is4() {
			answer.Gateway = a.String()
		} else {
			answer.GatewayIPv6 = a.String()
		}
		if len(n.record.Subnets) == 0 {
			answer.StaticRoutes = append(answer.StaticRoutes,
				staticRoute{Destination: netip.PrefixFrom(a, a.BitLen()).String(), RouteType: routeConnected})
		}
	}
	answer.DisableGatewayService = answer.Gateway == ""
	return answer
}

// sandboxPath is the path under which the driver itself finds a namespace: in a
// managed plugin there is no /var/run.
func sandboxPath(key string) string {
	if rest, ok := strings.CutPrefix(key, "/var/run/"); ok {
		return "/run/" + rest
	}
	return key
}

// leave ends a container's traffic. Its device is removed later: the engine
// moves it back to the host first.
func (d *Driver) leave(r *endpointRequest) (any, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leaveLocked(r.EndpointID)
	if e := n.record.endpoint(r.EndpointID); e != nil {
		e.Sandbox, e.Ports = "", nil
		return struct{}{}, n.saveLocked()
	}
	return struct{}{}, nil
}

func (n *network) leaveLocked(id string) {
	if e := n.joined[id]; e != nil {
		delete(n.joined, id)
		e.unpublish()
		n.hub.Detach(id)
	}
}

// deleteEndpoint gives up a container's place. One that is not known is fine:
// its creation may have failed.
func (d *Driver) deleteEndpoint(r *endpointRequest) (any, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		// The network is gone, and with it everything of the endpoint.
		return struct{}{}, deleteDevice(r.EndpointID)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.forgetLocked(r.EndpointID)
	return struct{}{}, n.saveLocked()
}

// forgetLocked takes everything of an endpoint away; to store that is the
// caller's part.
func (n *network) forgetLocked(id string) {
	n.leaveLocked(id)
	n.complain(deleteDevice(id))
	n.record.removeEndpoint(id)
}

// program publishes a container's ports.
func (d *Driver) program(r *endpointRequest) (any, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	ports, err := publish.ParsePortMap(r.Options[publish.PortMapOption])
	if err != nil || len(ports) == 0 {
		return struct{}{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.joined[r.EndpointID]
	if e == nil {
		return nil, fmt.Errorf("the driver does not know endpoint %.12s: start the container again", r.EndpointID)
	}
	if n.record.Internal {
		return nil, errors.New("ports of an internal network are not published: leave out -p, or the network's --internal")
	}
	e.unpublish()
	if err := n.publishLocked(e, ports); err != nil {
		return nil, err
	}
	return struct{}{}, n.saveLocked()
}

func (n *network) publishLocked(e *endpoint, ports []publish.Port) (err error) {
	e.ports, err = publish.Listen(ports, publish.Target{Sandbox: e.record.Sandbox, Addrs: e.record.Addrs}, n.log)
	if err != nil {
		return err
	}
	e.record.Ports = e.ports.Ports()
	return nil
}

// revoke ends the publishing of a container's ports.
func (d *Driver) revoke(r *endpointRequest) (any, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.joined[r.EndpointID]; e != nil {
		e.unpublish()
		e.record.Ports = nil
		return struct{}{}, n.saveLocked()
	}
	return struct{}{}, nil
}
