// Package driver is Docker's network driver: the remote-driver protocol, the
// lifecycle of networks and endpoints, and what is known of them durably.
//
// It knows Docker, and nothing of QUIC: packets are package hub's business,
// sessions are package sidecar's. It never calls the engine while the engine
// calls it.
package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A Config says how a driver runs.
type Config struct {
	// StateDir holds the networks, their keys and join tokens. Required.
	StateDir string
	// PluginDir is where the engine looks for plugins; empty means
	// /run/docker/plugins.
	PluginDir string
	// TokenFile holds the join token of networks that name none; empty if there
	// is none.
	TokenFile string
	// DockerSocket is the engine's, which is asked after a start for networks
	// that were removed meanwhile; empty means /run/docker.sock.
	DockerSocket string
	// Congestion decides how fast sessions send; empty means tunnel.BBR.
	Congestion tunnel.Congestion
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// Log is where the driver speaks; nil discards.
	Log *slog.Logger
}

const (
	// Name is the driver's, as in `docker network create -d`.
	Name = "quicvpn"

	defaultPluginDir    = "/run/docker/plugins"
	defaultDockerSocket = "/run/docker.sock"

	// checkInterval is how often sandboxes are looked at: one that went without a
	// word from the engine is forgotten.
	checkInterval = 3 * time.Second
)

// A Driver serves one engine.
type Driver struct {
	cfg      Config
	boot     string
	lock     *os.File
	listener net.Listener

	mu       sync.Mutex          // guards what follows
	networks map[string]*network // by the engine's ID
	broken   map[string]error    // networks whose record cannot be used
}

// New takes up what an earlier run has left, and then the plugin's socket, in
// the network namespace of the calling thread. After an error it has let go of
// everything; what containers have stays as it was.
func New(cfg Config) (_ *Driver, err error) {
	if cfg.StateDir == "" {
		return nil, errors.New("start driver: no state directory: say which with --state-dir")
	}
	if cfg.PluginDir == "" {
		cfg.PluginDir = defaultPluginDir
	}
	if cfg.DockerSocket == "" {
		cfg.DockerSocket = defaultDockerSocket
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.TokenFile != "" {
		if cfg.TokenFile, err = filepath.Abs(cfg.TokenFile); err != nil {
			return nil, fmt.Errorf("start driver: find the token file: %w", err)
		}
	}
	d := &Driver{cfg: cfg, networks: make(map[string]*network), broken: make(map[string]error)}
	defer func() {
		if err != nil {
			err = fmt.Errorf("start driver: %w", errors.Join(err, d.Close()))
		}
	}()
	if err := checkHost(); err != nil {
		return nil, err
	}
	if err := d.acquire(); err != nil {
		return nil, err
	}
	d.checkToken()
	if err := d.recover(); err != nil {
		return nil, err
	}
	// Only now: the first call finds everything in its place.
	return d, d.listen()
}

// acquire makes the state directory this process's own.
func (d *Driver) acquire() error {
	if err := os.MkdirAll(filepath.Join(d.cfg.StateDir, "networks"), 0o700); err != nil {
		return fmt.Errorf("make the state directory: %w", err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("find out which boot this is: %w", err)
	}
	d.boot = string(boot[:len(boot)-1])
	path := filepath.Join(d.cfg.StateDir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("lock the state directory: %w", err)
	}
	if err := durable.Lock(f); err != nil {
		f.Close()
		if errors.Is(err, durable.ErrLocked) {
			return fmt.Errorf("another driver runs with the state directory %s: stop it, or give this one another --state-dir and --plugin-dir", d.cfg.StateDir)
		}
		return err
	}
	d.lock = f
	return nil
}

// checkToken tells early what the creation of a network would. The file may come
// later than the driver.
func (d *Driver) checkToken() {
	if d.cfg.TokenFile == "" {
		d.cfg.Log.Info("no --token-file: each network needs a -o token-file=PATH")
		return
	}
	if err := new(exitOptions).readToken(d.cfg.TokenFile); err != nil {
		d.cfg.Log.Warn("no network can be created without a -o token-file=PATH of its own until --token-file is mended", "error", err)
	}
}

// listen makes the socket on which the engine calls.
func (d *Driver) listen() error {
	if err := os.MkdirAll(d.cfg.PluginDir, 0o755); err != nil {
		return fmt.Errorf("make the plugin directory: %w", err)
	}
	path := filepath.Join(d.cfg.PluginDir, Name+".sock")
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return fmt.Errorf("another driver answers on %s: stop it, or give this one another --plugin-dir", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the socket of an earlier run: %w", err)
	}
	// Nobody but root: who can call the driver can read its files.
	defer unix.Umask(unix.Umask(0o177))
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("listen for the engine: %w", err)
	}
	d.listener = l
	return nil
}

// Run serves the engine until ctx ends, and then returns nil. The containers
// keep their devices, addresses and routes, and what they send goes nowhere
// until the next run.
func (d *Driver) Run(ctx context.Context) error {
	d.cfg.Log.Info("the driver is up", "socket", d.listener.Addr())
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := d.handler().Serve(d.listener)
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("serve the engine: %w", err)
	})
	g.Go(func() error {
		<-ctx.Done()
		return d.listener.Close()
	})
	g.Go(func() error { d.check(ctx); return nil })
	g.Go(func() error { d.reconcile(ctx); return nil })
	return errors.Join(g.Wait(), d.Close())
}

// Close lets go of everything that New took. Run does it, too.
func (d *Driver) Close() error {
	if d.listener != nil {
		d.listener.Close() // of a socket that is closed already, or removed
	}
	var wg sync.WaitGroup
	for _, n := range d.all() {
		wg.Go(n.close)
	}
	wg.Wait()
	if d.lock != nil {
		return d.lock.Close()
	}
	return nil
}

// check looks after sandboxes until ctx ends.
func (d *Driver) check(ctx context.Context) {
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			for _, n := range d.all() {
				n.check()
			}
		}
	}
}

func (d *Driver) all() []*network {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*network
	for _, n := range d.networks {
		all = append(all, n)
	}
	return all
}

// network returns a network that the driver knows. There is no guess about
// others: containers on a network made up on the spot could send in clear.
func (d *Driver) network(id string) (*network, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.networks[id]; n != nil {
		return n, nil
	}
	if err := d.broken[id]; err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("the driver does not know network %.12s: its state in %s was removed, or the network is another driver's; "+
		"remove the network with `docker network rm` and create it again", id, d.cfg.StateDir)
}

// checkHost says early what no container could do without.
func checkHost() error {
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%w: the kernel has no TUN devices: run `modprobe tun`, or give the driver's container --device /dev/net/tun", err)
	}
	if err != nil {
		return fmt.Errorf("%w: the driver needs TUN devices: run it as root, with access to /dev/net/tun", err)
	}
	f.Close()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // of capabilities 0 to 31, and of the others
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("find out the driver's capabilities: %w", err)
	}
	for _, c := range []struct {
		number int
		name   string
		why    string
	}{
		{unix.CAP_NET_ADMIN, "NET_ADMIN", "to make devices"},
		{unix.CAP_SYS_ADMIN, "SYS_ADMIN", "to enter the containers' network namespaces"},
	} {
		if sets[c.number/32].Effective&(1<<(c.number%32)) == 0 {
			return fmt.Errorf("the driver lacks the capability %s, which it needs %s: run it as root, or its container with --cap-add %s", c.name, c.why, c.name)
		}
	}
	return nil
}
