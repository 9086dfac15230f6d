package docker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/nsenter"
)

// An inside is the network of a container as the kernel has it, without
// loopback, link-local addresses and the kernel's own routes.
type inside struct {
	Links  []link
	Routes []string // "DESTINATION via GATEWAY dev LINK"
}

type link struct {
	Name, Kind string
	MTU        int
	Addresses  []string
	Features   []string // those of interest that are on
}

// look looks inside a running container.
func (h *host) look(container string) (in inside) {
	h.w.t.Helper()
	if err := nsenter.Do(h.Sandbox(h.w.ctx, container), func() (err error) {
		in, err = lookInside()
		return err
	}); err != nil {
		h.w.t.Fatalf("look inside %s: %v", container, err)
	}
	return in
}

func lookInside() (in inside, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return in, err
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
		if l.Attrs().Name == "lo" {
			continue
		}
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return in, err
		}
		seen := link{Name: l.Attrs().Name, Kind: l.Type(), MTU: l.Attrs().MTU}
		for _, a := range addrs {
			if !a.IP.IsLinkLocalUnicast() {
				seen.Addresses = append(seen.Addresses, a.IPNet.String())
			}
		}
		slices.Sort(seen.Addresses)
		if seen.Features, err = features(seen.Name); err != nil {
			return in, err
		}
		in.Links = append(in.Links, seen)
	}
	slices.SortFunc(in.Links, func(a, b link) int { return strings.Compare(a.Name, b.Name) })
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	for _, r := range routes {
		if r.Dst != nil && (r.Dst.IP.IsLinkLocalUnicast() || r.Dst.IP.IsMulticast()) {
			continue
		}
		line := "default"
		if ones, _ := r.Dst.Mask.Size(); ones > 0 {
			line = r.Dst.String()
		}
		if r.Gw != nil {
			line += " via " + r.Gw.String()
		}
		in.Routes = append(in.Routes, line+" dev "+names[r.LinkIndex])
	}
	slices.Sort(in.Routes)
	return in, err
}

// offloads are the features of a TUN device that lets packets of 64 KB pass.
var offloads = []string{"checksum", "generic segmentation", "scatter-gather", "TCP segmentation", "UDP segmentation"}

// features returns which of the offloads an interface has on.
func features(name string) (on []string, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	for i, command := range []uint32{unix.ETHTOOL_GTXCSUM, unix.ETHTOOL_GGSO, unix.ETHTOOL_GSG, unix.ETHTOOL_GTSO} {
		value := struct{ Command, Value uint32 }{Command: command}
		if err := ethtool(fd, name, unsafe.Pointer(&value)); err != nil {
			return nil, fmt.Errorf("ask %s for its offload of %s: %w", name, offloads[i], err)
		}
		if value.Value != 0 {
			on = append(on, offloads[i])
		}
	}
	// It has no command of its own, and a bit without a fixed place.
	usoBit, err := featureBit(fd, name, "tx-udp-segmentation")
	if err != nil {
		return nil, err
	}
	var all struct {
		Command, Blocks uint32
		Block           [4]struct{ Available, Requested, Active, Never uint32 }
	}
	all.Command, all.Blocks = unix.ETHTOOL_GFEATURES, uint32(len(all.Block))
	if err := ethtool(fd, name, unsafe.Pointer(&all)); err != nil {
		return nil, fmt.Errorf("ask %s for its features: %w", name, err)
	}
	if all.Block[usoBit/32].Active&(1<<(usoBit%32)) != 0 {
		on = append(on, "UDP segmentation")
	}
	return on, nil
}

// featureBit returns the number of a feature.
func featureBit(fd int, iface, feature string) (int, error) {
	const ethSSFeatures, length = 4, 32 // of linux/ethtool.h: the set, and a name
	var names struct {
		Command, Set, Count uint32
		Names               [128][length]byte
	}
	names.Command, names.Set = unix.ETHTOOL_GSTRINGS, ethSSFeatures
	if err := ethtool(fd, iface, unsafe.Pointer(&names)); err != nil {
		return 0, fmt.Errorf("ask for the names of features: %w", err)
	}
	for i, name := range names.Names[:names.Count] {
		if unix.ByteSliceToString(name[:]) == feature {
			return i, nil
		}
	}
	return 0, errors.New("the kernel knows no feature " + feature)
}

// ethtool is the ioctl SIOCETHTOOL.
func ethtool(fd int, iface string, data unsafe.Pointer) error {
	var request struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(request.name[:], iface)
	request.data = data
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return errno
	}
	return nil
}

// address returns a container's IPv4 address on a network, as the engine has it.
func (h *host) address(container, network string) netip.Addr {
	h.w.t.Helper()
	out := h.must("inspect --format {{.NetworkSettings.Networks." + network + ".IPAddress}} " + container)
	a, err := netip.ParseAddr(out)
	if err != nil {
		h.w.t.Fatalf("address of %s on %s: %v", container, network, err)
	}
	return a
}
