package driver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/quicvpn/quicvpn/driver/hub"
	"github.com/quicvpn/quicvpn/internal/identity"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/sidecar"
	"github.com/quicvpn/quicvpn/tunnel"
)

// An exit is a gateway through which containers of a network leave: a session,
// with a key and a block of addresses of its own.
type exit struct {
	network *network
	record  *exitRecord // guarded by the network's lock
	hub     *hub.Exit
	link    *sidecar.Link
	front   *front
	cancel  context.CancelFunc
	done    chan struct{} // closed while the link does not run
	ready   chan struct{} // closed when there was a session
	refused error         // why it cannot be used; set before ready is closed
	// announced says that other members reach containers by their own addresses;
	// guarded by the network's lock.
	announced bool
	// taken says that another member has the network's addresses, and was first;
	// guarded by the network's lock.
	taken bool
	// usable says that the session in use can serve the network; guarded by the
	// network's lock.
	usable bool
}

// makeExits makes all exits of the record. They do not run yet.
func (n *network) makeExits() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.record.Exits {
		if _, err := n.makeExitLocked(r); err != nil {
			return err
		}
	}
	return nil
}

func (n *network) makeExitLocked(r *exitRecord) (*exit, error) {
	t, err := token.Parse(r.Token)
	if err != nil {
		return nil, err
	}
	key, _, err := identity.LoadOrCreate(filepath.Join(n.dir, r.Name+".key"))
	if err != nil {
		return nil, fmt.Errorf("the network's key: %w", err)
	}
	x := &exit{network: n, record: r, hub: n.hub.Exit, cancel: func() {}, done: make(chan struct{}), ready: make(chan struct{})}
	close(x.done)
	cfg := sidecar.LinkConfig{
		Token: t, Key: key, Queues: n.record.Queues, MTU: n.record.MTU,
		Congestion: n.driver.cfg.Congestion, PathFile: filepath.Join(n.dir, r.Name+".paths"), DisableOffload: n.driver.cfg.DisableOffload,
		Block: true, Names: n.record.names(), TCP: n.record.TCP,
		Drops: &n.drops, Log: n.log,
		Connected: x.connected, Disconnected: x.disconnected, Changed: x.changed,
	}
	if r.Name == mainExit {
		cfg.Announce = n.record.Subnets
	} else {
		x.hub = n.hub.NewExit()
	}
	if x.link, err = sidecar.NewLink(cfg); err != nil {
		return nil, err
	}
	x.front = newFront(x)
	x.hub.SetLocal(x.front)
	n.exits[r.Name] = x
	return x, nil
}

// runExits starts all exits.
func (n *network) runExits() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, x := range n.exits {
		x.run()
	}
}

// run keeps a session until stop.
func (x *exit) run() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	x.cancel, x.done = cancel, done
	go func() {
		defer close(done)
		// It only ends when it is told to.
		x.network.complain(x.link.Run(ctx))
	}()
}

// wait returns when there was a session, or with the reason why there is none.
func (x *exit) wait(timeout time.Duration) error {
	deadline := time.After(timeout)
	// A gateway that says no says it soon, and will not change its mind.
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-x.ready:
			return x.refused
		case <-deadline:
			err := x.link.Status().Err
			if err == nil {
				err = errors.New("the gateway has not answered")
			}
			return fmt.Errorf("no tunnel after %v: %w; nothing was created: try again, or create the network without waiting for its gateway (-o wait=0)", timeout, err)
		case <-tick.C:
			if err := x.link.Status().Err; final(err) {
				return err
			}
		}
	}
}

// final reports a no that stays one.
func final(err error) bool {
	var refused *tunnel.RefusedError
	return errors.As(err, &refused) && refused.Status != http.StatusServiceUnavailable ||
		errors.Is(err, tunnel.ErrPin) || errors.Is(err, tunnel.ErrExpired) || errors.Is(err, tunnel.ErrNotYetValid)
}

// stop ends the session and returns when it has.
func (x *exit) stop() {
	x.cancel()
	<-x.done
	x.network.complain(x.front.close())
}

// leave gives up the membership at the gateway, and then the session.
func (x *exit) leave(ctx context.Context) {
	defer x.stop()
	err := x.link.Leave(ctx)
	// A session that has only just begun takes a moment to be in use.
	for err != nil && ctx.Err() == nil && x.link.Status().Gateway.IsValid() {
		time.Sleep(10 * time.Millisecond)
		err = x.link.Leave(ctx)
	}
	x.network.mu.Lock()
	member := len(x.record.Block) > 0
	x.network.mu.Unlock()
	if err != nil && member {
		x.network.log.Warn("the gateway was not told that this client leaves, and keeps its addresses until the client is removed there",
			"error", err)
	}
}

