package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/driver/publish"
	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// The path to the gateway carries less than IPv6 needs for a while. Containers
// keep their addresses, new ones start, and TCP passes by both IP versions.
func TestSmallPath(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 four")
	h.must("run -d --name web --network net IMAGE serve")
	h.must("run -d --name old --network four IMAGE serve")
	mtu := func(container string) int { return h.look(container).Links[0].MTU }
	pages := func(when string) {
		t.Helper()
		for _, server := range []string{netlab.ServerAddr4.String(), "[" + netlab.ServerAddr6.String() + "]"} {
			h.waitFor(when+": "+server, 20*time.Second, func() error {
				_, err := h.try("exec web /toolbox get http://" + server + "/bytes/300000")
				return err
			})
		}
	}
	pages("at first")
	before := h.look("web")

	w.SetPathMTU(1300)
	h.waitFor("a device that follows the path", 20*time.Second, func() error {
		if _, err := h.try("exec old /toolbox get http://" + netlab.ServerAddr4.String() + "/bytes/300000"); err != nil {
			return err
		}
		if got := mtu("old"); got >= 1280 {
			return fmt.Errorf("its MTU is %d", got)
		}
		return nil
	})
	pages("on a small path")
	if got := mtu("web"); got < 1280 {
		t.Errorf("the MTU is %d, at which the kernel takes IPv6 away", got)
	}
	h.must("run --rm --network net IMAGE get http://[" + netlab.ServerAddr6.String() + "]/")

	w.SetPathMTU(1500)
	pages("on a path that has grown")
	after := h.look("web")
	before.Links[0].MTU, after.Links[0].MTU = 0, 0
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("afterwards the container has:\n%s", diff)
	}
	h.checkTunnel()
}

// Some clouds have their name server at a link-local address, in whose place the
// gateway answers. What else is there it refuses.
func TestLinkLocalResolver(t *testing.T) {
	t.Parallel()
	const resolver = "169.254.169.254"
	w := newWorld(t)
	w.serveNames()
	w.gateway.Kill()
	w.startGateway()
	h := w.newHost(dockerlab.Config{ResolvConf: "nameserver " + resolver + "\n"})
	h.must("network create -d quicvpn net")
	h.must("network create -d quicvpn --ipam-driver null leased")
	for _, network := range []string{"net", "leased"} {
		if got := h.must("run --rm --network " + network + " IMAGE resolve where.example"); got != netlab.ServerAddr4.String() {
			t.Errorf("on %s where.example is %q", network, got)
		}
		if _, err := h.try("run --rm --network " + network + " IMAGE get http://" + resolver + "/"); err == nil ||
			!strings.Contains(err.Error(), "no route to host") {
			t.Errorf("on %s a page from %s: %v, want that the gateway says no", network, resolver, err)
		}
	}
	h.checkTunnel()
}

// Whatever a container does to its device, nothing of it stays on the host.
func TestDeviceSpoiled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("run -d --name neighbour --network net --ip 172.30.0.9 IMAGE serve")
	full := h.state()
	for _, spoil := range []string{
		"ip link set eth0 alias other",
		"ip link set eth0 down",
		"ip link delete eth0",
		"ip link set eth0 down && ip link set eth0 name other && ip link add eth0 type veth peer name peer",
		"unshare --net sleep 60 & sleep 0.5; ip link set eth0 netns $!",
	} {
		for _, restart := range []bool{false, true} {
			h.must("run -d --name user --network net --cap-add NET_ADMIN --cap-add SYS_ADMIN " + h.DebianImage(w.ctx) + " sleep infinity")
			h.Docker(w.ctx, slices.Concat(strings.Fields("exec user sh -c"), []string{spoil})...)
			if restart {
				h.driver.Kill()
				h.startDriver()
			}
			h.must("rm -f user")
			h.waitFor("no trace after "+spoil, 20*time.Second, func() error {
				if diff := cmp.Diff(full, h.state()); diff != "" {
					return fmt.Errorf("the driver:\n%s", diff)
				}
				return nil
			})
		}
	}
	h.must("run --rm --network net IMAGE get http://172.30.0.9/")
}

