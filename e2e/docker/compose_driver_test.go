package docker

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// standIns are for the app, which has the toolbox too and says hello on its port,
// and for the database.
func standIns(t *testing.T) string {
	return fmt.Sprintf(`
services:
  app:
    image: DEBIAN
    stop_signal: SIGKILL
    volumes: ["%s:/toolbox:ro"]
    command:
      - perl
      - -MIO::Socket::INET
      - -e
      - |
        my $$server = IO::Socket::INET->new(LocalPort => 8080, Listen => 5, ReuseAddr => 1) or die $$!;
        while (my $$c = $$server->accept) {
          while (<$$c>) { last if /^\r\n/ }
          print $$c "HTTP/1.0 200 OK\r\n\r\nhello";
          close $$c;
        }
  db: {image: DEBIAN, command: pg_ctlcluster --foreground 15 main start}
`, dockerlab.Toolbox(t))
}

func TestComposeDriver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	p := h.project("compose/driver.yaml", standIns(t), "DB_PASSWORD=secret", "QUICVPN_TOKEN_FILE="+w.token)
	p.must("up --detach --wait")
	in := h.look(p.must("ps --quiet app"))
	if len(in.Links) != 1 || in.Links[0].Kind != "tuntap" {
		t.Errorf("the app's interfaces are %+v, want a TUN device alone", in.Links)
	}
	p.seenAs("app", both)
	p.checkDatabase()
	p.checkHello()
	p.checkProxyHints()
	h.checkTunnel()

	// The services need no gateway for each other, and all else does.
	w.gateway.Kill()
	p.checkDatabase()
	p.checkHello()
	for url := range both {
		if page, err := p.try("exec -T app curl -sS --max-time 2 " + url); err == nil {
			t.Errorf("without a gateway the app gets %s: %q", url, page)
		}
	}
	w.startGateway()
	h.waitPing(p.must("ps --quiet app"), servers[0])
	p.seenAs("app", both)

	p.must("restart")
	p.must("up --detach --wait")
	after := h.look(p.must("ps --quiet app"))
	if before, after := &in.Links[0], &after.Links[0]; len(after.Addresses) == len(before.Addresses) {
		before.Addresses = after.Addresses      // the services come back in any order
		before.MTU = max(before.MTU, after.MTU) // QUIC may have found that the path carries more
	}
	if diff := cmp.Diff(in, after); diff != "" {
		t.Errorf("inside the app after a restart:\n%s", diff)
	}
	p.checkDatabase()
	p.down()
	h.waitEmpty()
}

// checkDatabase has the app ask its database, which it finds by name.
func (p *project) checkDatabase() {
	p.h.w.t.Helper()
	addr, err := netip.ParseAddr(strings.Fields(p.must("exec -T app getent ahostsv4 db"))[0])
	if err != nil || !netip.MustParsePrefix("10.88.0.0/24").Contains(addr) {
		p.h.w.t.Errorf("db is %v (%v), want an address of the network", addr, err)
	}
	p.h.waitFor("the database answers", pingLimit, func() error {
		out, err := p.try("exec -T app psql --host db --username postgres --tuples-only --no-align --command SELECT(6*7)")
		if err == nil && out != "42" {
			err = fmt.Errorf("psql printed %q", out)
		}
		return err
	})
}

var proxyHint = regexp.MustCompile(`(?m)^ *# +((?:ALL|HTTPS)_PROXY): (\S+)$`)

// checkProxyHints has the app use the network's proxy as the document's comments say.
func (p *project) checkProxyHints() {
	p.h.w.t.Helper()
	text, err := os.ReadFile("../../compose/driver.yaml")
	if err != nil {
		p.h.w.t.Fatal(err)
	}
	hints := proxyHint.FindAllStringSubmatch(string(text), -1)
	if len(hints) != 2 {
		p.h.w.t.Fatalf("the document has the hints %q, want two", hints)
	}
	for _, hint := range hints {
		out := p.must("exec -T -e " + hint[1] + "=" + hint[2] + " app curl -skv --stderr - --max-time 10 https://" + netlab.ServerAddr4.String() + "/")
		if !strings.Contains(out, "10.88.0.1:1080") || !strings.Contains(out, netlab.Page+netlab.EgressAddr4.String()) {
			p.h.w.t.Errorf("with %s=%s: %s", hint[1], hint[2], out)
		}
	}
}

// checkHello gets the app's page where it is published, on the host alone.
func (p *project) checkHello() {
	p.h.w.t.Helper()
	page, err := p.h.NS().Get(p.h.w.ctx, "http://127.0.0.1:8080/")
	if err != nil || page != "hello" {
		p.h.w.t.Errorf("the published port: %q, %v", page, err)
	}
	if page, err := p.h.w.Uplink.Get(p.h.w.ctx, "http://"+p.h.uplink.Addresses()[0].Addr().String()+":8080/"); err == nil {
		p.h.w.t.Errorf("the port is published beyond the host: %q", page)
	}
}

// The network may be one that is there before, and after.
func TestComposeExternalNetwork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 10.88.0.0/24 mine")
	p := h.project("compose/driver.yaml", standIns(t)+"networks: {default: !override {name: mine, external: true}}", "DB_PASSWORD=secret")
	p.must("up --detach --wait")
	p.seenAs("app", map[string]string{"http://" + netlab.ServerAddr4.String() + "/": netlab.EgressAddr4.String()})
	p.checkDatabase()
	p.must("down --volumes")
	h.waitEmpty()
	h.must("network rm mine")
}
