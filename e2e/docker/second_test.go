package docker

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A second network may be an ordinary one or the driver's own, and may come
// before the first or after it. The way to everywhere is that of the network
// whose name comes first.
func TestSecondNetwork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 --gateway 172.30.0.1 mid")
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 --gateway 172.31.0.1 -o token-file=" + w.newToken("second") + " second")
	h.must("network create --subnet 172.28.0.0/24 --gateway 172.28.0.1 zlan")
	h.must("network create --subnet 172.29.0.0/24 --gateway 172.29.0.1 alan")
	for _, tt := range []struct {
		other, subnet, kind, first string
	}{
		{"zlan", "172.28.0", "veth", "172.30.0.1"},
		{"alan", "172.29.0", "veth", "172.29.0.1"},
		{"second", "172.31.0", "tuntap", "172.30.0.1"},
	} {
		h.must("run -d --name neighbour --network " + tt.other + " --ip " + tt.subnet + ".20 IMAGE serve")
		for _, order := range [][2]string{{"mid", tt.other}, {tt.other, "mid"}} {
			ip := map[string]string{"mid": "172.30.0.9", tt.other: tt.subnet + ".9"}
			h.must("create --name both --network " + order[0] + " --ip " + ip[order[0]] + " IMAGE serve")
			h.must("network connect --ip " + ip[order[1]] + " " + order[1] + " both")
			h.must("start both")
			h.checkBoth(tt.kind, tt.first, ip["mid"], ip[tt.other])
			h.must("rm --force both")

			h.must("run -d --name both --network " + order[0] + " --ip " + ip[order[0]] + " IMAGE serve")
			h.must("network connect --ip " + ip[order[1]] + " " + order[1] + " both")
			h.checkBoth(tt.kind, tt.first, ip["mid"], ip[tt.other])

			if seen := h.get("both", "neighbour"); seen != ip[tt.other] {
				t.Errorf("on %v the neighbour on %s sees %q", order, tt.other, seen)
			}
			h.must("network disconnect " + tt.other + " both")
			in := h.look("both")
			if len(in.Links) != 1 || in.Links[0].Kind != "tuntap" || !strings.HasPrefix(strings.Join(in.Routes, "\n"), "172.30.0.0/24 dev eth") {
				t.Errorf("on %v without %s: %+v", order, tt.other, in)
			}
			h.waitPing("both", servers[0])
			h.must("rm --force both")
		}
		h.must("rm --force neighbour")
	}
	h.waitEmpty()
}

// checkBoth looks at a container that is on two networks.
func (h *host) checkBoth(kind, first string, addresses ...string) {
	h.w.t.Helper()
	in := h.look("both")
	var kinds, has, ways []string
	for _, l := range in.Links {
		kinds = append(kinds, l.Kind)
		for _, a := range l.Addresses {
			a, _, _ = strings.Cut(a, "/")
			has = append(has, a)
		}
	}
	for _, r := range in.Routes {
		if strings.HasPrefix(r, "default via ") {
			ways = append(ways, strings.Fields(r)[2])
		}
	}
	for _, list := range [][]string{kinds, has, addresses} {
		slices.Sort(list)
	}
	if diff := cmp.Diff([]string{"tuntap", kind}, kinds); diff != "" {
		h.w.t.Errorf("interfaces:\n%s", diff)
	}
	if diff := cmp.Diff(addresses, has); diff != "" {
		h.w.t.Errorf("addresses:\n%s", diff)
	}
	if diff := cmp.Diff([]string{first}, ways); diff != "" {
		h.w.t.Errorf("ways to everywhere:\n%s", diff)
	}
}

