package docker

import (
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// pageURL is a page of the internet, which says whom its server saw.
var pageURL = "http://" + netlab.ServerAddr4.String() + "/"

// curls runs curl in a service as a user does, and returns the page.
func (p *project) curls(args string) (string, error) {
	return p.try("exec -T app curl -sSk --max-time 20 " + args)
}

// seenByProxy checks that the app's pages come by the gateway.
func (p *project) seenByProxy(args string) {
	p.h.w.t.Helper()
	page, err := p.curls(args)
	if want := netlab.Page + netlab.EgressAddr4.String(); err != nil || page != want {
		p.h.w.t.Errorf("curl %s: %q, %v; want %q", args, page, err, want)
	}
}

func TestComposeProxy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	h.make("image", "OFFLINE=1")
	p := h.project("compose/proxy.yaml", `services: {app: {image: DEBIAN}}`, "QUICVPN_TOKEN_FILE="+w.token, "PROXY_PASSWORD=secret")
	p.must("up --detach --wait")
	p.seenByProxy(pageURL)
	p.seenByProxy(strings.Replace(pageURL, "http:", "https:", 1))
	p.seenByProxy("--proxy socks5h://app:secret@vpn:1080 " + pageURL)
	if page, err := p.curls("--proxy http://app:wrong@vpn:1080 " + pageURL); err == nil && strings.HasPrefix(page, netlab.Page) {
		t.Errorf("with a wrong password: %q", page)
	}
	if page, err := p.curls("--noproxy * --max-time 3 " + pageURL); err == nil {
		t.Errorf("past the proxy: %q", page)
	}
	// Programs on the host.
	out, err := h.Command(w.ctx, "curl", "-sS", "--max-time", "20", "--proxy", "socks5h://app:secret@127.0.0.1:1080", pageURL).CombinedOutput()
	if want := netlab.Page + netlab.EgressAddr4.String() + "\n"; err != nil || string(out) != want {
		t.Errorf("from the host: %q, %v", out, err)
	}
	if caps := h.must("inspect --format {{.HostConfig.CapAdd}}{{.HostConfig.CapDrop}}{{.HostConfig.Devices}} " + p.must("ps --quiet vpn")); caps != "[][ALL][]" {
		t.Errorf("the sidecar has %s", caps)
	}
	p.must("restart vpn")
	p.must("up --detach --wait")
	p.seenByProxy(pageURL)
	p.must("stop vpn")
	if page, err := p.curls(pageURL); err == nil {
		t.Errorf("without a sidecar: %q", page)
	}
	h.checkTunnel()
	p.down()

	p = h.project("examples/proxy-loopback.yaml", `services: {app: {image: DEBIAN}}`, "QUICVPN_TOKEN_FILE="+w.token)
	p.must("up --detach --wait")
	p.seenByProxy(pageURL)
	h.checkTunnel()
	p.down()
}
