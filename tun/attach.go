package tun

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const (
	clone = "/dev/net/tun"

	// attachFlags are the same for every queue of every opener: they belong to
	// the device, and the last one who attaches sets them for all.
	attachFlags = unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_MULTI_QUEUE | unix.IFF_VNET_HDR
)

// attach opens one more queue of the device, makes the device with the first
// one, and fills in the name that the kernel chose.
func attach(d *Device) (*os.File, error) {
	fd, err := unix.Open(clone, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, openError(err)
	}
	ifr, err := unix.NewIfreq(d.name)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("tun: Name %q: %w", d.name, err), unix.Close(fd))
	}
	ifr.SetUint16(attachFlags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return nil, errors.Join(attachError(d.name, len(d.queues), err), unix.Close(fd))
	}
	d.name = ifr.Name()
	// Not before: the runtime's poller takes what is not yet attached for broken.
	return os.NewFile(uintptr(fd), clone), nil
}

// control runs f with the descriptor, which stays open until it returns.
func control(file *os.File, f func(fd int) error) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

func openError(err error) error {
	const node = "in Docker pass --device " + clone + " (Compose: devices: [" + clone + "])"
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("tun: open %s: %w: %s; on a host run: modprobe tun", clone, err, node)
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return fmt.Errorf("tun: open %s: %w: the kernel has no TUN driver: run on the host: modprobe tun", clone, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("tun: open %s: %w: %s; outside a container run as root", clone, err, node)
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return fmt.Errorf("tun: open %s: %w: raise the limit of open files (ulimit -n) or choose fewer queues", clone, err)
	}
	return fmt.Errorf("tun: open %s: %w", clone, err)
}

// attachError explains TUNSETIFF's errors. queues is the number attached before.
func attachError(name string, queues int, err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("tun: open device %s: %w: the capability NET_ADMIN is missing: in Docker pass --cap-add NET_ADMIN (Compose: cap_add: [NET_ADMIN]), elsewhere run as root", name, err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("tun: open device %s: %w: a process has it open: stop that process or choose another name", name, err)
	case errors.Is(err, unix.E2BIG):
		return fmt.Errorf("tun: open queue %d of device %s: %w: too many queues: choose fewer", queues+1, name, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("tun: open device %s: %w: the name is in use by another kind of link, or the kernel lacks multiqueue TUN devices (3.8 has them): choose another name", name, err)
	case errors.Is(err, unix.ENFILE):
		return fmt.Errorf("tun: open device %s: %w: no number is free for the name: choose another", name, err)
	}
	return fmt.Errorf("tun: open device %s: %w", name, err)
}
