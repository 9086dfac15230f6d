package sidecar

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/durable"
)

// lockNamespace makes sure that this is the only sidecar of its network
// namespace: two would take each other's rules away. Abstract unix sockets
// belong to a network namespace and vanish with their process.
func lockNamespace() (io.Closer, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("lock the network namespace: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: "@quicvpn-sidecar"}); err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EADDRINUSE) {
			return nil, errors.New("another quicvpn sidecar runs in this network namespace: stop it first; one serves all that share the namespace")
		}
		return nil, fmt.Errorf("lock the network namespace: %w", err)
	}
	return os.NewFile(uintptr(fd), "lock"), nil
}

// lockState makes sure that this is the only sidecar of its state directory: two would
// be one client, and take its place at the gateway from each other.
func lockState(dir string) (io.Closer, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	if err := durable.Lock(f); err != nil {
		f.Close()
		if errors.Is(err, durable.ErrLocked) {
			return nil, fmt.Errorf("another quicvpn sidecar runs with the state directory %s: stop it, or give this one another --state-dir", dir)
		}
		return nil, err
	}
	return f, nil
}

// haveIPv6 reports that the kernel has IPv6 at all.
func haveIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
}

// ipv6Off says why an interface cannot have IPv6; empty if it can.
func ipv6Off(name string) string {
	if !haveIPv6() {
		return "this kernel has no IPv6"
	}
	value, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + name + "/disable_ipv6")
	// An interface whose MTU is too small for IPv6 has no such file.
	if err == nil && strings.TrimSpace(string(value)) == "1" {
		return fmt.Sprintf("net.ipv6.conf.%s.disable_ipv6 is 1; to have it, start the container with --sysctl net.ipv6.conf.all.disable_ipv6=0", name)
	}
	return ""
}
