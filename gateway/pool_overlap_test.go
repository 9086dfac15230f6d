package gateway

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// apart runs f on a thread with network and mount namespaces of its own, which
// end with it: nothing that this machine has or does is seen or touched.
func apart(t testing.TB, f func() error) {
	t.Helper()
	if err := onOwnThread(f); err != nil {
		t.Fatal(err)
	}
}

func onOwnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS)
		if err != nil {
			err = fmt.Errorf("make namespaces (these tests run as root): %w", err)
		} else if err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

func mustNet(s string) *net.IPNet {
	ip, n, err := net.ParseCIDR(s)
	if err != nil {
		panic(err)
	}
	return &net.IPNet{IP: ip, Mask: n.Mask}
}

func TestOverlap(t *testing.T) {
	apart(t, func() error {
		lab := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "lab0"}, PeerName: "lab1"}
		if err := netlink.LinkAdd(lab); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lab); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		for _, a := range []string{"10.91.7.1/24", "fd11::1/64"} {
			if err := netlink.AddrAdd(lab, &netlink.Addr{IPNet: mustNet(a), Flags: unix.IFA_F_NODAD}); err != nil {
				return err
			}
		}
		for _, r := range []netlink.Route{
			{Dst: mustNet("172.16.0.0/12")}, {Dst: mustNet("192.0.2.7/32"), Table: 77}, {Dst: mustNet("fd22::/32")},
			{Dst: mustNet("0.0.0.0/0")}, {Dst: mustNet("::/0")},
			{Dst: mustNet("203.0.113.0/24"), Type: unix.RTN_BLACKHOLE},
		} {
			if r.Type == 0 {
				r.LinkIndex = lab.Index
			}
			if err := netlink.RouteAdd(&r); err != nil {
				return fmt.Errorf("route %s: %w", r.Dst, err)
			}
		}
		for pool, want := range map[string]string{
			"10.91.0.0/16":   "the pool 10.91.0.0/16 overlaps this host's address 10.91.7.1/24 on lab0: choose another one with --pool",
			"10.91.7.128/25": "address 10.91.7.1/24 on lab0",
			"10.0.0.0/8":     "address 10.91.7.1/24 on lab0",
			"172.20.0.0/16":  "route to 172.16.0.0/12 by lab0",
			"192.0.2.0/24":   "route to 192.0.2.7/32 by lab0",
			"fd11::/64":      "the pool fd11::/64 overlaps this host's address fd11::1/64 on lab0: choose another one with --pool6",
			"fd22:0:5::/64":  "route to fd22::/32 by lab0",
			"10.92.0.0/16":   "", // a default route is no overlap
			"203.0.113.0/28": "", // nor one that leads nowhere
			"fd33::/64":      "",
		} {
			err := checkOverlap("eth9", netip.MustParsePrefix(pool))
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				return fmt.Errorf("%s: got %v, want %q", pool, err, want)
			}
		}
		// The gateway's own is no other network.
		if err := checkOverlap("lab0", netip.MustParsePrefix("10.91.0.0/16"), netip.MustParsePrefix("fd22:0:5::/64")); err != nil {
			return err
		}
		dir := t.TempDir() + "/a/state"
		if _, err := Init(InitOptions{Dir: dir, Address: "vpn.example.net:443"}); err == nil || !strings.Contains(err.Error(), "10.91.7.1/24") {
			return fmt.Errorf("Init with the default pool: %v", err)
		}
		if _, err := Init(InitOptions{Dir: dir, Address: "10.77.0.9:443", Pool4: netip.MustParsePrefix("10.77.0.0/16")}); err == nil || !strings.Contains(err.Error(), "10.77.0.9:443 lies in a pool") {
			return fmt.Errorf("Init with its own address in the pool: %v", err)
		}
		if err := unix.Access(dir+"/..", 0); !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("a refused Init left its directory: %v", err)
		}
		return nil
	})
}
