package tun

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a device in a namespace and closes it with the test.
func open(t *testing.T, ns *netlab.NS, cfg Config) *Device {
	t.Helper()
	d, err := openIn(ns, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return d
}

func openIn(ns *netlab.NS, cfg Config) (d *Device, err error) {
	err = ns.Do(func() error {
		d, err = Open(cfg)
		return err
	})
	return d, err
}

func descriptors(t *testing.T) []string {
	t.Helper()
	fds, err := netlab.Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	// The runtime's own come with the first use, and its pipes for splice go when
	// the garbage collector says so.
	return slices.DeleteFunc(fds, func(s string) bool { return s == "anon_inode:" || s == "pipe:" })
}

// dropCapability takes a capability from the calling thread.
func dropCapability(bit uint) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[bit/32].Effective &^= 1 << (bit % 32)
	return unix.Capset(&hdr, &data[0])
}

// Every failure says what to do, and leaves neither link nor descriptor.
func TestOpenErrors(t *testing.T) {
	lab := netlab.New(t)
	for _, c := range []struct {
		name   string
		cfg    Config
		before func(ns *netlab.NS) error // in the namespace, on the thread that opens
		want   []string
		is     error
	}{
		{name: "name too long", cfg: Config{Name: "a-name-of-16-byt"}, want: []string{"Name", "15 bytes"}},
		{name: "name with slash", cfg: Config{Name: "a/b"}, want: []string{"Name", "slash"}},
		{name: "queues", cfg: Config{Queues: 257}, want: []string{"Queues 257", "1 to 256"}},
		{name: "negative queues", cfg: Config{Queues: -1}, want: []string{"Queues -1"}},
		{name: "small MTU", cfg: Config{MTU: 575}, want: []string{"MTU 575", "576 to 65535"}},
		{name: "large MTU", cfg: Config{MTU: 100000}, want: []string{"MTU 100000", "576 to 65535"}},
		{name: "negative queue length", cfg: Config{TxQueueLen: -1}, want: []string{"TxQueueLen -1"}},
		{name: "alias", cfg: Config{Alias: strings.Repeat("x", 256)}, want: []string{"Alias", "255"}},
		{
			name: "no /dev/net/tun", is: fs.ErrNotExist,
			before: func(ns *netlab.NS) error { return hideDevice() },
			want:   []string{"/dev/net/tun", "--device /dev/net/tun", "modprobe tun"},
		},
		{
			name: "no driver", is: unix.ENODEV,
			before: func(ns *netlab.NS) error { return replaceDevice(0o666, 255) },
			want:   []string{"modprobe tun"},
		},
		{
			name: "no permission for /dev/net/tun", is: fs.ErrPermission,
			before: func(ns *netlab.NS) error {
				return errors.Join(replaceDevice(0, 200), dropCapability(unix.CAP_DAC_OVERRIDE))
			},
			want: []string{"/dev/net/tun", "--device /dev/net/tun", "as root"},
		},
		{
			name: "no NET_ADMIN", is: fs.ErrPermission,
			before: func(ns *netlab.NS) error { return dropCapability(unix.CAP_NET_ADMIN) },
			want:   []string{"NET_ADMIN", "--cap-add"},
		},
		{
			name: "name of another link", cfg: Config{Name: "taken0"},
			before: func(ns *netlab.NS) error {
				return ns.Netlink().LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "taken0"}})
			},
			want: []string{"taken0", "bridge", "choose another name"},
		},
		{
			name: "name of a device without queues", cfg: Config{Name: "taken0"},
			before: func(ns *netlab.NS) error {
				return ns.Netlink().LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "taken0"}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI})
			},
			want: []string{"taken0", "ip link delete taken0"},
		},
		{
			name: "name of a TAP device", cfg: Config{Name: "taken0"},
			before: func(ns *netlab.NS) error {
				return ns.Netlink().LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "taken0"}, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_NO_PI})
			},
			want: []string{"taken0", "choose another name"},
		},
		{
			name: "no memory for the queues", cfg: Config{Name: "new0", Queues: 3, TxQueueLen: 1 << 30},
			want: []string{"queue length of new0 to 1073741824"},
		},
		{
			name: "too few descriptors", cfg: Config{Name: "new0", Queues: 200}, is: unix.EMFILE,
			before: func(ns *netlab.NS) error { return limitDescriptors(t, 120) },
			want:   []string{"ulimit -n", "fewer queues"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := lab.NS("ns")
			fds := descriptors(t)
			var before, after netlab.Snapshot
			err := ns.Do(func() error {
				if c.before != nil {
					if err := c.before(ns); err != nil {
						t.Errorf("prepare: %v", err)
						return nil
					}
				}
				before = links(t, ns)
				d, err := Open(c.cfg)
				after = links(t, ns)
				if err == nil {
					return errors.Join(errors.New("no error"), d.Close())
				}
				for _, w := range c.want {
					if !strings.Contains(err.Error(), w) {
						t.Errorf("%q does not say %q", err, w)
					}
				}
				if c.is != nil && !errors.Is(err, c.is) {
					t.Errorf("%v is not %v", err, c.is)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			if d := before.Diff(after); d != "" {
				t.Errorf("links changed:\n%s", d)
			}
			if d := cmp.Diff(fds, descriptors(t)); d != "" {
				t.Errorf("descriptors:\n%s", d)
			}
		})
	}
}

// links lists the links of a namespace.
func links(t *testing.T, ns *netlab.NS) netlab.Snapshot {
	list, err := ns.Netlink().LinkList()
	if err != nil {
		t.Errorf("list links: %v", err)
	}
	var s netlab.Snapshot
	for _, l := range list {
		s = append(s, l.Attrs().Name+" "+l.Type())
	}
	slices.Sort(s)
	return s
}

func hideDevice() error { return unix.Mount("none", "/dev/net", "tmpfs", 0, "size=4k") }

// replaceDevice puts another device node in the place of /dev/net/tun.
func replaceDevice(mode uint32, minor uint32) error {
	if err := hideDevice(); err != nil {
		return err
	}
	return errors.Join(unix.Mknod("/dev/net/tun", unix.S_IFCHR, int(unix.Mkdev(10, minor))), unix.Chmod("/dev/net/tun", mode))
}

// limitDescriptors lowers the process's limit for the rest of the test.
func limitDescriptors(t *testing.T, n uint64) error {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		return err
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			t.Errorf("restore the limit of descriptors: %v", err)
		}
	})
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: old.Max})
}

