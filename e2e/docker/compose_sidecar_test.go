package docker

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/nsenter"
)

func TestComposeSidecar(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	h.make("image", "OFFLINE=1")
	names := w.serveNames()
	p := h.project("compose/sidecar.yaml", fmt.Sprintf(`
services:
  app: {image: IMAGE, command: serve}
  vpn: {dns: !override %s}
`, netlab.ServerAddr4), "QUICVPN_TOKEN_FILE="+w.token)
	p.must("up --detach --wait")
	p.seenAs("app", both)
	if got := p.must("exec -T app /toolbox resolve where.example"); got != netlab.ServerAddr4.String() {
		t.Errorf("where.example is %q", got)
	}
	if who := names.who(); !slices.Equal(who, []netip.Addr{netlab.EgressAddr4}) {
		t.Errorf("%v asked for the name, want the gateway's address", who)
	}
	h.checkTunnel()

	// The published port answers where it was asked, to whom did.
	published := func() error {
		page, err := w.Uplink.Get(w.ctx, "http://"+h.uplink.Addresses()[0].Addr().String()+":8080/")
		if want := w.UplinkClientIf.Addresses()[0].Addr().String(); err == nil && page != want+"\n" {
			err = errors.New("the app was asked by " + page + ", want " + want)
		}
		return err
	}
	if err := published(); err != nil {
		t.Errorf("the published port: %v", err)
	}

	// A stop and a kill let nothing of the app's out.
	before := p.started("app")
	stop := h.flood(p.must("ps --quiet vpn"))
	p.must("restart vpn")
	stop()
	h.checkTunnel()
	if p.started("app") == before {
		t.Error("the app was not restarted with the sidecar whose network it has")
	}
	p.must("up --detach --wait")
	p.seenAs("app", both)
	if err := published(); err != nil {
		t.Errorf("the published port after a restart: %v", err)
	}

	h.killSidecar(p)
	// As the file says.
	p.must("restart vpn")
	p.must("up --detach --wait")
	p.seenAs("app", both)

	var clients []struct{}
	list := w.run(w.Gateway, "client", "list", "--state-dir", w.gatewayDir(), "--json")
	if err := json.Unmarshal([]byte(list), &clients); err != nil || len(clients) != 1 {
		t.Errorf("the gateway knows the clients %s (%v), want one", list, err)
	}
	h.checkTunnel()
	p.down()
}

// killSidecar kills the sidecar while the app sends, of which nothing gets out then.
// Docker starts the sidecar again in a new network, and the app stays in the old.
func (h *host) killSidecar(p *project) {
	h.w.t.Helper()
	before := p.started("vpn")
	stop := h.flood(p.must("ps --quiet vpn"))
	defer stop()
	pid := h.must("inspect --format {{.State.Pid}} " + p.must("ps --quiet vpn"))
	if c := h.Command(h.w.ctx, "kill", "-KILL", pid); c.Run() != nil {
		h.w.t.Fatal(c.Log())
	}
	h.waitFor("the sidecar runs again, and its tunnel", 30*time.Second, func() error {
		_, err := p.try("exec -T vpn /quicvpn healthcheck")
		if p.started("vpn") == before {
			err = errors.New("it was not started again")
		}
		return err
	})
	for url := range both {
		if page, err := p.try("exec -T app /toolbox get " + url); err == nil {
			h.w.t.Errorf("after the sidecar was killed the app gets %s: %q", url, page)
		}
	}
}

// flood sends datagrams to the internet out of a container's network, whatever
// becomes of it, until it is stopped.
func (h *host) flood(container string) (stop func()) {
	h.w.t.Helper()
	var from [2]net.PacketConn
	err := nsenter.Do(h.Sandbox(h.w.ctx, container), func() (err error) {
		for i, network := range []string{"udp4", "udp6"} {
			if from[i], err = net.ListenPacket(network, ":0"); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		h.w.t.Fatal(err)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			for i, c := range from {
				// It fails while there is no way out.
				_, _ = c.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(servers[i], 7)))
			}
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
		for _, c := range from {
			c.Close()
		}
	}
}
