package netlab

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestCapture(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	// Not connected, so that the ICMP answers of ports that nobody listens on are
	// no errors of the next packet.
	pc, err := top.Client.ListenPacket("udp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	zone := strconv.Itoa(top.ClientIf.Index)
	send := func(to string, packets int) {
		t.Helper()
		end := netip.MustParseAddrPort(strings.ReplaceAll(to, "%eth0", "%"+zone))
		for range packets {
			if _, err := pc.WriteTo([]byte("hello"), net.UDPAddrFromAddrPort(end)); err != nil {
				t.Errorf("send to %s: %v", to, err)
			}
		}
	}
	tunnel4 := netip.MustParseAddrPort("198.51.100.2:443")
	tunnel6 := netip.MustParseAddrPort("[2001:db8:2::2]:443")
	for _, tt := range []struct {
		name    string
		do      func()
		want    Traffic
		problem string
	}{
		{"nothing", func() {}, Traffic{}, "no packet of the tunnel"},
		{"tunnel", func() { send(tunnel4.String(), 3); send(tunnel6.String(), 2) }, Traffic{Tunnel: 5}, ""},
		{"other port of the gateway", func() { send("198.51.100.2:444", 1) }, Traffic{Clear: 1}, "UDP 192.0.2.2"},
		{"other port of the gateway by IPv6", func() { send("[2001:db8:2::2]:444", 1) }, Traffic{Clear: 1}, "[2001:db8:2::2]:444"},
		{"same port elsewhere", func() { send("203.0.113.10:443", 2) }, Traffic{Clear: 2}, "> 203.0.113.10:443"},
		{"neighbour", func() { send("192.0.2.1:9", 1); send("[2001:db8:1::1]:9", 1) }, Traffic{}, "no packet of the tunnel"},
		{"neighbour's resolver", func() { send("192.0.2.1:53", 1) }, Traffic{DNS: 1}, "1 of port 53"},
		{"resolver", func() { send("203.0.113.10:53", 1) }, Traffic{Clear: 1, DNS: 1}, ":53"},
		{"multicast", func() { send("[ff02::1%eth0]:9", 1); send("224.0.0.9:9", 1) }, Traffic{}, "no packet"},
		{"multicast beyond the link", func() { send("239.1.2.3:9", 1) }, Traffic{Clear: 1}, "239.1.2.3"},
		{"ping", func() {
			if _, err := top.Client.Ping(ctx, Ping{To: ServerAddr4}); err != nil {
				t.Error(err)
			}
		}, Traffic{Clear: 1}, "ICMP 192.0.2.2:0 > 203.0.113.10:0"},
	} {
		c := top.ClientIf.Capture(tunnel4, tunnel6)
		tt.do()
		got := c.Traffic()
		samples := strings.Join(got.Samples, ", ")
		if got.Tunnel != tt.want.Tunnel || got.Clear != tt.want.Clear || got.DNS != tt.want.DNS || got.Lost != 0 {
			t.Errorf("%s: %d tunnel, %d clear, %d DNS, %d lost, want %+v; %s",
				tt.name, got.Tunnel, got.Clear, got.DNS, got.Lost, tt.want, samples)
		}
		if p := got.Problem(); (p == "") != (tt.problem == "") || !strings.Contains(p, tt.problem) {
			t.Errorf("%s: problem %q, want %q in it", tt.name, p, tt.problem)
		}
	}
}

// TestCaptureClear watches a link that has neighbours on it: of what is not the
// tunnel's it counts what it was told to.
func TestCaptureClear(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	server := netip.MustParseAddr("192.0.2.1")
	c := top.ClientIf.CaptureClear(func(src, dst netip.Addr) bool { return dst == server },
		netip.AddrPortFrom(GatewayAddr4, 443))
	if _, err := top.Client.Ping(ctx, Ping{To: server, Count: 3, Interval: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	if _, err := top.Client.Ping(ctx, Ping{To: ServerAddr4}); err != nil {
		t.Fatal(err)
	}
	if got := c.Traffic(); got.Clear != 3 || got.Tunnel != 0 || len(got.Samples) != 3 {
		t.Errorf("saw %+v, want 3 packets in clear", got)
	}
}

func TestCaptureSurvivesTheLinkAndCountsWhatItLost(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	c := top.ClientIf.Capture(netip.AddrPortFrom(GatewayAddr4, 443))
	top.ClientIf.Down()
	top.ClientIf.Up()
	top.Client.DefaultRoute(netip.MustParseAddr("192.0.2.1"))
	top.Internet.ServeHTTP(80)
	if err := top.Client.WaitReady(ctx, netip.AddrPortFrom(ServerAddr4, 80)); err != nil {
		t.Fatal(err)
	}
	first := c.Traffic()
	if first.Clear < 2 || first.Lost != 0 {
		t.Errorf("saw %+v, want the packets of a TCP connection", first)
	}

	// Far more than the buffer holds: every packet is clear or lost.
	conn, err := top.Client.DialContext(ctx, "udp", "203.0.113.10:9")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var sent uint64
	for start := time.Now(); sent < 60000 && time.Since(start) < 5*time.Second; {
		if _, err := conn.Write([]byte("hello")); err == nil {
			sent++
		}
	}
	second := c.Traffic()
	if got := second.Clear + second.Lost - first.Clear; got < sent {
		t.Errorf("%d clear or lost, want at least the %d sent", got, sent)
	}
	if second.Lost == 0 {
		t.Errorf("%d sent and none lost: the buffer holds more than this test thinks", sent)
	}
	if again := c.Traffic(); again.Lost != second.Lost || again.Clear < second.Clear {
		t.Errorf("counts went from %+v to %+v", second, again)
	}
}

func TestCaptureSeesTheGatewaysAnswers(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	for _, addr := range []netip.Addr{GatewayAddr4, GatewayAddr6} {
		end := netip.AddrPortFrom(addr, 7)
		pc, err := top.Gateway.ListenPacket("udp", end.String())
		if err != nil {
			t.Fatal(err)
		}
		defer pc.Close()
		c := top.ClientIf.Capture(end)
		conn, err := top.Client.DialContext(ctx, "udp", end.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		buf := make([]byte, 10)
		if _, err := conn.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		_, from, err := pc.ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pc.WriteTo([]byte("pong"), from); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(buf); err != nil {
			t.Fatal(err)
		}
		if got := c.Traffic(); got.Tunnel != 2 || got.Clear != 0 {
			t.Errorf("%s: saw %+v, want 2 packets of the tunnel", end, got)
		}
	}
}

// TestCaptureKnowsErrorsAboutTheTunnel has the gateway send to a port that the
// client does not listen on: the client's kernel answers with ICMP.
func TestCaptureKnowsErrorsAboutTheTunnel(t *testing.T) {
	top := NewTopology(t, LinkConfig{})
	for _, tt := range []struct {
		gateway, client netip.Addr
		port            uint16
		tunnel, clear   uint64
	}{
		{GatewayAddr4, netip.MustParseAddr("192.0.2.2"), 443, 1, 0},
		{GatewayAddr6, netip.MustParseAddr("2001:db8:1::2"), 443, 1, 0},
		{GatewayAddr4, netip.MustParseAddr("192.0.2.2"), 444, 0, 1},
		{GatewayAddr6, netip.MustParseAddr("2001:db8:1::2"), 444, 0, 1},
	} {
		c := top.ClientIf.Capture(netip.AddrPortFrom(tt.gateway, 443))
		pc, err := top.Gateway.ListenPacket("udp", netip.AddrPortFrom(tt.gateway, tt.port).String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pc.WriteTo([]byte("late"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(tt.client, 9))); err != nil {
			t.Fatal(err)
		}
		defer pc.Close()
		// The kernel answers on the spot: a moment later all has been seen.
		time.Sleep(50 * time.Millisecond)
		got := c.Traffic()
		if got.Tunnel != tt.tunnel || got.Clear != tt.clear {
			t.Errorf("from %s port %d: saw %+v, want %d of the tunnel and %d clear", tt.gateway, tt.port, got, tt.tunnel, tt.clear)
		}
	}
}
