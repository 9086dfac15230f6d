package netlab

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// An NS is a network namespace, with a mount namespace of its own in which /sys
// shows that network.
type NS struct {
	// Name is for people; the kernel does not know it.
	Name string

	lab      *Lab
	net, mnt *os.File
	nl       *netlink.Handle
	joined   bool // by Join
	// calls run on the one thread that lives as long as the namespace: a command
	// started there may ask to die with its parent thread.
	calls chan func()
	stop  chan struct{} // closed to end that thread
	gone  chan struct{} // closed when it has ended
}

// NS makes a namespace: loopback up, nothing forwarded, no source filter; IPv6
// addresses need no duplicate address detection and stay when a link goes down.
func (l *Lab) NS(name string) *NS {
	l.tb.Helper()
	n := &NS{Name: name}
	if err := l.live(n, n.enterNew); err != nil {
		l.tb.Fatalf("make network namespace %s: %v", name, err)
	}
	l.onClose(n.close)
	return n
}

// live starts the thread of a namespace, which enter moves there for good.
func (l *Lab) live(n *NS, enter func() error) error {
	n.lab, n.calls, n.stop, n.gone = l, make(chan func()), make(chan struct{}), make(chan struct{})
	ready := make(chan error)
	onOwnThread(func() {
		defer close(n.gone)
		err := enter()
		ready <- err
		if err != nil {
			return
		}
		for {
			select {
			case f := <-n.calls:
				f()
			case <-n.stop:
				return
			}
		}
	})
	err := <-ready
	if err != nil {
		<-n.gone
	}
	return err
}

// Host returns the namespaces that this process is in, to look around there and
// to run commands that end with the lab. What they change is the host's own.
func (l *Lab) Host() *NS {
	l.tb.Helper()
	n := &NS{Name: "the host"}
	if err := l.live(n, n.hold); err != nil {
		l.tb.Fatalf("hold the host's namespaces: %v", err)
	}
	l.onClose(n.close)
	return n
}

func (n *NS) close() {
	close(n.stop)
	<-n.gone
	n.nl.Close()
	n.net.Close()
	n.mnt.Close()
}

// enterNew moves the calling thread, for good, to new namespaces and keeps them.
func (n *NS) enterNew() (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	if err := n.hold(); err != nil {
		return err
	}
	for _, kv := range [][2]string{
		{"net.ipv4.ip_forward", "0"},
		{"net.ipv4.conf.all.rp_filter", "0"},
		{"net.ipv4.conf.default.rp_filter", "0"},
		{"net.ipv6.conf.all.accept_dad", "0"},
		{"net.ipv6.conf.default.accept_dad", "0"},
		{"net.ipv6.conf.all.keep_addr_on_down", "1"},
		{"net.ipv6.conf.default.keep_addr_on_down", "1"},
	} {
		if err := writeSysctl(kv[0], kv[1]); err != nil {
			return err
		}
	}
	lo, err := n.nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	if err := n.nl.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set loopback up: %w", err)
	}
	return nil
}

// hold keeps the namespaces of the calling thread.
func (n *NS) hold() (err error) {
	if n.net, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	if n.mnt, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
		return err
	}
	if n.nl, err = netlink.NewHandle(); err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	return nil
}

// Do runs f on an OS thread inside the namespace; the lab does not close before f
// has returned. Only what f does itself
// happens there: goroutines that f starts run outside. Sockets, descriptors and
// netlink handles that f opens stay inside wherever they are used.
func (n *NS) Do(f func() error) error {
	if !n.lab.enter() {
		return fmt.Errorf("enter namespace %s: %w", n.Name, net.ErrClosed)
	}
	defer n.lab.inside.Done()
	done := make(chan error, 1)
	onOwnThread(func() {
		// Goexit, as by t.Fatal in f, must not leave the caller waiting.
		result := fmt.Errorf("the function in namespace %s did not return", n.Name)
		defer func() { done <- result }()
		if err := n.enter(); err != nil {
			result = err
			return
		}
		result = f()
	})
	return <-done
}