// The kernel's other errors, which a test does not bring about.
func TestErrorTexts(t *testing.T) {
	for want, err := range map[string]error{
		"stop that process":        attachError("quic0", 0, unix.EBUSY),
		"open queue 5 of device":   attachError("quic0", 4, unix.E2BIG),
		"another kind of link":     attachError("quic0", 0, unix.EINVAL),
		"no number is free":        attachError("quic%d", 0, unix.ENFILE),
		"open device quic0":        attachError("quic0", 0, unix.EIO),
		"open /dev/net/tun":        openError(unix.EIO),
		"the kernel has no TUN":    openError(unix.ENODEV),
		"raise the limit of open":  openError(unix.ENFILE),
		"outside a container run ": openError(unix.EPERM),
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}

func TestOpenConfigures(t *testing.T) {
	ns := netlab.New(t).NS("ns")
	d := open(t, ns, Config{MTU: 1380, TxQueueLen: 321, Alias: "quicvpn test"})
	if d.Name() != "quic0" {
		t.Errorf("name %q", d.Name())
	}
	link, err := ns.Netlink().LinkByIndex(d.Index())
	if err != nil {
		t.Fatal(err)
	}
	a := link.Attrs()
	if a.Name != "quic0" || a.MTU != 1380 || a.TxQLen != 321 || a.Alias != "quicvpn test" || a.Flags&net.FlagUp != 0 {
		t.Errorf("link %+v", a)
	}
	if err := d.SetMTU(1400); err != nil {
		t.Error(err)
	}
	if err := d.SetUp(); err != nil {
		t.Error(err)
	}
	if err := d.SetMTU(65536); err == nil || !strings.Contains(err.Error(), "576 to 65535") {
		t.Errorf("MTU of 65536: %v", err)
	}
	link, err = ns.Netlink().LinkByIndex(d.Index())
	if err != nil {
		t.Fatal(err)
	}
	if a := link.Attrs(); a.MTU != 1400 || a.Flags&net.FlagUp == 0 {
		t.Errorf("link %+v", a)
	}
	if second := open(t, ns, Config{}); second.Name() != "quic1" {
		t.Errorf("second name %q", second.Name())
	}
}

// A persistent device is taken up with any number of queues, keeps its index,
// and goes with an opener who does not want it to stay.
func TestReattach(t *testing.T) {
	ns := netlab.New(t).NS("ns")
	fds := descriptors(t)
	index := 0
	for _, queues := range []int{1, 4, 2, 256, 3} {
		d, err := openIn(ns, Config{Name: "keep0", Queues: queues, Persist: true})
		if err != nil {
			t.Fatalf("%d queues: %v", queues, err)
		}
		if index == 0 {
			index = d.Index()
		}
		if len(d.Queues()) != queues || d.Index() != index {
			t.Errorf("%d queues, index %d; want %d and %d", len(d.Queues()), d.Index(), queues, index)
		}
		if _, err := openIn(ns, Config{Name: "keep0"}); err == nil || !strings.Contains(err.Error(), "keep0 is busy") {
			t.Errorf("opened twice: %v", err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if got := links(t, ns); !slices.Contains(got, "keep0 tuntap") {
			t.Errorf("gone after Close: %v", got)
		}
		if d := cmp.Diff(fds, descriptors(t)); d != "" {
			t.Errorf("descriptors:\n%s", d)
		}
	}
	d := open(t, ns, Config{Name: "keep0"})
	if d.Index() != index {
		t.Error("not the same device")
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if got := links(t, ns); slices.Contains(got, "keep0 tuntap") {
		t.Errorf("still there: %v", got)
	}
}

func TestCloseUnblocksReaders(t *testing.T) {
	ns := netlab.New(t).NS("ns")
	d := open(t, ns, Config{Queues: 3})
	errs := make(chan error)
	for _, q := range d.Queues() {
		go func() {
			_, err := q.Read(make([]packet.Packet, 8))
			errs <- err
		}()
	}
	time.Sleep(20 * time.Millisecond) // let them block; it holds without, too
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	for range d.Queues() {
		if err := <-errs; !errors.Is(err, net.ErrClosed) {
			t.Errorf("read: %v", err)
		}
	}
	q := d.Queues()[0]
	if _, err := q.Read(make([]packet.Packet, 8)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read after Close: %v", err)
	}
	if n, err := q.Read(nil); n != 0 || err != nil {
		t.Errorf("read of nothing: %d, %v", n, err)
	}
	if err := q.Write([]packet.Packet{{Data: probePacket(unix.IPPROTO_TCP, 0, 20, 16)[vnetLen:]}}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after Close: %v", err)
	}
	if n := d.drops.Snapshot()["closed"]; n != 1 {
		t.Errorf("%d packets counted as closed", n)
	}
	if got := links(t, ns); len(got) != 1 {
		t.Errorf("links left: %v", got)
	}
}

// Somebody deletes the link under its readers.
func TestLinkDeleted(t *testing.T) {
	ns := netlab.New(t).NS("ns")
	d := open(t, ns, Config{Queues: 1})
	errs := make(chan error)
	q := d.Queues()[0]
	go func() {
		_, err := q.Read(make([]packet.Packet, 8))
		errs <- err
	}()
	time.Sleep(20 * time.Millisecond)
	if err := ns.Netlink().LinkDel(d.link()); err != nil {
		t.Fatal(err)
	}
	if err := <-errs; err == nil || !strings.Contains(err.Error(), "quic0 was deleted") {
		t.Errorf("read: %v", err)
	}
	if _, err := q.Read(make([]packet.Packet, 8)); err == nil || !strings.Contains(err.Error(), "quic0 was deleted") {
		t.Errorf("read again: %v", err)
	}
	if err := q.Write([]packet.Packet{{Data: probePacket(unix.IPPROTO_TCP, 0, 20, 16)[vnetLen:]}}); err == nil || !strings.Contains(err.Error(), "quic0 was deleted") {
		t.Errorf("write: %v", err)
	}
}

func TestPlainName(t *testing.T) {
	for name, want := range map[string]bool{
		"quicvpn0": true, "a": true, "fifteen-letters": true, "tun.1_x": true,
		"": false, "sixteen-letters0": false, ".": false, "..": false, "lo": false,
		"a/b": false, "a b": false, "a:1": false, "tun%d": false, `a"b`: false, `a\b`: false, "a\x00": false, "a\n": false,
	} {
		if got := PlainName(name); got != want {
			t.Errorf("PlainName(%q) = %v, want %v", name, got, want)
		}
	}
}
