package docker

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// get fetches the page that says who asked, from a container.
func (h *host) get(container, host string) string {
	h.w.t.Helper()
	return strings.TrimSpace(strings.TrimPrefix(h.must("exec "+container+" /toolbox get http://"+host+"/"), netlab.Page))
}

// Two hosts are in the same network of one gateway.
func TestTwoHosts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two := w.newHost(dockerlab.Config{}), w.addHost("two", dockerlab.Config{})
	one.must("network create -d quicvpn --ipv6 --subnet 172.30.0.0/24 --subnet fd00:30::/64 net")
	two.must("network create -d quicvpn --ipv6 --subnet 172.31.0.0/24 --subnet fd00:31::/64 net")
	one.must("run -d --name web --network net --ip 172.30.0.10 --ip6 fd00:30::10 IMAGE serve")
	two.must("run -d --name web --network net --ip 172.31.0.10 --ip6 fd00:31::10 IMAGE serve")
	for _, tt := range []struct {
		h         *host
		to, seen  string
		otherwise string
	}{
		{one, "172.31.0.10", "172.30.0.10", ""},
		{two, "172.30.0.10", "172.31.0.10", ""},
		{one, "[fd00:31::10]", "fd00:30::10", ""},
		{two, "[fd00:30::10]", "fd00:31::10", ""},
	} {
		if seen := tt.h.get("web", tt.to); seen != tt.seen {
			t.Errorf("%s from %s: seen as %q, want %s", tt.to, tt.h.name, seen, tt.seen)
		}
		if seen := tt.h.get("web", netlab.ServerAddr4.String()); seen != netlab.EgressAddr4.String() {
			t.Errorf("the internet from %s: seen as %q", tt.h.name, seen)
		}
	}
	// A network that is removed makes room for its addresses.
	one.must("rm -f web")
	one.must("network rm net")
	two.must("network create -d quicvpn --subnet 172.30.0.0/24 moved")
	two.must("run -d --name moved --network moved --ip 172.30.0.10 IMAGE serve")
	if seen := two.get("web", "172.30.0.10"); seen != "172.31.0.10" {
		t.Errorf("after the move: seen as %q", seen)
	}
	for _, h := range w.hosts {
		if problem := h.capture.Traffic().Problem(); problem != "" {
			t.Errorf("the uplink of %s: %s", h.name, problem)
		}
	}
}

// Two hosts whose networks have the same subnet both reach the internet.
func TestTwoHostsSameSubnet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two := w.newHost(dockerlab.Config{}), w.addHost("two", dockerlab.Config{})
	for _, h := range w.hosts {
		h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
		h.must("run -d --name web --network net --ip 172.30.0.10 IMAGE serve")
	}
	for range 3 {
		for _, h := range w.hosts {
			if seen := h.get("web", netlab.ServerAddr4.String()); seen != netlab.EgressAddr4.String() {
				t.Errorf("the internet from %s: seen as %q", h.name, seen)
			}
		}
	}
	if err := two.driver.WaitLog(w.ctx, "172.30.0.0/24 overlaps 172.30.0.0/24"); err != nil {
		t.Errorf("the second host's log does not say why they cannot reach each other: %v", err)
	}
	if strings.Contains(one.driver.Log(), "overlaps") {
		t.Errorf("the first host complains:\n%s", one.driver.Log())
	}
	// When the first has left, the second takes its place.
	one.must("rm -f web")
	one.must("network rm net")
	one.must("network create -d quicvpn --subnet 172.31.0.0/24 net")
	one.must("run -d --name web --network net --ip 172.31.0.10 IMAGE serve")
	two.waitFor("the other host reaches it", 20*time.Second, func() error {
		_, err := one.try("exec web /toolbox get http://172.30.0.10/")
		return err
	})
	if seen := two.get("web", "172.31.0.10"); seen != "172.30.0.10" {
		t.Errorf("from host to host: seen as %q", seen)
	}
}

