package driver

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// hostFiles is the root of the host's files.
type hostFiles string

// checkResolvers refuses containers whose names the engine itself would look up,
// outside of the tunnel: that is what it does where the host's resolvers are
// loopback addresses.
func (f hostFiles) checkResolvers() error {
	// The engine takes systemd-resolved's list of the real ones instead.
	servers, err := f.nameServers("etc/resolv.conf")
	if err != nil || len(servers) == 0 {
		return nil // the engine falls back to public resolvers, by the tunnel
	}
	for _, s := range servers {
		if !s.IsLoopback() {
			continue
		}
		if len(servers) == 1 && s == systemdStub {
			real, err := f.nameServers("run/systemd/resolve/resolv.conf")
			if err == nil && len(real) > 0 {
				return nil
			}
		}
		if f.engineHasResolvers() {
			return nil
		}
		return fmt.Errorf("the host's resolver %v in /etc/resolv.conf would be asked for containers' names in clear, outside of the tunnel: "+
			`give the engine another one ("dns": ["9.9.9.9"] in /etc/docker/daemon.json, and restart it), or accept that with -o dns=host`, s)
	}
	return nil
}

var systemdStub = netip.AddrFrom4([4]byte{127, 0, 0, 53})

// engineHasResolvers reports whether the engine's configuration names resolvers
// for containers.
func (f hostFiles) engineHasResolvers() bool {
	b, err := os.ReadFile(filepath.Join(string(f), "etc/docker/daemon.json"))
	if err != nil {
		return false
	}
	var config struct{ DNS []netip.Addr }
	if json.Unmarshal(b, &config) != nil {
		return false
	}
	for _, a := range config.DNS {
		if a.IsLoopback() {
			return false
		}
	}
	return len(config.DNS) > 0
}

// nameServers reads a resolv.conf(5).
func (f hostFiles) nameServers(name string) (list []netip.Addr, err error) {
	b, err := os.ReadFile(filepath.Join(string(f), name))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil {
			list = append(list, a)
		}
	}
	return list, nil
}
