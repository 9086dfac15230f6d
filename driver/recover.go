package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/quicvpn/quicvpn/internal/nsenter"
)

// recover takes up what an earlier run has left, in this order:
//
//  1. the records of all networks
//  2. those of another boot lose their endpoints
//  3. every container's device, where it is now; one that is gone is forgotten
//  4. devices in the driver's own namespace, which no container is to have, are
//     removed
//  5. the sessions start
func (d *Driver) recover() error {
	records, err := d.loadRecords()
	if err != nil {
		return err
	}
	deadline := time.Now().Add(takeOver)
	for _, r := range records {
		n := d.newNetwork(r)
		err := n.makeExits()
		if err == nil {
			err = n.restore(deadline)
		}
		if err != nil {
			d.cfg.Log.Error("a network cannot be used", "network", r.ID, "error", err)
			d.broken[r.ID] = err
			n.close()
			continue
		}
		d.networks[r.ID] = n
	}
	if err := d.deleteStrays(); err != nil {
		return err
	}
	for _, n := range d.networks {
		n.runExits()
	}
	return nil
}

// loadRecords reads all networks. Those that cannot be used are noted.
func (d *Driver) loadRecords() (all []*record, err error) {
	dir := filepath.Join(d.cfg.StateDir, "networks")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the state directory: %w", err)
	}
	for _, entry := range entries {
		r, err := loadRecord(filepath.Join(dir, entry.Name()))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			d.cfg.Log.Warn("a network's directory has no record in it: its creation or removal was cut off", "directory", filepath.Join(dir, entry.Name()))
		case err != nil:
			d.cfg.Log.Error("a network cannot be used", "error", err)
			d.broken[entry.Name()] = err
		default:
			all = append(all, r)
		}
	}
	return all, nil
}

// restore takes up the containers of a network. Devices that another process holds
// are waited for until the deadline.
func (n *network) restore(deadline time.Time) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.record.Boot != n.driver.boot {
		n.record.Endpoints, n.record.Boot = nil, n.driver.boot
		return n.saveLocked()
	}
	before := len(n.record.Endpoints)
	for _, e := range slices.Clone(n.record.Endpoints) {
		n.last = max(n.last, e.Number)
		if e.Sandbox == "" {
			continue // the engine may be about to join it, or to delete it
		}
		if err := n.restoreEndpointLocked(e, deadline); err != nil {
			n.log.Info("a container is gone", "endpoint", short(e.ID), "reason", err)
			n.forgetLocked(e.ID)
		}
	}
	if len(n.record.Endpoints) == before {
		return nil
	}
	return n.saveLocked()
}

// takeOver is for how long devices are waited for, all of them together, that a
// dying driver holds. The engine gives up on a managed plugin after 10 seconds.
const takeOver = 5 * time.Second

func (n *network) restoreEndpointLocked(e *endpointRecord, deadline time.Time) error {
	for {
		device, mtu, err := reopenDevice(e.Sandbox, e.ID, n.record.Queues, &n.drops)
		if err == nil {
			if err := n.attachLocked(e, device, mtu); err != nil {
				return errors.Join(err, device.Close())
			}
			// The start of a container goes on, or it ended without the driver: soon it
			// is clear which.
			n.joined[e.ID].since = time.Now().Add(takeOver - startGrace)
			break
		}
		if errors.Is(err, nsenter.ErrGone) || errors.Is(err, errNoDevice) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	_ = n.movedLocked(n.joined[e.ID]) // else it is soon
	return nil
}

// movedLocked looks whether the device of a container that starts has got into its
// sandbox. If it has, the ports are published that an earlier run has published:
// not before, since they may be another's where the container has ended.
func (n *network) movedLocked(e *endpoint) error {
	err := nsenter.Do(e.record.Sandbox, func() error {
		_, err := findDevice(e.record.ID)
		return err
	})
	if err != nil {
		return err
	}
	e.moved = true
	if len(e.record.Ports) > 0 && e.ports == nil {
		if err := n.publishLocked(e, e.record.Ports); err != nil {
			n.log.Error("a container's ports are not published any more: start it again", "endpoint", short(e.record.ID), "error", err)
		}
	}
	return nil
}

// reconcile asks the engine, once it answers, which networks there are: those
// that it removed while there was no driver are removed here as well.
func (d *Driver) reconcile(ctx context.Context) {
	before := d.all()
	if len(before) == 0 {
		return
	}
	for {
		ids, err := engineNetworks(ctx, d.cfg.DockerSocket)
		if err == nil {
			for _, n := range before {
				if !slices.Contains(ids, n.record.ID) {
					n.log.Info("the engine does not know the network any more: removing it")
					n.waitToLeave()
					d.remove(n)
				}
			}
			return
		}
		d.cfg.Log.Debug("the engine does not say which networks it has", "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(checkInterval):
		}
	}
}

// waitToLeave waits for a session, by which the gateway can be told that the
// network's addresses are free. Without one they stay taken there.
func (n *network) waitToLeave() {
	n.mu.Lock()
	x := n.exits[mainExit]
	n.mu.Unlock()
	if x != nil {
		_ = x.wait(createWait) // remove says what became of it
	}
}

// engineNetworks lists the engine's networks of this driver, whether a plugin of
// its own or a managed one.
func engineNetworks(ctx context.Context, socket string) (ids []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // dockerd is slow to start
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	filter := url.QueryEscape(`{"type":["custom"]}`)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/networks?filters="+filter, nil)
	if err != nil {
		return nil, err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the engine answers %s", response.Status)
	}
	var list []struct{ ID string }
	if err := json.NewDecoder(http.MaxBytesReader(nil, response.Body, 64<<20)).Decode(&list); err != nil {
		return nil, fmt.Errorf("read the engine's networks: %w", err)
	}
	for _, n := range list {
		ids = append(ids, n.ID)
	}
	return ids, nil
}
