package docker

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A state is what the driver holds on a host, beside what runs in containers.
type state struct {
	// Networks has the number of endpoints of each network.
	Networks map[string]int
	// Devices are those in the host's own namespace.
	Devices []string
	// Queues is how many descriptors of TUN devices the driver has open.
	Queues int
	// Sockets are the TCP and UDP ports that the driver listens on.
	Sockets int
}

// state looks at the files, the links and the descriptors.
func (h *host) state() (s state) {
	h.w.t.Helper()
	s.Networks = make(map[string]int)
	dirs, err := os.ReadDir(filepath.Join(h.stateDir(), "networks"))
	if err != nil {
		h.w.t.Fatal(err)
	}
	for _, d := range dirs {
		b, err := os.ReadFile(filepath.Join(h.stateDir(), "networks", d.Name(), "network.json"))
		if errors.Is(err, fs.ErrNotExist) {
			s.Networks[d.Name()] = -1
			continue
		}
		var record struct{ Endpoints []struct{ ID string } }
		if err == nil {
			err = json.Unmarshal(b, &record)
		}
		if err != nil {
			h.w.t.Fatal(err)
		}
		s.Networks[d.Name()] = len(record.Endpoints)
	}
	links, err := h.NS().Netlink().LinkList()
	if err != nil {
		h.w.t.Fatal(err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "qv") {
			s.Devices = append(s.Devices, l.Attrs().Name)
		}
	}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", h.driverPID()))
	if err != nil {
		h.w.t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == "/dev/net/tun" {
			s.Queues++
		}
	}
	return s
}

var (
	linkIndex = regexp.MustCompile(`^\d+: `)
	linkLocal = regexp.MustCompile(`fe80::[0-9a-f:]*`)
	linkAlias = regexp.MustCompile(`alias quicvpn:\w+`)
)

// endpoints is the number of endpoints of all networks.
func (s state) endpoints() (n int) {
	for _, e := range s.Networks {
		n += e
	}
	return n
}

// waitState waits until the driver's state is as ok wants it.
func (h *host) waitState(what string, ok func(state) bool) {
	h.w.t.Helper()
	h.waitFor(what, 20*time.Second, func() error {
		if s := h.state(); !ok(s) {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// waitEmpty waits until no container's traces are left.
func (h *host) waitEmpty() {
	h.w.t.Helper()
	h.waitState("no trace of a container", func(s state) bool {
		return s.endpoints() == 0 && len(s.Devices) == 0 && s.Queues == 0
	})
}

// waitFor waits until a check has no error.
func (h *host) waitFor(what string, within time.Duration, check func() error) {
	h.w.t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(50 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) || h.w.ctx.Err() != nil {
			h.w.t.Fatalf("%s: not after %v: %v", what, within, err)
		}
	}
}

// inside describes a container's network as its namespace has it: links with
// their MTU and offloads, addresses and routes, one a line.
func (h *host) inside(container string) []string {
	h.w.t.Helper()
	var lines []string
	for _, args := range []string{"-o link show", "-o addr show", "route show", "-6 route show"} {
		c := h.Command(h.w.ctx, "nsenter", append([]string{"--net=" + h.Docker(h.w.ctx, "inspect", "--format", "{{.NetworkSettings.SandboxKey}}", container), "ip"}, strings.Fields(args)...)...)
		out, err := c.Output()
		if err != nil {
			h.w.t.Fatalf("ip %s in %s: %v: %s", args, container, err, c.Log())
		}
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSpace(line)
			// Every device has its own of these.
			for _, r := range []*regexp.Regexp{linkIndex, linkLocal, linkAlias} {
				line = r.ReplaceAllString(line, "")
			}
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return lines
}
