// Package dockerlab runs Docker Engines for tests, the demo and benchmarks, each
// on a Docker host of its own that nothing outside notices, and makes the images
// that they use without a registry.
//
// Such a host has the network of a netlab namespace, and mounts, process ids,
// /run, data directories, name servers and a boot id of its own. It shares the
// file system, /dev and the kernel with the machine. All of it dies with its
// first process, and that with the test, however the test ends:
//
//	top := netlab.NewTopology(t, netlab.LinkConfig{})
//	e := dockerlab.Start(t, top.Client, dockerlab.Config{})
//	e.Start(ctx, program, "driver", "--token-file", token) // beside the engine
//	e.Docker(ctx, "network", "create", "-d", "quicvpn", "net")
//	e.Docker(ctx, "run", "-d", "--name", "web", "--network", "net", e.ScratchImage(ctx), "serve")
//	page := e.Docker(ctx, "run", "--rm", "--network", "net", e.ScratchImage(ctx), "get", "http://web/")
//	if _, err := e.TryDocker(ctx, "run", "--mac-address", "02:00:00:00:00:01", …); err == nil { … }
//
// Kill, Stop and StartAgain are about the daemon alone. PowerOff and PowerOn are
// about the whole host; Reboot is both and StartAgain.
//
// It needs root and Debian's packages docker.io and iptables; DebianImage needs
// mmdebstrap.
package dockerlab

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// Config is how an engine differs from the usual. The zero value is an engine as
// Debian has it.
type Config struct {
	// LiveRestore keeps containers running while the daemon does not.
	LiveRestore bool
	// DNS are the name servers that /etc/docker/daemon.json names for containers;
	// none means those of ResolvConf.
	DNS []netip.Addr
	// ResolvConf is what the host's /etc/resolv.conf says. Where it names no
	// server, as when it is empty, Docker chooses public ones.
	ResolvConf string
	// Flags are more arguments of dockerd.
	Flags []string
}

const (
	dockerd    = "/usr/sbin/dockerd"
	containerd = "/usr/bin/containerd"
	// dockerCLI is Debian's: another may come first in PATH, too new for the
	// engine.
	dockerCLI        = "/usr/bin/docker"
	dockerSocket     = "/run/docker.sock"
	containerdSocket = "/run/containerd/containerd.sock"
	// startLimit is the time for the daemon to be ready. At boot it waits 15
	// seconds for the driver of a network that is not there.
	startLimit = 75 * time.Second
	// stopLimit leaves containers their 10 seconds.
	stopLimit = 45 * time.Second
)

// An Engine is a Docker Engine on a Docker host of its own. Its methods that
// start, stop and reboot are for one goroutine; the others for many.
type Engine struct {
	tb      netlab.TB
	outside *netlab.NS // the host's network, and this process's other namespaces
	cfg     Config
	dir     string // all that outlives a reboot
	cgroup  string // above those of all containers
	network network
	images  images
	host    atomic.Pointer[host] // the last that was powered on
	daemon  *netlab.Cmd
}

// Start starts an engine in a network namespace and returns once it answers.
func Start(tb netlab.TB, ns *netlab.NS, cfg Config) *Engine {
	tb.Helper()
	e := &Engine{tb: tb, outside: ns, cfg: cfg, dir: tb.TempDir(), cgroup: "quicvpn-" + rand.Text()}
	for _, d := range []string{"docker", "containerd", "client", "etc-docker"} {
		e.check(os.Mkdir(e.path(d), 0o711))
	}
	e.write("resolv.conf", cfg.ResolvConf)
	daemon, err := json.Marshal(map[string]any{"dns": cfg.DNS, "live-restore": cfg.LiveRestore})
	e.check(err)
	e.write("etc-docker/daemon.json", string(daemon))
	// What Docker does not use takes a third of a second to start.
	e.write("containerd.toml", `version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing",
	"io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
	"io.containerd.snapshotter.v1.zfs"]
`)
	e.network = e.remember()
	tb.Cleanup(e.PowerOff)
	e.powerOn()
	e.StartAgain()
	return e
}

func (e *Engine) check(err error) {
	e.tb.Helper()
	if err != nil {
		e.tb.Fatalf("Docker host in %s: %v", e.outside.Name, err)
	}
}

func (e *Engine) write(name, content string) {
	e.tb.Helper()
	e.check(os.WriteFile(e.path(name), []byte(content), 0o644))
}

func (e *Engine) path(name string) string { return filepath.Join(e.dir, name) }

// Stop stops the daemon gracefully, and with it the containers, unless it has
// LiveRestore.
func (e *Engine) Stop() {
	e.tb.Helper()
	if err := e.daemon.Stop(stopLimit); err != nil {
		e.tb.Fatalf("stop dockerd: %v", err)
	}
}

// Kill kills the daemon. Its containers live on.
func (e *Engine) Kill() { e.daemon.Kill() }

// StartAgain starts the daemon on a host where it does not run, and returns
// once it answers.
func (e *Engine) StartAgain() {
	e.tb.Helper()
	args := []string{"--containerd", containerdSocket,
		"--data-root", e.path("docker"), "--exec-root", "/run/docker", "--pidfile", "/run/docker.pid",
		"--host", "unix://" + dockerSocket, "--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", "/" + e.cgroup}
	e.daemon = e.Start(context.Background(), dockerd, append(args, e.cfg.Flags...)...)
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", e.Path(dockerSocket))
		},
	}}
	e.wait(e.daemon, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/_ping", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("it answers %s", resp.Status)
		}
		return nil
	})
}

// wait waits until a daemon is ready.
func (e *Engine) wait(daemon *netlab.Cmd, ready func(ctx context.Context) error) {
	e.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return
		}
		select {
		case <-daemon.Done():
			e.tb.Fatalf("%s ended (%v) before it was ready", daemon.Args[0], daemon.Wait())
		case <-ctx.Done():
			e.tb.Fatalf("%s is not ready after %v: %v", daemon.Args[0], startLimit, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