// The driver is killed while a container starts whose device the engine has not
// taken yet. The next one has the device where it was, and removes it where the
// engine does not take it.
func TestDriverKilledInAStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	before := h.state()
	const device = "qv0123456789ab"
	join := func() {
		t.Helper()
		for _, call := range []string{"CreateEndpoint", "Join", "ProgramExternalConnectivity"} {
			h.call(call, map[string]any{
				"NetworkID": h.must("network inspect --format {{.Id}} net"), "EndpointID": "0123456789ab", "SandboxKey": "/run/netns/late",
				"Interface": map[string]string{"Address": "172.30.0.5/24"},
				"Options":   map[string]any{publish.PortMapOption: []map[string]int{{"Proto": 6, "Port": 80, "HostPort": 8080}}},
			})
		}
		h.driver.Kill()
		h.startDriver()
		if s := h.state(); !slices.Equal(s.Devices, []string{device}) || s.Queues == 0 {
			t.Errorf("the next driver has %+v", s)
		}
	}
	ip := func(args string) {
		t.Helper()
		if out, err := h.Command(w.ctx, "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Errorf("ip %s: %v: %s", args, err, out)
		}
	}
	join()
	h.waitFor("nothing of a start that did not go on", 20*time.Second, func() error {
		if diff := cmp.Diff(before, h.state()); diff != "" {
			return fmt.Errorf("the driver:\n%s", diff)
		}
		return nil
	})

	join()
	if _, err := w.Uplink.DialContext(w.ctx, "tcp", "192.0.2.2:8080"); err == nil {
		t.Error("a port of a container is published that may not start")
	}
	ip("netns add late")
	ip("link set " + device + " netns late name eth0")
	ip("-n late address add 172.30.0.5/24 dev eth0")
	ip("-n late link set eth0 up")
	ip("-n late route add default via 172.30.0.1")
	h.waitFor("the internet", pingLimit, func() error {
		return h.Command(w.ctx, "nsenter", "--net=/run/netns/late", dockerlab.Toolbox(t), "ping", netlab.ServerAddr4.String()).Run()
	})
	h.waitFor("its published port", 20*time.Second, func() error {
		c, err := w.Uplink.DialContext(w.ctx, "tcp", "192.0.2.2:8080")
		if err != nil {
			return err
		}
		return c.Close()
	})
	ip("netns delete late")
	h.waitEmpty()
}

// call calls the driver as the engine does.
func (h *host) call(name string, parameters any) {
	h.w.t.Helper()
	body, err := json.Marshal(parameters)
	if err != nil {
		h.w.t.Fatal(err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", h.Path("/run/docker/plugins/quicvpn.sock"))
	}}}
	response, err := client.Post("http://driver/NetworkDriver."+name, "application/json", bytes.NewReader(body))
	if err != nil {
		h.w.t.Fatal(err)
	}
	defer response.Body.Close()
	if answer, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK {
		h.w.t.Fatalf("%s: %v: %s", name, err, answer)
	}
}

// An engine that started again while its containers ran can still take them off a
// network, and put them on one, whether they are internal or not.
func TestNetworksAfterLiveRestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{LiveRestore: true})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 --internal inside")
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 outside")
	for _, network := range []string{"inside", "outside"} {
		h.must("run -d --name " + network + " --network " + network + " IMAGE serve")
	}
	h.Kill()
	h.StartAgain()
	for own, other := range map[string]string{"inside": "outside", "outside": "inside"} {
		h.must("network connect " + other + " " + own)
		if in := h.look(own); len(in.Links) != 2 {
			t.Errorf("on two networks %s has %+v", own, in)
		}
		h.reaches(own)
		h.must("network disconnect " + own + " " + own)
		if in := h.look(own); len(in.Links) != 1 {
			t.Errorf("on one network %s has %+v", own, in)
		}
	}
	h.must("rm -f inside outside")
	h.waitEmpty()
	h.checkTunnel()
}
