package docker

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

var servers = []netip.Addr{netlab.ServerAddr4, netlab.ServerAddr6}

// pingLimit is how long an answer may take to come at first.
const pingLimit = 10 * time.Second

// A container has one interface, which all goes through.
func TestRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("run -d --name user --network net " + h.DebianImage(w.ctx) + " sleep infinity")
	in := h.look("user")
	if len(in.Links) != 1 {
		t.Fatalf("interfaces %+v, want one", in.Links)
	}
	if mtu := in.Links[0].MTU; mtu < 1350 || mtu >= 1500 {
		t.Errorf("MTU %d, want what a path of 1500 bytes carries in a tunnel", mtu)
	}
	in.Links[0].MTU = 0
	want := inside{
		Links: []link{{Name: "eth0", Kind: "tuntap", Addresses: []string{"172.30.0.2/24", "fd00:30::2/64"}, Features: offloads}},
		Routes: []string{
			"172.30.0.0/24 dev eth0", "default via 172.30.0.1 dev eth0", "default via fd00:30::1 dev eth0", "fd00:30::/64 dev eth0",
		},
	}
	if diff := cmp.Diff(want, in); diff != "" {
		t.Errorf("inside the container:\n%s", diff)
	}
	for _, to := range append(servers, netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("fd00:30::1")) {
		h.must("exec user ping -c 2 -i 0.2 -W 5 " + to.String())
	}
	for i, server := range servers {
		want := []netip.Addr{netlab.EgressAddr4, netlab.EgressAddr6}[i]
		for _, scheme := range []string{"http", "https"} {
			url := fmt.Sprintf("%s://%s/", scheme, netip.AddrPortFrom(server, map[string]uint16{"http": 80, "https": 443}[scheme]))
			if page := h.must("exec user curl -sSk --max-time 10 " + url); page != netlab.Page+want.String() {
				t.Errorf("%s: %q, want that the internet sees %s", url, page, want)
			}
		}
	}
	w.Internet.ServeIperf(w.ctx, 5201)
	for _, args := range []string{"", "--reverse", "--udp --length 1200 --bitrate 20M"} {
		out := h.must("exec user iperf3 --json --time 1 --client " + netlab.ServerAddr4.String() + " " + args)
		var result struct {
			End struct {
				SumReceived struct {
					Bits float64 `json:"bits_per_second"`
				} `json:"sum_received"`
				Sum struct {
					Bits float64 `json:"bits_per_second"`
				} `json:"sum"`
			}
		}
		if err := json.Unmarshal([]byte(out), &result); err != nil {
			t.Fatalf("iperf3 %s: %v: %s", args, err, out)
		}
		if bits := result.End.SumReceived.Bits + result.End.Sum.Bits; bits < 10e6 {
			t.Errorf("iperf3 %s: %.0f bits a second", args, bits)
		}
	}
	h.checkTunnel()
}

// checkTunnel fails unless the uplink showed a tunnel and nothing in clear.
func (h *host) checkTunnel() {
	h.w.t.Helper()
	if problem := h.capture.Traffic().Problem(); problem != "" {
		h.w.t.Errorf("the uplink of %s: %s", h.name, problem)
	}
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("network create -d quicvpn --ipam-driver null leased")

	h.refused("run --name bad --network net --mac-address 02:42:00:00:00:01 IMAGE sleep",
		"NetworkDriver.CreateEndpoint: a TUN device has no MAC address: leave out --mac-address (mac_address in Compose)")
	h.must("rm bad")
	h.waitEmpty()

	h.must("run -d --name fixed --network net --ip 172.30.0.77 --ip6 fd00:30::77 IMAGE sleep")
	if diff := cmp.Diff([]string{"172.30.0.77/24", "fd00:30::77/64"}, h.look("fixed").Links[0].Addresses); diff != "" {
		t.Errorf("addresses:\n%s", diff)
	}

	h.must("run -d --name leased1 --network leased IMAGE sleep")
	h.must("run -d --name leased2 --network leased IMAGE serve")
	in := h.look("leased1")
	if len(in.Links) != 1 || len(in.Links[0].Addresses) != 1 || !strings.HasSuffix(in.Links[0].Addresses[0], "/32") {
		t.Fatalf("with addresses of the gateway's: %+v", in)
	}
	if !strings.HasPrefix(in.Routes[len(in.Routes)-1], "default via ") {
		t.Errorf("routes %q, want one to everywhere", in.Routes)
	}
	h.waitPing("leased1", servers[0])
	page := h.must("exec leased1 /toolbox get http://" + h.address("leased2", "leased").String() + "/")
	if want, _, _ := strings.Cut(in.Links[0].Addresses[0], "/"); page != want {
		t.Errorf("a container is seen as %s by its neighbour, want %s", page, want)
	}
}
