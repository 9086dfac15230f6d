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

// docsOfImage are the lines of docs/docker.md by which the image is a gateway
// (init and run) and a sidecar, and an app is in the sidecar's network.
func docsOfImage(t *testing.T) (gateway, sidecar []string) {
	t.Helper()
	lines := docLines(t, "The image")
	if len(lines) != 4 {
		t.Fatalf("the section has the lines %q, want two about a gateway and two about a sidecar", lines)
	}
	return lines[:2], lines[2:]
}

// unprivileged are options of docker run that take everything away.
const unprivileged = "--network none --cap-drop ALL --read-only --security-opt no-new-privileges"

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

	for _, options := range []string{"", "--user 65532 " + unprivileged} {
		if out := h.must("run --rm " + options + " quicvpn version"); !strings.HasPrefix(out, "quicvpn ") {
			t.Errorf("docker run %s quicvpn version: %q", options, out)
		}
	}

	_, lines := docsOfImage(t)
	// A sidecar that is made anew on the same volume is the same client.
	for range 2 {
		h.sh(lines[0])
		h.waitFor("the sidecar reaches the internet", 20*time.Second, func() error {
			page, err := h.Command(w.ctx, "sh", "-ec", h.here(lines[1])).Output()
			if err == nil && !strings.Contains(string(page), netlab.EgressAddr4.String()) {
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
	lines, _ := docsOfImage(t)
	for _, line := range lines {
		h.sh(strings.ReplaceAll(line, "gw.example.com", address))
	}

	client := w.Client.Start(w.ctx, program, "sidecar", "--token-file", filepath.Join(w.dir, "token"), "--state-dir", filepath.Join(w.dir, "sidecar"))
	if err := w.Client.WaitRoute(w.ctx, netlab.ServerAddr4, "quicvpn0"); err != nil {
		t.Fatalf("%v\n%s\n%s", err, client.Log(), h.must("logs gateway"))
	}
	page, err := w.Client.Get(w.ctx, "http://"+netlab.ServerAddr4.String()+"/")
	if err != nil || !strings.Contains(page, address) {
		t.Errorf("the page says %q (%v), want %s, the address of the gateway's host, in it", page, err, address)
	}
	if tokens := h.must("run --rm " + unprivileged + " -v quicvpn:/var/lib/quicvpn quicvpn token list"); !strings.Contains(tokens, "first") {
		t.Errorf("the tokens are %q, want the first among them", tokens)
	}
}