// onOwnThread runs f on a goroutine with a thread that ends with it.
func onOwnThread(f func()) {
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		// The main thread does not end, and it stands for the process in /proc:
		// keep it out, by holding it until another was found.
		found := make(chan struct{})
		onOwnThread(func() {
			close(found)
			f()
		})
		<-found
		runtime.UnlockOSThread()
	}()
}

func (n *NS) enter() error {
	// The mount namespace of a thread cannot change while it shares its working
	// directory with others.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("enter namespace %s: unshare: %w", n.Name, err)
	}
	if err := unix.Setns(int(n.mnt.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter mount namespace of %s: %w", n.Name, err)
	}
	if err := unix.Setns(int(n.net.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", n.Name, err)
	}
	return nil
}

// must is Do for what has to work.
func (n *NS) must(what string, f func() error) {
	n.lab.tb.Helper()
	if err := n.Do(f); err != nil {
		n.lab.tb.Fatalf("%s in %s: %v", what, n.Name, err)
	}
}

// Netlink returns a route netlink handle inside the namespace.
func (n *NS) Netlink() *netlink.Handle { return n.nl }

// Listen is net.Listen inside the namespace.
func (n *NS) Listen(network, address string) (ln net.Listener, err error) {
	err = n.Do(func() error {
		ln, err = net.Listen(network, address)
		return err
	})
	return ln, err
}

// ListenPacket is net.ListenPacket inside the namespace.
func (n *NS) ListenPacket(network, address string) (pc net.PacketConn, err error) {
	err = n.Do(func() error {
		pc, err = net.ListenPacket(network, address)
		return err
	})
	return pc, err
}

// DialContext is net.Dialer.DialContext inside the namespace. The address is
// literal: a name would be resolved on other threads.
func (n *NS) DialContext(ctx context.Context, network, address string) (c net.Conn, err error) {
	// An HTTP client goes on dialling after its request has ended.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.lab.closing, cancel)()
	err = n.Do(func() error {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Sysctl sets a net.* key of the namespace.
func (n *NS) Sysctl(key, value string) {
	n.lab.tb.Helper()
	n.must("set "+key, func() error { return writeSysctl(key, value) })
}

func writeSysctl(key, value string) error {
	path := filepath.Join("/proc/sys", strings.ReplaceAll(key, ".", "/"))
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl %s: %w", key, err)
	}
	return nil
}

// Forward makes the namespace a router for both IP versions.
func (n *NS) Forward() {
	n.lab.tb.Helper()
	n.Sysctl("net.ipv4.ip_forward", "1")
	n.Sysctl("net.ipv6.conf.all.forwarding", "1")
}

// Replace puts a file with the given content over an existing one, in this
// namespace only.
func (n *NS) Replace(path, content string) {
	n.lab.tb.Helper()
	src := filepath.Join(n.lab.tb.TempDir(), filepath.Base(path))
	n.must("replace "+path, func() error {
		if err := os.WriteFile(src, []byte(content), 0o644); err != nil {
			return err
		}
		return unix.Mount(src, path, "", unix.MS_BIND, "")
	})
}

// Hide puts an empty directory over an existing one, in this namespace only.
func (n *NS) Hide(dir string) {
	n.lab.tb.Helper()
	n.must("hide "+dir, func() error { return unix.Mount("none", dir, "tmpfs", 0, "size=4k") })
}

// ReadOnly lets nobody write to what is in a directory, in this namespace only.
func (n *NS) ReadOnly(dir string) {
	n.lab.tb.Helper()
	n.must("make read-only "+dir, func() error {
		if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	})
}

// Nft runs nft with the given ruleset in the namespace.
func (n *NS) Nft(ruleset string) {
	n.lab.tb.Helper()
	c := n.Command(context.Background(), "nft", "-f", "-")
	c.Stdin = strings.NewReader(ruleset)
	if out, err := c.CombinedOutput(); err != nil {
		n.lab.tb.Fatalf("nft in %s: %v: %s", n.Name, err, out)
	}
}

// Masquerade gives what leaves by the interface the interface's own address, in
// both IP versions.
func (n *NS) Masquerade(iface string) {
	n.lab.tb.Helper()
	n.Nft(fmt.Sprintf(`table inet netlab {
	chain postrouting {
		type nat hook postrouting priority srcnat
		oifname %q masquerade
	}
}`, iface))
}
