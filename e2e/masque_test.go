package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/tunnel/masquetest"
)

// A sidecar's proxies lead on by a MASQUE proxy of another make.
func TestForeignMasque(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	pc, err := w.Gateway.ListenPacket("udp4", netlab.GatewayAddr4.String()+":443")
	if err != nil {
		t.Fatal(err)
	}
	foreign := masquetest.Start(t, pc, w.Gateway.DialContext)
	roots := filepath.Join(w.dir, "roots.pem")
	if err := os.WriteFile(roots, foreign.Certificate, 0o600); err != nil {
		t.Fatal(err)
	}
	ns := w.client0().ns
	start := func(url string) *netlab.Cmd {
		c := ns.Command(w.ctx, program, "sidecar", "--tun=off", "--socks5", "127.0.0.1:1080")
		c.Env = append(os.Environ(), "QUICVPN_MASQUE="+url, "SSL_CERT_FILE="+roots)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		if err := c.WaitLog(w.ctx, "a proxy listens"); err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := start("https://user:secret@" + netlab.GatewayAddr4.String() + ":443")
	for _, proxy := range []string{"socks5h://127.0.0.1:1080", "http://127.0.0.1:1080"} {
		out, err := ns.Command(w.ctx, "curl", "--silent", "--show-error", "--max-time", "10", "--proxy", proxy, pageURL("https", netlab.ServerAddr4), "--insecure").Output()
		if err != nil || !strings.HasPrefix(string(out), netlab.Page) {
			t.Errorf("by %s: %q, %v", proxy, out, err)
		}
	}
	if strings.Contains(c.Log(), "secret") {
		t.Errorf("the log has the password:\n%s", c.Log())
	}
	if err := c.Stop(30 * time.Second); err != nil {
		t.Error(err)
	}
	for _, a := range foreign.Authorizations() {
		if a != "Basic dXNlcjpzZWNyZXQ=" {
			t.Errorf("Proxy-Authorization: %q", a)
		}
	}
}
