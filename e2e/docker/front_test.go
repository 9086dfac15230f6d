package docker

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// The network's own address is a proxy for its containers, and for nobody else.
func TestNetworkProxy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serveNames()
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 other")
	h.must("network create -d quicvpn --subnet 172.31.1.0/24 -o socks5=off off")
	h.must("network create -d quicvpn --subnet 172.31.2.0/24 --internal inner")
	get := func(network, proxy, url string) (string, error) {
		page, err := h.try("run --rm --network " + network + " -e HTTP_PROXY=" + proxy + " -e HTTPS_PROXY=" + proxy + " IMAGE get " + url)
		return strings.TrimPrefix(page, netlab.Page), err
	}
	for _, proxy := range []string{"socks5h://172.30.0.1:1080", "http://172.30.0.1:1080", "socks5h://[fd00:30::1]:1080"} {
		for _, url := range []string{"http://where.example/", "https://" + netlab.ServerAddr4.String() + "/"} {
			if seen, err := get("net", proxy, url); err != nil || seen != netlab.EgressAddr4.String() {
				t.Errorf("%s by %s is seen as %q, %v", url, proxy, seen, err)
			}
		}
	}
	for _, tt := range []struct{ network, proxy string }{
		{"other", "socks5h://172.30.0.1:1080"}, // of another network
		{"off", "socks5h://172.31.1.1:1080"},
		{"inner", "socks5h://172.31.2.1:1080"},
	} {
		if seen, err := get(tt.network, tt.proxy, "http://"+netlab.ServerAddr4.String()+"/"); err == nil {
			t.Errorf("from %s the proxy %s answers: %q", tt.network, tt.proxy, seen)
		}
	}

	// It is there again after the driver's restart.
	h.driver.Kill()
	h.startDriver()
	if seen, err := get("net", "socks5h://172.30.0.1:1080", "http://where.example/"); err != nil || seen != netlab.EgressAddr4.String() {
		t.Errorf("after a restart: %q, %v", seen, err)
	}
	h.checkTunnel()
}

// Programs use the network's proxy as they would any other, for datagrams too, and
// siblings past it. A container with an exit of its own has that exit's proxy.
func TestNetworkProxyPrograms(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	names := w.serveNames()
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("run -d --name web --network net IMAGE serve")
	const socks, http = "socks5h://172.30.0.1:1080", "http://172.30.0.1:1080"
	h.must("run -d --name user --network net -e ALL_PROXY=" + socks + " -e HTTPS_PROXY=" + http + " -e NO_PROXY=web " + h.DebianImage(w.ctx) + " sleep infinity")
	h.waitPing("web", netlab.ServerAddr4)
	want := netlab.Page + netlab.EgressAddr4.String()
	for _, url := range []string{"http://where.example/", "https://where.example/", "http://" + netlab.ServerAddr4.String() + "/"} {
		if page := h.must("exec user curl -sSk --max-time 10 " + url); page != want {
			t.Errorf("%s: %q, want %q", url, page, want)
		}
	}
	if who := names.who(); !slices.Equal(who, []netip.Addr{netlab.EgressAddr4}) {
		t.Errorf("%v asked for names, want the gateway", who)
	}
	if page := h.must("exec user curl -sS --max-time 10 http://web/"); page != h.address("user", "net").String() && page != "fd00:30::3" {
		t.Errorf("a sibling sees %q", page)
	}
	if page, err := h.try("exec user curl -sS --max-time 10 http://where.example:81/"); err == nil || !strings.Contains(err.Error(), "(97)") && !strings.Contains(err.Error(), "refused") {
		t.Errorf("a port that is closed: %q, %v", page, err)
	}

	for _, proxy := range []string{"172.30.0.1:1080", "[fd00:30::1]:1080"} {
		for _, server := range servers {
			for _, size := range []string{"1", "1200", "1500", "9000"} {
				if out, err := h.try("exec web /toolbox associate " + proxy + " " + netip.AddrPortFrom(server, 7).String() + " " + size); err != nil {
					t.Errorf("a datagram of %s bytes to %v by %s: %q, %v", size, server, proxy, out, err)
				}
			}
		}
	}

	other := w.newToken("other", "--network", "other", "--allow", netlab.ServerAddr4.String()+"/32")
	h.must("create --name special IMAGE serve")
	h.must("network disconnect bridge special")
	h.must("network connect --driver-opt token-file=" + other + " net special")
	h.must("start special")
	h.reaches("special")
	associate := "exec special /toolbox associate 172.30.0.1:1080 "
	h.must(associate + netip.AddrPortFrom(netlab.ServerAddr4, 7).String() + " 100")
	if out, err := h.try(associate + netip.AddrPortFrom(netlab.ServerAddr6, 7).String() + " 100"); err == nil {
		t.Errorf("the proxy takes a container where its own token does not let it: %q", out)
	}
	h.checkTunnel()

	// All of it goes with the network.
	before := len(h.descriptors())
	h.must("rm -f user web special")
	h.must("network rm net")
	h.waitEmpty()
	if after := h.descriptors(); len(after) >= before {
		t.Errorf("the driver has %d descriptors, and had %d with the network: %q", len(after), before, after)
	}
}

// With tcp=flow connections end in the driver, and the gateway connects; between
// containers, and to published ports, they go as ever.
func TestNetworkFlows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " -o tcp=flow net")
	h.must("run -d --name web --network net -p 127.0.0.1:8088:80 IMAGE serve")
	h.must("run -d --name user --network net IMAGE sleep")
	before := w.leftByPackets()
	for server, egress := range map[string]string{
		netlab.ServerAddr4.String():             netlab.EgressAddr4.String(),
		"[" + netlab.ServerAddr6.String() + "]": netlab.EgressAddr6.String(),
	} {
		if seen := h.get("user", server); seen != egress {
			t.Errorf("%s sees %q, want %q", server, seen, egress)
		}
	}
	if after := w.leftByPackets(); after != before {
		t.Errorf("%d packets left the gateway as packets", after-before)
	}
	if seen := h.get("user", "web"); seen != h.address("user", "net").String() && seen != "fd00:30::3" {
		t.Errorf("a sibling sees %q", seen)
	}
	if _, err := h.NS().Get(w.ctx, "http://127.0.0.1:8088/"); err != nil {
		t.Errorf("the published port: %v", err)
	}
	h.checkTunnel()
}

// leftByPackets counts what the gateway's kernel got of clients.
func (w *world) leftByPackets() uint64 {
	w.t.Helper()
	link, err := w.Gateway.Netlink().LinkByName("quicvpn-gw")
	if err != nil {
		w.t.Fatal(err)
	}
	return link.Attrs().Statistics.RxPackets
}