// connected puts a session in use.
func (x *exit) connected(g tunnel.Grant) tunnel.Sink {
	n := x.network
	n.mu.Lock()
	defer n.mu.Unlock()
	x.usable, x.taken = false, false
	if err := n.record.clash(g); err != nil {
		n.log.Error("the gateway cannot serve the network", "error", err)
		x.beReady(err)
		return x.hub // which has no uplink: nothing leaves, and nothing comes in
	}
	x.takeLocked(g)
	x.announced = len(g.Announced) > 0 && g.AnnounceRefused == ""
	if g.AnnounceRefused != "" {
		x.taken = overlap(n.record.Subnets, x.link.Peers())
		n.log.Warn("other members of the network cannot reach containers here by their own addresses, and are not reached from here; "+
			"traffic to the internet is not affected", "reason", g.AnnounceRefused)
	}
	x.usable = true
	x.plugLocked()
	n.syncMTULocked()
	x.beReady(nil)
	return x.hub
}

// beReady ends the wait for the first session.
func (x *exit) beReady(err error) {
	select {
	case <-x.ready:
	default:
		x.refused = err
		close(x.ready)
	}
}

// takeLocked notes what the gateway leased.
func (x *exit) takeLocked(g tunnel.Grant) {
	n, r := x.network, x.record
	block := slices.DeleteFunc(slices.Clone(g.Block), func(p netip.Prefix) bool { return p.Addr().BitLen()-p.Bits() != 8 })
	if len(block) == 0 {
		n.log.Error("the gateway leases no block of addresses: install the same release on both; containers reach nothing outside")
	}
	changed := !slices.Equal(r.Block, block)
	if changed && len(r.Block) > 0 {
		n.log.Warn("the gateway leases other addresses than before", "before", r.Block, "now", block)
		if len(n.record.Subnets) == 0 {
			n.log.Error("other members of the network do not reach containers with addresses of the old block any more: start them again")
		}
	}
	if !changed && slices.Equal(r.Gateway, g.Gateway) && r.MTU == x.link.MTU() {
		return
	}
	r.Block, r.Gateway, r.MTU = block, slices.Clone(g.Gateway), x.link.MTU()
	if err := n.saveLocked(); err != nil {
		n.log.Error("the gateway's lease is not stored", "error", err)
	}
	for id, e := range n.joined {
		if e.record.Exit == r.Name {
			n.complain(n.hub.SetOutside(id, n.addrsLocked(e.record)))
		}
	}
}

// plugLocked connects the hub with the session.
func (x *exit) plugLocked() {
	x.hub.SetUplink(&hub.Uplink{
		Send:      x.link.Send,
		Peers:     x.link.Peers(),
		Announced: x.announced,
		Gateway:   x.record.Gateway,
	})
}

func (x *exit) disconnected() { x.hub.SetUplink(nil) }

// changed follows the session's MTU and the other members' addresses.
func (x *exit) changed() {
	n := x.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if !x.usable {
		return
	}
	x.plugLocked()
	if x.taken && !overlap(n.record.Subnets, x.link.Peers()) {
		x.taken = false
		go x.link.Renew("to announce the network again, whose addresses nobody else has any more")
	}
	if mtu := x.link.MTU(); mtu != 0 {
		x.record.MTU = mtu
	}
	n.syncMTULocked()
}

// overlap reports whether two lists have addresses in common.
func overlap(ours, theirs []netip.Prefix) bool {
	return slices.ContainsFunc(ours, func(a netip.Prefix) bool { return slices.ContainsFunc(theirs, a.Overlaps) })
}

// clash says why a gateway cannot serve the network: nobody in addresses that both
// have could be reached.
func (r *record) clash(g tunnel.Grant) error {
	for _, p := range g.Block {
		for _, s := range r.Subnets {
			if p.Overlaps(s) {
				return fmt.Errorf("the network's subnet %v overlaps the gateway's pool at %v: choose another --subnet", s, p)
			}
		}
	}
	return nil
}

// exitLocked returns the record of the exit that a container asks for. Where it
// is new, it is made, and started. It then stays as long as the network: the
// container may come back when its token enrols nobody any more.
func (n *network) exitLocked(o exitOptions) (*exitRecord, error) {
	if !o.isSet() {
		return n.record.Exits[0], nil
	}
	sum := sha256.Sum256([]byte(o.tokenText))
	name := hex.EncodeToString(sum[:8])
	if r := n.record.exit(name); r != nil {
		return r, nil
	}
	r := &exitRecord{Name: name, Token: o.tokenText}
	x, err := n.makeExitLocked(r)
	if err != nil {
		return nil, err
	}
	n.record.Exits = append(n.record.Exits, r)
	if err := n.saveLocked(); err != nil {
		n.record.Exits = n.record.Exits[:len(n.record.Exits)-1]
		delete(n.exits, name)
		return nil, err
	}
	x.run()
	return r, nil
}
