package dockerlab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A host is one life of a Docker host, from power on to power off.
type host struct {
	init  *netlab.Cmd // first process of its PID namespace: all else dies with it
	ns    *netlab.NS  // as the processes there see it
	leave func()
}

// PowerOn boots the Docker host, which was powered off, up to the point where
// the daemon starts: its /run, its network but for what was there before the
// engine, and its boot id are new.
func (e *Engine) PowerOn() {
	e.tb.Helper()
	e.network.restore(e)
	e.powerOn()
}

func (e *Engine) powerOn() {
	e.tb.Helper()
	var id [16]byte
	rand.Read(id[:])
	e.write("boot_id", fmt.Sprintf("%x-%x-%x-%x-%x\n", id[:4], id[4:6], id[6:8], id[8:10], id[10:]))
	h := &host{init: e.outside.Command(context.Background(), Toolbox(e.tb), "init", e.dir)}
	h.init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	e.check(h.init.Start())
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	e.check(h.init.WaitLog(ctx, "ready"))
	var err error
	h.ns, h.leave, err = e.outside.Join(e.outside.Name, h.init.Process.Pid)
	e.check(err)
	e.host.Store(h)
	// Apart from the daemon: one that a killed daemon has left can keep the next
	// from starting in time.
	shims := e.Start(context.Background(), containerd, "--log-level", "warn", "--config", e.path("containerd.toml"),
		"--root", e.path("containerd"), "--state", "/run/containerd", "--address", containerdSocket)
	e.wait(shims, func(ctx context.Context) error {
		c, err := new(net.Dialer).DialContext(ctx, "unix", e.Path(containerdSocket))
		if err != nil {
			return err
		}
		return c.Close()
	})
}

// PowerOff ends all that runs on the host at once, as a power failure does. What
// the daemon keeps on disk stays. It does nothing where the power is off.
func (e *Engine) PowerOff() {
	e.tb.Helper()
	h := e.host.Load()
	if h == nil {
		return
	}
	h.init.Kill()
	h.leave()
	e.check(e.removeCgroups())
}

// Reboot is PowerOff, PowerOn and StartAgain: containers with a restart policy
// run again.
func (e *Engine) Reboot() {
	e.tb.Helper()
	e.PowerOff()
	e.PowerOn()
	e.StartAgain()
}

// NS returns the host as its processes see it, until the power goes off.
func (e *Engine) NS() *netlab.NS { return e.host.Load().ns }

// Path returns the name that a file of the host, such as one in /run, has for
// this process.
func (e *Engine) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", e.host.Load().init.Process.Pid), path)
}

// Command prepares a command on the Docker host, as netlab's NS does.
func (e *Engine) Command(ctx context.Context, name string, args ...string) *netlab.Cmd {
	c := e.NS().Command(ctx, name, args...)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "DOCKER_") && !strings.HasPrefix(kv, "COMPOSE_") {
			c.Env = append(c.Env, kv)
		}
	}
	c.Env = append(c.Env, "DOCKER_CONFIG="+e.path("client"), "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
	return c
}

// Start starts a command that must start on the Docker host, and returns it
// running. It is killed when ctx ends.
func (e *Engine) Start(ctx context.Context, name string, args ...string) *netlab.Cmd {
	e.tb.Helper()
	c := e.Command(ctx, name, args...)
	e.check(c.Start())
	return c
}

// removeCgroups removes the control groups of containers and managed plugins,
// which all have ended.
func (e *Engine) removeCgroups() error {
	names := []string{e.cgroup}
	plugins, err := os.ReadDir(e.path("docker/plugins"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, p := range plugins {
		if len(p.Name()) == 64 { // an id; a plugin has no other control group
			names = append(names, p.Name())
		}
	}
	for _, name := range names {
		// One in each hierarchy of version 1; version 2 has the one.
		for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
			roots, err := filepath.Glob(pattern + name)
			if err != nil {
				return err
			}
			for _, root := range roots {
				if err := removeCgroup(root); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// removeCgroup removes a control group and those below. What has ended may be
// counted there for a moment.
func removeCgroup(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, dir := range slices.Backward(dirs) {
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			err := syscall.Rmdir(dir)
			if err == nil {
				break
			}
			if !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
				return fmt.Errorf("remove control group %s: %w", dir, err)
			}
		}
	}
	return nil
}