// An internal network has no way out, and its containers reach each other.
func TestInternal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	names := w.serveNames()
	h := w.newHost(dockerlab.Config{DNS: []netip.Addr{netlab.ServerAddr4}})
	h.must("network create -d quicvpn --internal " + subnets + " inside")
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 outside")
	h.must("run -d --name web --network inside --ip 172.30.0.80 --ip6 fd00:30::80 IMAGE serve")
	h.must("run -d --name user --network inside --ip 172.30.0.90 --ip6 fd00:30::90 IMAGE sleep")
	h.must("run -d --name other --network outside --ip 172.31.0.70 IMAGE serve")
	want := inside{
		Links: []link{{Name: "eth0", Kind: "tuntap", MTU: 1500, Addresses: []string{"172.30.0.90/24", "fd00:30::90/64"}, Features: offloads}},
		// To where all is refused.
		Routes: []string{
			"172.30.0.0/24 dev eth0", "default via 172.30.0.1 dev eth0", "default via fd00:30::1 dev eth0", "fd00:30::/64 dev eth0",
		},
	}
	if diff := cmp.Diff(want, h.look("user")); diff != "" {
		t.Errorf("inside:\n%s", diff)
	}
	for _, to := range []string{"172.30.0.80", "[fd00:30::80]", "web"} {
		if seen := h.get("user", to); seen != "172.30.0.90" && seen != "fd00:30::90" {
			t.Errorf("%s sees %q", to, seen)
		}
	}
	// Nor does a route help that the container makes itself.
	h.must("run -d --name router --network inside --ip 172.30.0.66 --cap-add NET_ADMIN " + h.DebianImage(w.ctx) + " sleep infinity")
	h.must("exec router ip route replace default via 172.30.0.1")
	for _, to := range []string{netlab.ServerAddr4.String(), netlab.GatewayAddr4.String(), "172.31.0.70", "192.0.2.2"} {
		if out, err := h.try("exec router ping -c 1 -W 1 " + to); err == nil {
			t.Errorf("an internal network reaches %s: %s", to, out)
		}
	}
	if out, err := h.try("exec user /toolbox resolve where.example"); err == nil {
		t.Errorf("an internal network knows where.example as %q", out)
	}
	if who := names.who(); len(who) > 0 {
		t.Errorf("for an internal network %v asked the internet's name server", who)
	}
	// As on Docker's own internal networks -p is in vain.
	h.must("run -d --name published --network inside -p 8080:80 IMAGE serve")
	for _, at := range []string{"127.0.0.1:8080", "192.0.2.2:8080"} {
		if page, err := w.Client.Get(w.ctx, "http://"+at+"/"); err == nil {
			t.Errorf("a port of an internal network is published at %s: %q", at, page)
		}
	}

	// On both networks it reaches both.
	h.must("network connect outside user")
	h.waitPing("user", netlab.ServerAddr4)
	if seen := h.get("user", "web"); seen != "172.30.0.90" && seen != "fd00:30::90" {
		t.Errorf("web sees %q", seen)
	}
	h.must("rm --force web user other router published")
	h.waitEmpty()
	h.checkTunnel()
}

// Published ports are reached at the host by its own processes, its neighbours
// and its containers, and at no other place.
func TestPublish(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("run -d --name web --network net -p 8080:80 -p 127.0.0.1:8081:80 -p 8007:7/tcp -p 8007:7/udp -p 8090-8091:80 IMAGE serve")
	page := func(ns *netlab.NS, at string) error {
		_, err := ns.Get(w.ctx, "http://"+at+"/")
		return err
	}
	for _, tt := range []struct {
		ns   *netlab.NS
		at   string
		want bool
	}{
		{w.Client, "127.0.0.1:8080", true},
		{w.Client, "[::1]:8080", true},
		{w.Client, "127.0.0.1:8081", true},
		{w.Uplink, "192.0.2.2:8080", true},
		{w.Uplink, "[2001:db8:1::2]:8080", true},
		{w.Uplink, "192.0.2.2:8081", false},
		{w.Uplink, "192.0.2.2:80", false},
	} {
		if err := page(tt.ns, tt.at); (err == nil) != tt.want {
			t.Errorf("%s from %s: %v, want an answer: %t", tt.at, tt.ns.Name, err, tt.want)
		}
	}
	ranged := 0
	for _, at := range []string{"192.0.2.2:8090", "192.0.2.2:8091"} {
		if page(w.Uplink, at) == nil {
			ranged++
		}
	}
	if ranged == 0 {
		t.Error("no port of a range answers")
	}
	for _, network := range []string{"tcp", "udp"} {
		for _, at := range []string{"192.0.2.2:8007", "[2001:db8:1::2]:8007"} {
			if err := echo(w, network, at); err != nil {
				t.Errorf("%s %s: %v", network, at, err)
			}
		}
	}
	if _, err := h.try("exec web /toolbox get http://" + netlab.ServerAddr4.String() + "/"); err != nil {
		t.Error(err)
	}

	h.refused("run --name bad --network net -p 8080:80 IMAGE serve", "NetworkDriver.ProgramExternalConnectivity: publish 8080->80/tcp: host port 8080/tcp is in use: stop what uses it or publish another port")
	h.refused("run --name worse --network net -p 8080:80/sctp IMAGE serve", "NetworkDriver.ProgramExternalConnectivity: publish 8080->80/sctp: quicvpn publishes tcp and udp ports, not sctp")
	h.must("rm bad worse")
	h.waitState("one container", func(s state) bool { return s.endpoints() == 1 && len(s.Devices) == 0 })

	h.must("restart web")
	h.waitFor("the port after a restart", pingLimit, func() error { return page(w.Uplink, "192.0.2.2:8080") })
	h.must("rm --force web")
	h.waitEmpty()
	if err := page(w.Client, "127.0.0.1:8080"); err == nil {
		t.Error("the port answers without its container")
	}
	h.must("run -d --name next --network net -p 8080:80 IMAGE serve")
	h.waitFor("the port of the next container", pingLimit, func() error { return page(w.Uplink, "192.0.2.2:8080") })
}

// echo sends a text from the uplink and waits for it to come back.
func echo(w *world, network, at string) error {
	c, err := w.Uplink.DialContext(w.ctx, network, at)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	buf := make([]byte, 10)
	n, err := c.Read(buf)
	if err == nil && string(buf[:n]) != "hello" {
		err = fmt.Errorf("%q came back", buf[:n])
	}
	return err
}
