package docker

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// bareHost makes the first client a Docker host without a driver.
func (w *world) bareHost() *host {
	w.t.Helper()
	h := &host{w: w, name: w.Client.Name, uplink: w.ClientIf, capture: w.ClientIf.Capture(gatewayEnd)}
	h.Engine = dockerlab.Start(w.t, w.Client, dockerlab.Config{})
	w.hosts = append(w.hosts, h)
	return h
}

// makes is held by the one make that runs: all write to bin and dist.
var makes sync.Mutex

// makeArgs are make's for a target of the Makefile.
func makeArgs(t *testing.T, args ...string) []string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	compiler, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	return append([]string{"-C", root, "GO=" + compiler}, args...)
}

// make runs make beside the engine, where there is no internet.
func (h *host) make(args ...string) {
	h.w.t.Helper()
	makes.Lock()
	defer makes.Unlock()
	c := h.Command(h.w.ctx, "make", makeArgs(h.w.t, args...)...)
	if err := c.Run(); err != nil {
		h.w.t.Fatalf("make %s: %v\n%s", args, err, c.Log())
	}
}

// unprivileged are options of docker run that take everything away.
const unprivileged = "--cap-drop ALL --read-only --security-opt no-new-privileges"

// tunnelling are those of gateway and sidecar: what they need, and no more.
const tunnelling = unprivileged + " --cap-add NET_ADMIN --device /dev/net/tun"

// The image is built without network. Small as it is, it has all that the roles
// need, and they need few of root's powers.
func TestImage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	h.make("image", "OFFLINE=1")

	var images []struct {
		Size   int64
		Config struct {
			Labels     map[string]string
			Entrypoint []string
		}
	}
	if err := json.Unmarshal([]byte(h.must("image inspect quicvpn")), &images); err != nil {
		t.Fatal(err)
	}
	image := images[0]
	if image.Size > 40e6 {
		t.Errorf("the image has %d bytes, want at most 40 MB", image.Size)
	}
	if !slices.Equal(image.Config.Entrypoint, []string{"/quicvpn"}) {
		t.Errorf("the entry point is %q", image.Config.Entrypoint)
	}
	for _, label := range []string{"title", "description", "source", "documentation", "licenses"} {
		if image.Config.Labels["org.opencontainers.image."+label] == "" {
			t.Errorf("no label %s in %v", label, image.Config.Labels)
		}
	}

	for _, options := range []string{"", "--user 65532 --network none " + unprivileged} {
		if out := h.must("run --rm " + options + " quicvpn version"); !strings.HasPrefix(out, "quicvpn ") {
			t.Errorf("docker run %s quicvpn version: %q", options, out)
		}
	}

	// A sidecar that is made anew on the same volume is the same client.
	for range 2 {
		h.must("run -d --name vpn " + tunnelling + " -v vpn:/var/lib/quicvpn -v " + w.token + ":/run/secrets/quicvpn_token:ro quicvpn sidecar")
		h.waitFor("the sidecar reaches the internet", 20*time.Second, func() error {
			page, err := h.try("run --rm --network container:vpn IMAGE get http://" + netlab.ServerAddr4.String() + "/")
			if err == nil && !strings.Contains(page, netlab.EgressAddr4.String()) {
				t.Fatalf("the internet saw another sender than the gateway: %q", page)
			}
			return err
		})
		h.must("rm -f vpn")
	}
	var clients []struct{}
	list := w.run(w.Gateway, "client", "list", "--state-dir", w.gatewayDir(), "--json")
	if err := json.Unmarshal([]byte(list), &clients); err != nil || len(clients) != 1 {
		t.Errorf("the gateway knows the clients %s (%v), want one", list, err)
	}
}

// The image's gateway needs no more than its sidecar, and init nothing at all.
func TestImageGateway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	uplink, _ := w.AddClient("server", netlab.LinkConfig{})
	h := &host{Engine: dockerlab.Start(t, uplink.NS, dockerlab.Config{}), w: w}
	h.make("image", "OFFLINE=1")
	address := uplink.Addresses()[0].Addr().String()
	token := w.save("token-server", h.must("run --rm --network none "+unprivileged+
		" -v gateway:/var/lib/quicvpn quicvpn gateway init --address "+address+":443"))
	h.must("run -d --name gateway -p 443:443/udp " + tunnelling + " -v gateway:/var/lib/quicvpn quicvpn gateway run")

	client := w.Client.Start(w.ctx, program, "sidecar", "--token-file", token, "--state-dir", filepath.Join(w.dir, "sidecar"))
	if err := w.Client.WaitRoute(w.ctx, netlab.ServerAddr4, "quicvpn0"); err != nil {
		t.Fatalf("%v\n%s\n%s", err, client.Log(), h.must("logs gateway"))
	}
	page, err := w.Client.Get(w.ctx, "http://"+netlab.ServerAddr4.String()+"/")
	if err != nil || !strings.Contains(page, address) {
		t.Errorf("the page says %q (%v), want %s, the address of the gateway's host, in it", page, err, address)
	}
	if tokens := h.must("run --rm --network none " + unprivileged + " -v gateway:/var/lib/quicvpn quicvpn token list"); !strings.Contains(tokens, "first") {
		t.Errorf("the tokens are %q, want the first among them", tokens)
	}
}
