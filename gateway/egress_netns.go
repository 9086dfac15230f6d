package gateway

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// A netNS is a network namespace. What the gateway does to its host it does in
// the namespace that it was made in, whatever thread it runs on then.
type netNS struct {
	f   *os.File
	ino uint64
}

func currentNetNS() (*netNS, error) {
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open the network namespace: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("identify the network namespace: %w", err)
	}
	return &netNS{f: f, ino: st.Ino}, nil
}

// do calls fn inside the namespace. To enter it takes the capability SYS_ADMIN,
// which an ordinary gateway needs not have: it is inside already.
func (n *netNS) do(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		var st unix.Stat_t
		if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
			done <- fmt.Errorf("identify the network namespace: %w", err)
			return
		}
		if st.Ino == n.ino {
			runtime.UnlockOSThread() // so are the process's other threads
		} else if err := unix.Setns(int(n.f.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter the network namespace: %w", err)
			return
		} // else the thread ends with the goroutine
		done <- fn()
	}()
	return <-done
}

// dial connects a socket inside the namespace.
func (n *netNS) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = n.do(func() error {
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

func (n *netNS) close() error { return n.f.Close() }
