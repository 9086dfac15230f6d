// Package nsenter runs functions inside network namespaces that are files, as
// Docker's sandboxes are.
package nsenter

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// nsfsMagic is the type of the file system that namespaces are files of; what
// is left of one after its unmount is an empty file of another.
const nsfsMagic = 0x6e736673

// ErrGone is the error where a path is, or has become, no namespace.
var ErrGone = errors.New("the network namespace is gone")

// Do calls fn on a thread that is inside the network namespace at path, and
// returns its error. What fn opens, such as sockets and TUN devices, stays in
// that namespace; goroutines that it starts are not inside.
func Do(path string, fn func() error) error {
	ns, err := open(path)
	if err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	defer ns.Close()
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, because it is in a
		// namespace where no other goroutine must find itself.
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		done <- fn()
	}()
	return <-done
}

// open opens the namespace at path. Without the look at the type, setns(2)
// would tell "no namespace" and "no privilege" apart only by chance.
func open(path string) (netns.NsHandle, error) {
	ns, err := netns.GetFromPath(path)
	if errors.Is(err, unix.ENOENT) {
		return ns, ErrGone
	}
	if err != nil {
		return ns, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(ns), &st); err != nil {
		ns.Close()
		return -1, err
	}
	if st.Type != nsfsMagic {
		ns.Close()
		return -1, ErrGone
	}
	return ns, nil
}
