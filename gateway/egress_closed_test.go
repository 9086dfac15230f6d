package gateway

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// What must not pass the gateway's host.
func TestEgressIsClosed(t *testing.T) {
	for _, host := range hosts {
		if !host.ipv6 {
			continue
		}
		t.Run(host.name, func(t *testing.T) {
			w := newWorld(t)
			w.prepare(host.sysctls)
			w.internet.DefaultRoute(hostAddr4, hostAddr6) // to clients and to the LAN
			cfg := w.config()
			cfg.everyForward = host.every
			wire := newWire(t, w.open(cfg))
			for _, f := range families {
				t.Run(f.name, func(t *testing.T) { testClosed(t, w, wire, f, host.name == "a router") })
			}
		})
	}
}

func testClosed(t *testing.T, w *world, wire *wire, f family, router bool) {
	const p = 7000
	any := netip.IPv4Unspecified()
	if f.client.Is6() {
		any = netip.IPv6Unspecified()
	}
	inHost := newInbox(t, w.host, port16(any, p))
	inInternet := newInbox(t, w.internet, port16(f.inet, p))
	inLAN := newInbox(t, w.lan, port16(f.lan, p))
	from := func(src netip.Addr, dst netip.Addr, text string) {
		wire.send(udpPacket(port16(src, p), port16(dst, p), []byte(text)))
	}

	// From clients to the host itself.
	for _, own := range []netip.Addr{f.host, f.pool, f.hostEth1} {
		from(f.client, own, "to the host "+own.String())
	}
	// Under a source that no client has.
	from(f.lan, f.inet, "from the LAN's address")
	from(netip.MustParseAddr(map[bool]string{true: "192.0.2.77", false: "2001:db8:77::1"}[f.client.Is4()]), f.inet, "from nowhere")
	from(f.host, f.inet, "from the host's address")
	// Between clients, past the router.
	from(f.client, f.other, "to a client")
	// An error about nothing: the tracker would let it go under the client's
	// own source.
	errorsSeen := newInboxOf(t, w.internet, map[bool]string{true: "ip4:icmp", false: "ip6:ipv6-icmp"}[f.client.Is4()], f.inet.String())
	stray := udpPacket(port16(f.inet, 1), port16(f.client, 2), []byte("never sent"))
	wire.send(packet.AppendUnreachable(nil, stray, f.client, packet.AdminProhibited))
	// From outside, and from the host, to clients.
	send(t, w.internet, port16(f.client, p), "from the internet")
	send(t, w.lan, port16(f.client, p), "from the LAN")
	send(t, w.host, port16(f.client, p), "from the host")
	// Across the host.
	send(t, w.lan, port16(f.inet, p), "LAN to internet")
	send(t, w.internet, port16(f.lan, p), "internet to LAN")

	// What may pass does, after all that.
	from(f.client, f.inet, "from a client")
	if a := inInternet.waitFrom(t, "from a client"); a.Addr() != f.host {
		t.Errorf("the internet sees %v, want %v", a, f.host)
	}
	send(t, w.internet, port16(f.host, p), "to the host")
	inHost.waitFrom(t, "to the host")
	if router {
		inInternet.waitFrom(t, "LAN to internet")
		inLAN.waitFrom(t, "internet to LAN")
		delete(inInternet.got, "LAN to internet")
		delete(inLAN.got, "internet to LAN")
	}
	time.Sleep(50 * time.Millisecond)
	delete(inInternet.got, "from a client")
	delete(inHost.got, "to the host")
	errorsSeen.mu.Lock()
	for text := range errorsSeen.got {
		if strings.HasSuffix(text, "never sent") {
			t.Error("an ICMP error about nothing has left")
		}
	}
	errorsSeen.mu.Unlock()
	for where, in := range map[string]*inbox{"host": inHost, "internet": inInternet, "LAN": inLAN} {
		in.mu.Lock()
		for text, a := range in.got {
			t.Errorf("the %s got %q from %v", where, text, a)
		}
		in.mu.Unlock()
	}
	wire.mu.Lock()
	defer wire.mu.Unlock()
	for _, b := range wire.got {
		if h, err := packet.Parse(b); err != nil || h.Version == 4 == f.client.Is4() {
			t.Errorf("a client gets %v > %v, protocol %d, %v", h.Src, h.Dst, h.Proto, err)
		}
	}
}
