package docker

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A container starts and ends in many ways: each time its network is the same,
// and after its end nothing of it is left.
func TestLifecycle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " -o mtu=1300 net") // or it follows the path's
	empty, descriptors := h.state(), h.descriptors()
	h.must("run -d --name web --network net --restart on-failure --ip 172.30.0.80 --ip6 fd00:30::80 IMAGE serve")
	h.must("run -d --name user --network net --ip 172.30.0.90 IMAGE sleep")
	want, full := h.look("web"), h.state()
	up := func(when, name string) {
		t.Helper()
		h.waitFor("the container's interface after "+when, pingLimit, func() error {
			if diff := cmp.Diff(want.renamed("eth0", name), h.look("web")); diff != "" {
				return fmt.Errorf("inside:\n%s", diff)
			}
			if diff := cmp.Diff(full, h.state()); diff != "" {
				return fmt.Errorf("the driver:\n%s", diff)
			}
			return nil
		})
		if seen := h.get("user", "172.30.0.80"); seen != "172.30.0.90" {
			t.Errorf("after %s the container sees its neighbour as %q", when, seen)
		}
		for _, server := range servers {
			h.waitPing("web", server)
		}
	}
	up("run", "eth0")
	for range 3 {
		h.must("stop web")
		h.waitState("one container's state", func(s state) bool {
			return s.endpoints() == 1 && len(s.Devices) == 0 && s.Queues == full.Queues/2
		})
		h.must("start web")
		up("stop and start", "eth0")

		h.must("restart web")
		up("restart", "eth0")

		h.must("kill web")
		h.must("start web")
		up("kill and start", "eth0")

		h.crash("web")
		up("a crash and the engine's own start", "eth0")

		h.must("network disconnect net web")
		if in := h.look("web"); len(in.Links) > 0 || len(in.Routes) > 0 {
			t.Errorf("after a disconnect the container has %+v", in)
		}
		h.must("network connect --ip 172.30.0.80 --ip6 fd00:30::80 net web")
		up("disconnect and connect", "eth1") // the engine counts on
	}
	h.must("rm --force web user")
	h.waitEmpty()
	if diff := cmp.Diff(empty, h.state()); diff != "" {
		t.Errorf("after the containers' end the driver holds:\n%s", diff)
	}
	h.waitFor("the driver's descriptors as before", pingLimit, func() error {
		if diff := cmp.Diff(descriptors, h.descriptors()); diff != "" {
			return fmt.Errorf("open:\n%s", diff)
		}
		return nil
	})
	h.must("network rm net")
	h.checkNone()
	h.checkTunnel()
}

// renamed is the same with an interface that has another name.
func (in inside) renamed(from, to string) inside {
	other := inside{Links: slices.Clone(in.Links)}
	for i := range other.Links {
		if other.Links[i].Name == from {
			other.Links[i].Name = to
		}
	}
	for _, r := range in.Routes {
		if rest, ok := strings.CutSuffix(r, " dev "+from); ok {
			r = rest + " dev " + to
		}
		other.Routes = append(other.Routes, r)
	}
	return other
}

// descriptors are what the driver has open.
func (h *host) descriptors() []string {
	h.w.t.Helper()
	fds, err := netlab.Descriptors(h.driver.Process.Pid)
	if err != nil {
		h.w.t.Fatal(err)
	}
	// Sockets come and go with the session's probes.
	return slices.DeleteFunc(fds, func(s string) bool { return s == "socket:" })
}

// crash kills a container's first process behind the engine's back, and waits
// until the engine has started it again.
func (h *host) crash(container string) {
	h.w.t.Helper()
	life := "inspect --format {{.State.StartedAt}}-{{.State.Running}} " + container
	before := h.must(life)
	kill := h.Command(h.w.ctx, "kill", "-KILL", h.must("inspect --format {{.State.Pid}} "+container))
	if out, err := kill.CombinedOutput(); err != nil {
		h.w.t.Fatalf("kill the first process of %s: %v: %s", container, err, out)
	}
	h.waitFor(container+" runs again", 20*time.Second, func() error {
		if now := h.must(life); now == before || now[len(now)-4:] != "true" {
			return fmt.Errorf("started and running: %s", now)
		}
		return nil
	})
}
