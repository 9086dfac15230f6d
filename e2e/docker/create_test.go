package docker

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

const (
	subnets = "--ipv6 --subnet 172.30.0.0/24 --subnet fd00:30::/64"
	// refusal is how Docker's client starts what the driver said.
	refusal = "Error response from daemon: NetworkDriver.CreateNetwork: "
)

// Every refusal says why, and leaves nothing behind.
func TestCreateRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	garbage := w.save("garbage", "not-a-token-but-secret\n")
	revoked, pool := w.newToken("revoked"), w.newToken("pool")
	w.run(w.Gateway, "token", "revoke", "--state-dir", w.gatewayDir(), "revoked")
	missing := filepath.Join(w.dir, "missing")
	token, err := os.ReadFile(w.token)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ args, want string }{
		{"-o colour=red", `unknown option "colour": there are dns, mtu, queues, socks5, tcp, token, token-file, wait`},
		{"-o mtu=99999", "option mtu: must be a whole number from 1280 to 1500, or 0 for the default"},
		{"-o mtu", "option mtu: must be a whole number from 1280 to 1500, or 0 for the default"},
		{"-o queues=-1", "option queues: must be a whole number from 1 to "},
		{"-o wait=soon", "option wait: "},
		{"-o dns=maybe", "option dns: must be one of tunnel, host"},
		{"-o token-file=" + missing, "option token-file: open " + missing + ": no such file or directory: give the absolute path of the file that holds the join token, on the host that runs the driver"},
		{"-o token-file=" + garbage, "option token-file: " + garbage + ": "},
		{"-o token=not-a-token-but-secret", "option token: "},
		{"-o token-file=" + w.token + " -o token=" + strings.TrimSpace(string(token)), "option token-file: there is a token already: give either token-file or token"},
		{"--subnet 192.0.2.0/26", "the subnet 192.0.2.0/26 overlaps 192.0.2.0/28 of the host's interface eth0: choose another --subnet"},
		{"-o token-file=" + revoked, "the join token was revoked"},
		{"--subnet 10.91.254.0/24 -o token-file=" + pool, "the network's subnet 10.91.254.0/24 overlaps the gateway's pool at 10.91.254.0/24: choose another --subnet"},
		{"--internal --ipam-driver null", "an internal network needs the engine's own addresses: leave out --ipam-driver null or --internal"},
	} {
		out, err := h.try("network create -d quicvpn " + tt.args + " bad")
		if err == nil || !strings.Contains(err.Error(), refusal) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("create with %s: %q, error %v, want %q", tt.args, out, err, tt.want)
		}
		if err != nil {
			if _, said, _ := strings.Cut(err.Error(), refusal); strings.Contains(said, "secret") {
				t.Errorf("create with %s: the error repeats a secret: %v", tt.args, err)
			}
		}
		h.checkNone()
	}
	if list := w.run(w.Gateway, "client", "list", "--state-dir", w.gatewayDir()); strings.Contains(list, "pool") {
		t.Errorf("a refused network keeps its place at the gateway:\n%s", list)
	}
}

// checkNone fails where the engine or the driver has a network.
func (h *host) checkNone() {
	h.w.t.Helper()
	if left := h.must("network ls --quiet --filter driver=quicvpn"); left != "" {
		h.w.t.Errorf("the engine has networks %q", left)
	}
	if s := h.state(); len(s.Networks) > 0 || len(s.Devices) > 0 || s.Queues > 0 {
		h.w.t.Errorf("the driver holds %+v", s)
	}
}

// A driver may have no token of its own.
func TestCreateWithoutToken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.stopDriver()
	token := w.token
	w.token = ""
	h.startDriver()
	h.refused("network create -d quicvpn bad", refusal+"no join token: give -o token-file=PATH, or start the driver with --token-file")
	h.checkNone()
	h.must("network create -d quicvpn --internal inside")
	h.must("network create -d quicvpn -o token-file=" + token + " outside")
}

// Where the host's resolver is a loopback address the engine itself would ask it,
// outside of the tunnel.
func TestLoopbackResolver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	names := w.serveNames()
	h := w.newHost(dockerlab.Config{ResolvConf: "nameserver 127.0.0.1\n"})
	h.refused("network create -d quicvpn net", refusal+"the host's resolver 127.0.0.1 in /etc/resolv.conf would be asked for containers' names in clear")
	h.checkNone()
	own := serveNames(t, w.Client)
	h.must("network create -d quicvpn -o dns=host net")
	h.must("run --rm --network net IMAGE resolve where.example")
	if who := own.who(); !slices.Equal(who, []netip.Addr{netip.MustParseAddr("127.0.0.1")}) {
		t.Errorf("%v asked the host's resolver, want the host", who)
	}

	told := w.addHost("told", dockerlab.Config{ResolvConf: "nameserver 127.0.0.1\n", DNS: []netip.Addr{netlab.ServerAddr4}})
	told.must("network create -d quicvpn net")
	told.must("run --rm --network net IMAGE resolve where.example")
	if who := names.who(); !slices.Equal(who, []netip.Addr{netlab.EgressAddr4}) {
		t.Errorf("%v asked the resolver of the engine's configuration, want the gateway's address", who)
	}
}

// TestCreateWithOptions checks that options arrive where they are for.
func TestCreateWithOptions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn " + subnets + " -o mtu=1300 -o queues=1 -o wait=5s -o token-file=" + w.newToken("other") + " net")
	h.must("run -d --name user --network net IMAGE sleep")
	want := inside{
		Links: []link{{Name: "eth0", Kind: "tuntap", MTU: 1300,
			Addresses: []string{"172.30.0.2/24", "fd00:30::2/64"}, Features: offloads}},
		Routes: []string{
			"172.30.0.0/24 dev eth0", "default via 172.30.0.1 dev eth0", "default via fd00:30::1 dev eth0", "fd00:30::/64 dev eth0",
		},
	}
	if diff := cmp.Diff(want, h.look("user")); diff != "" {
		t.Errorf("inside the container:\n%s", diff)
	}
	if s := h.state(); s.Queues != 1 || s.endpoints() != 1 {
		t.Errorf("the driver holds %+v, want one queue of one endpoint", s)
	}
	for _, server := range servers {
		h.waitPing("user", server)
	}
	secret, err := os.ReadFile(w.token)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"network inspect net", "inspect user"} {
		if strings.Contains(h.must(line), strings.TrimSpace(string(secret))) {
			t.Errorf("docker %s shows the token", line)
		}
	}
	h.must("rm -f user")
	h.waitEmpty()
	h.must("network rm net")
	h.checkNone()
}

// waitPing waits until a container reaches an address.
func (h *host) waitPing(container string, to netip.Addr) {
	h.w.t.Helper()
	h.waitFor(container+" pings "+to.String(), pingLimit, func() error {
		_, err := h.try("exec " + container + " /toolbox ping " + to.String())
		return err
	})
}

// stopDriver stops the driver gracefully.
func (h *host) stopDriver() {
	h.w.t.Helper()
	if err := h.driver.Stop(30 * time.Second); err != nil {
		h.w.t.Errorf("stop the driver: %v; it printed:\n%s", err, h.driver.Log())
	}
}
