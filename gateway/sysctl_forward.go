package gateway

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// Packets from clients come in by the TUN device, the answers by the interfaces
// towards their destinations: those must forward, and no others.
//
// IPv4 has a setting for each interface. IPv6 has one since Linux 6.17
// (force_forwarding); before, only all.forwarding, which also makes a router of
// the host that no longer listens to its own router's advertisements unless
// accept_ra is 2. Either way the firewall keeps what is not the gateway's from
// being forwarded, until somebody else turns on forwarding for the whole host.

// What makes a router of the host, in the form in which people set it. It can be
// set before the interfaces are there.
const (
	router4 = "net.ipv4.ip_forward=1"
	router6 = "net.ipv6.conf.all.forwarding=1"
)

func forwarding4(iface string) string { return "net/ipv4/conf/" + iface + "/forwarding" }
func forwarding6(iface string) string { return "net/ipv6/conf/" + iface + "/forwarding" }
func force6(iface string) string      { return "net/ipv6/conf/" + iface + "/force_forwarding" }

// planForwarding notes what is needed for forwarding between the TUN device and
// the interfaces given. The TUN device itself has been seen to, but for IPv6
// where everyForward is set: then all interfaces have to forward.
func (s *sysctls) planForwarding(tun string, ifaces []string, ipv6, everyForward bool) error {
	var errs []error
	all4, all6 := sysctlIs(forwarding4("all"), "1"), sysctlIs(forwarding6("all"), "1")
	for _, name := range ifaces {
		if !all4 {
			errs = append(errs, ignoreGone(s.want(forwarding4(name), "1", router4)))
		}
		if ipv6 && !all6 && !everyForward {
			errs = append(errs, ignoreGone(s.want(force6(name), "1", router6)))
		}
	}
	if ipv6 && !all6 && everyForward {
		errs = append(errs, s.planEvery(tun))
	}
	return errors.Join(errs...)
}

// ignoreGone forgives the settings of an interface that is no longer there.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// planEvery notes what is needed for all.forwarding.
func (s *sysctls) planEvery(tun string) error {
	// Of all that cannot be set, the error is to name the one that matters.
	if err := canWrite(forwarding6("all"), "1", router6); err != nil {
		return err
	}
	names, err := interfacesIPv6()
	if err != nil {
		return err
	}
	for _, name := range names {
		if name == "all" || name == tun {
			continue
		}
		// Turning all.forwarding off again turns all of them off.
		if sysctlIs(forwarding6(name), "1") {
			if err := ignoreGone(s.hold(forwarding6(name))); err != nil {
				return err
			}
			continue
		}
		// Before the forwarding: the kernel drops the routes that it learned
		// from advertisements where it is not 2 then.
		if ra := "net/ipv6/conf/" + name + "/accept_ra"; name != "lo" && sysctlIs(ra, "1") {
			if err := ignoreGone(s.want(ra, "2", router6)); err != nil {
				return err
			}
		}
	}
	return s.want(forwarding6("all"), "1", router6)
}

// interfacesIPv6 returns the interfaces with IPv6 settings, "all" and "default".
func interfacesIPv6() ([]string, error) {
	entries, err := os.ReadDir("/proc/sys/net/ipv6/conf")
	if err != nil {
		return nil, fmt.Errorf("list IPv6 interfaces: %w", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// forced says where only the gateway's packets may be forwarded.
func (s *sysctls) forced() (f forced) {
	all4, all6 := sysctlIs(forwarding4("all"), "1"), sysctlIs(forwarding6("all"), "1")
	for _, c := range s.now.Changes {
		family, name, setting := splitKey(c.Key)
		switch {
		case family == "ipv4" && setting == "forwarding":
			if !all4 {
				f.v4 = append(f.v4, name)
			}
		case setting == "force_forwarding":
			if !all6 {
				f.v6 = append(f.v6, name)
			}
		case name == "all" && setting == "forwarding":
			f.all6 = true
		}
	}
	return f
}

func (f forced) equal(g forced) bool {
	return f.all6 == g.all6 && slices.Equal(f.v4, g.v4) && slices.Equal(f.v6, g.v6)
}

// splitKey takes net/<family>/conf/<interface>/<setting> apart.
func splitKey(key string) (family, iface, setting string) {
	p := strings.Split(key, "/")
	if len(p) != 5 {
		return "", "", ""
	}
	return p[1], p[3], p[4]
}
