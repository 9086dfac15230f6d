package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// initialize sets up the mounts of a Docker host, in the mount namespace that
// this process was started in, prints "ready", and is the first process of the
// host's PID namespace until it is killed.
func initialize(_ context.Context, args []string) error {
	if os.Getpid() != 1 {
		return errors.New("init is for the first process of a PID namespace")
	}
	if err := mounts(args[0]); err != nil {
		return err
	}
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	fmt.Println("ready")
	for range died {
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 && !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
	return nil
}

// mounts gives the host a /proc of its processes, a /sys of its network, a /run
// and, from dir, a boot id, an /etc/resolv.conf and an /etc/docker of its own.
func mounts(dir string) error {
	resolv, err := filepath.EvalSymlinks("/etc/resolv.conf")
	if err != nil {
		return fmt.Errorf("find resolv.conf: %w", err)
	}
	if err := os.MkdirAll("/etc/docker", 0o755); err != nil {
		return err
	}
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
	}{
		{"proc", "/proc", "proc", 0},
		{"tmpfs", "/run", "tmpfs", 0},
		{filepath.Join(dir, "etc-docker"), "/etc/docker", "", unix.MS_BIND},
		{filepath.Join(dir, "boot_id"), "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND},
	} {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	// It may be a link into the /run that was.
	if err := os.MkdirAll(filepath.Dir(resolv), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(resolv, os.O_CREATE|os.O_RDONLY, 0o644)
	if err != nil {
		return err
	}
	f.Close()
	if err := unix.Mount(filepath.Join(dir, "resolv.conf"), resolv, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount resolv.conf: %w", err)
	}
	if err := cgroups(); err != nil {
		return err
	}
	// As on a host with systemd; nothing is shared with the one outside.
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share mounts: %w", err)
	}
	return nil
}

// cgroups brings the control groups, which are below the /sys of the host
// outside, to the /sys of the network namespace that netlab has put over it.
func cgroups() error {
	const outside, inside = "/run/cgroup", "/sys/fs/cgroup"
	if err := os.Mkdir(outside, 0o755); err != nil {
		return err
	}
	if err := unix.Unmount("/sys", 0); err != nil {
		return fmt.Errorf("uncover the host's /sys: %w", err)
	}
	if err := unix.Mount(inside, outside, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep the control groups: %w", err)
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	if err := unix.Mount(outside, inside, "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("mount the control groups: %w", err)
	}
	return os.Remove(outside)
}