// Addresses from the gateway's blocks are unique over all hosts, also while the
// gateway is away.
func TestNullIPAM(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, two := w.newHost(dockerlab.Config{}), w.addHost("two", dockerlab.Config{})
	seen := make(map[netip.Addr]string)
	run := func(h *host, name string) {
		h.must("run -d --name " + name + " --network net IMAGE serve")
		a := h.address(name, "net")
		if other := seen[a]; other != "" || !netip.MustParsePrefix("10.91.0.0/16").Contains(a) {
			t.Errorf("%s on %s has the address %v of %q", name, h.name, a, other)
		}
		seen[a] = name + " on " + h.name
	}
	for _, h := range w.hosts {
		h.must("network create -d quicvpn --ipam-driver null net")
		run(h, "web")
	}
	if got := one.get("web", two.address("web", "net").String()); got != one.address("web", "net").String() {
		t.Errorf("from host to host: seen as %q", got)
	}
	if got := two.get("web", netlab.ServerAddr4.String()); got != netlab.EgressAddr4.String() {
		t.Errorf("the internet: seen as %q", got)
	}
	w.gateway.Kill()
	for _, h := range w.hosts {
		h.driver.Kill()
		h.startDriver()
		run(h, "later")
	}
	w.startGateway()
	one.reaches("later")
	two.reaches("later")
	if got := one.get("later", two.address("later", "net").String()); got != one.address("later", "net").String() {
		t.Errorf("from host to host, later: seen as %q", got)
	}
}

// While the gateway is away containers start, nothing leaves, and their traffic
// comes when it does.
func TestGatewayAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	w.gateway.Kill()
	h.must("run -d --name near --network net IMAGE serve")
	h.must("run -d --name user --network net IMAGE sleep")
	if seen := h.get("user", "near"); seen != h.address("user", "net").String() {
		t.Errorf("a container beside it: seen as %q", seen)
	}
	if out, err := h.try("exec user /toolbox ping " + netlab.ServerAddr4.String()); err == nil {
		t.Errorf("the internet answers without a gateway: %q", out)
	}

	before := h.state()
	started := time.Now()
	h.refused("network create -d quicvpn --subnet 172.31.0.0/24 more", "no tunnel after 10s")
	if took := time.Since(started); took > 15*time.Second {
		t.Errorf("the refusal took %v", took)
	}
	if after := h.state(); len(after.Networks) != len(before.Networks) {
		t.Errorf("the refused network left %+v", after)
	}
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 -o wait=0 patient")
	h.must("run -d --name patient --network patient IMAGE sleep")

	w.startGateway()
	h.reaches("user")
	h.reaches("patient")
}

// A container has a gateway of its own beside the network's.
func TestOwnExit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	// Another network of the gateway, whose members reach one address only.
	other := w.newToken("other", "--network", "other", "--uses", "1", "--allow", netlab.ServerAddr4.String()+"/32")
	h.must("network create -d quicvpn --ipv6 --subnet 172.30.0.0/24 --subnet fd00:30::/64 net")
	h.must("run -d --name plain --network net IMAGE serve")
	h.must("create --name special IMAGE serve")
	h.must("network disconnect bridge special")
	h.must("network connect --driver-opt token-file=" + other + " net special")
	h.must("start special")
	check := func() {
		t.Helper()
		h.reaches("special")
		if out, err := h.try("exec special /toolbox ping " + netlab.ServerAddr6.String()); err == nil {
			t.Errorf("the container is not held to what its own token allows: %q", out)
		}
		h.waitPing("plain", netlab.ServerAddr6)
		if seen := h.get("special", "plain"); seen != h.address("special", "net").String() {
			t.Errorf("within the network: seen as %q", seen)
		}
	}
	check()
	h.driver.Kill()
	h.startDriver()
	check()
	h.must("restart -t 0 special") // with a token that is used up
	check()
	h.must("create --name wrong IMAGE serve")
	h.must("network connect --driver-opt mtu=1400 net wrong")
	h.refused("start wrong", `unknown option "mtu": there are token, token-file`)
	h.must("rm -f plain special wrong")
	h.waitEmpty()
	h.must("network rm net")
	if list := w.run(w.Gateway, "client", "list", "--state-dir", w.gatewayDir()); strings.Contains(list, "other") {
		t.Errorf("the gateway keeps the client of a network that was removed:\n%s", list)
	}
}
