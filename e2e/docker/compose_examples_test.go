package docker

import (
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/nsenter"
)

func TestExamplePublishedPorts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	p := h.project("examples/published-ports.yaml", `services: {web: {image: IMAGE, command: serve}}`)
	p.must("up --detach")
	web := p.must("ps --quiet web")
	own := h.must("inspect --format {{range.NetworkSettings.Networks}}{{.IPAddress}}{{end}} " + web)
	outside := []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8:1::2")}
	local := netip.MustParseAddr("127.0.0.1")
	for _, at := range append(outside, local) {
		from := w.Uplink
		if at == local {
			from = h.NS()
		}
		for port, open := range map[uint16]bool{8080: true, 8081: at == local, 8090: true, 8091: false} {
			page, err := from.Get(w.ctx, "http://"+netip.AddrPortFrom(at, port).String()+"/")
			if open && (err != nil || page != own+"\n") {
				t.Errorf("%v port %d: %q, %v; want the container's own address", at, port, page, err)
			}
			if !open && err == nil {
				t.Errorf("%v port %d is open: %q", at, port, page)
			}
		}
	}

	// What the stand-in lacks: a service of UDP port 443.
	var service net.PacketConn
	if err := nsenter.Do(h.Sandbox(w.ctx, web), func() (err error) {
		service, err = net.ListenPacket("udp", ":443")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	for _, at := range outside {
		c, err := w.Uplink.DialContext(w.ctx, "udp", netip.AddrPortFrom(at, 8443).String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		service.SetDeadline(time.Now().Add(5 * time.Second))
		_, from, err := service.ReadFrom(buf)
		if err != nil {
			t.Fatalf("to %v: %v", at, err)
		}
		if _, err := service.WriteTo([]byte("answer"), from); err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if n, err := c.Read(buf); err != nil || string(buf[:n]) != "answer" {
			t.Errorf("from %v: %q, %v", at, buf[:n], err)
		}
	}
	h.checkTunnel()
	p.down()
	h.waitEmpty()
}

func TestExampleGateway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	uplink, _ := w.AddClient("server", netlab.LinkConfig{})
	h := &host{Engine: dockerlab.Start(t, uplink.NS, dockerlab.Config{}), w: w}
	h.make("image", "OFFLINE=1")
	address := uplink.Addresses()[0].Addr().String()
	p := h.project("examples/gateway.yaml", "{}")
	token := w.save("token-server", p.must("run --rm -T gateway gateway init --address "+address+":443"))
	p.must("up --detach")
	client := w.Client.Start(w.ctx, program, "sidecar", "--token-file", token, "--state-dir", filepath.Join(w.dir, "sidecar"))
	reach := func() {
		t.Helper()
		if err := w.Client.WaitRoute(w.ctx, netlab.ServerAddr4, "quicvpn0"); err != nil {
			t.Fatalf("%v\n%s\n%s", err, client.Log(), p.must("logs gateway"))
		}
		page, err := w.Client.Get(w.ctx, "http://"+netlab.ServerAddr4.String()+"/")
		if err != nil || !strings.Contains(page, address) {
			t.Errorf("the page says %q (%v), want %s, the address of the gateway's host, in it", page, err, address)
		}
	}
	reach()
	if err := client.Stop(30 * time.Second); err != nil {
		t.Fatal(err)
	}

	// Another token of the gateway's, made anew on the same volume.
	p.must("up --detach --force-recreate")
	token = w.save("token-another", p.must("exec -T gateway /quicvpn token create"))
	client = w.Client.Start(w.ctx, program, "sidecar", "--token-file", token, "--state-dir", filepath.Join(w.dir, "sidecar2"))
	reach()
	p.down()
}
