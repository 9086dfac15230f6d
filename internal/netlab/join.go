package netlab

import (
	"fmt"
	"os"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Join returns the namespaces of a running process as an NS: those of mounts,
// of the network, and, for commands alone, of process ids. What Do runs there
// finds no /proc/self where the process has ids of its own.
//
// A command there is not told when this process dies: with process ids of their
// own its parent is 0, which package syscall takes for a dead one. It ends
// with the first process of its PID namespace.
//
// The namespaces live until leave was called, or the lab ends, even where the
// process does not; after that commands start no more.
func (n *NS) Join(name string, pid int) (joined *NS, leave func(), err error) {
	j := &NS{Name: name, joined: true}
	if err := n.lab.live(j, func() error { return j.enterOf(pid) }); err != nil {
		return nil, nil, fmt.Errorf("join the namespaces of process %d: %w", pid, err)
	}
	leave = sync.OnceFunc(j.close)
	n.lab.onClose(leave)
	return j, leave, nil
}

// enterOf moves the calling thread, for good, to the namespaces of a process
// and keeps them. Its children are in the process's PID namespace.
func (n *NS) enterOf(pid int) (err error) {
	// By descriptor: the number may become another process'.
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("open the process: %w", err)
	}
	defer unix.Close(process)
	if n.net, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", pid)); err != nil {
		return err
	}
	if n.mnt, err = os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Setns(process, unix.CLONE_NEWNS|unix.CLONE_NEWNET|unix.CLONE_NEWPID); err != nil {
		return fmt.Errorf("enter: %w", err)
	}
	if n.nl, err = netlink.NewHandle(); err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	return nil
}
