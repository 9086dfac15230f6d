package gateway

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/vishvananda/netlink"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A client that opens connections without end gets no further than its limit,
// and all others go on. What it had goes on, too.
func TestEgressLimitsConnections(t *testing.T) {
	w := newWorld(t)
	wire := newWire(t, w.open(w.config()))
	for i, f := range families {
		t.Run(f.name, func(t *testing.T) {
			server, other := port16(f.inet, 53), f.client.Next()
			in := newInbox(t, w.internet, server)
			first := port16(f.client, 20000)
			wire.send(udpPacket(first, server, []byte("first")))
			from := in.waitFrom(t, "first")
			// One connection, however many packets it has before an answer.
			for range 2 * maxConns {
				wire.send(udpPacket(first, server, []byte("again")))
			}
			for n := range maxConns + 1000 {
				wire.send(udpPacket(port16(f.client, uint16(20001+n)), server, fmt.Appendf(nil, "flood %d", n)))
			}
			within(t, patience, "another client's packet", func() bool {
				wire.send(udpPacket(port16(other, 20000), server, []byte("other")))
				_, ok := in.from("other")
				return ok
			})
			if n := w.connections(f.client); n != maxConns {
				t.Errorf("a flood got %d connections, want %d", n, maxConns)
			}
			if _, err := in.WriteTo([]byte("answer"), net.UDPAddrFromAddrPort(from)); err != nil {
				t.Fatal(err)
			}
			wire.wait("the answer", is(packet.UDP, server, first))
			wire.send(udpPacket(first, server, []byte("more")))
			in.waitFrom(t, "more")
			if rules := w.run("nft", "list", "ruleset"); strings.Count(rules, "counter packets 1001 ") != i+1 {
				t.Errorf("what was refused is not counted:\n%s", rules)
			}

			// When its connections are over, there is room for others.
			if err := w.host.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
				t.Fatal(err)
			}
			within(t, patience, "forgetting the client", func() bool {
				return !strings.Contains(w.run("nft", "list", "ruleset"), f.client.String()+" ct count")
			})
			wire.send(udpPacket(first, server, []byte("afterwards")))
			in.waitFrom(t, "afterwards")
		})
	}
}

// A kernel without the module says so when the rules are loaded.
func TestEgressWithoutConnlimit(t *testing.T) {
	w := newWorld(t)
	e := w.open(w.config())
	lacking := &expr.Match{Name: "nowhere", Info: new(xt.Unknown)} // not there
	if err := e.ns.do(func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.fw.limit = lacking
		return e.installFirewall(e.open)
	}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(w.log.String(), "modprobe nft_connlimit") {
		t.Error("the log does not tell")
	}
	wire := newWire(t, e)
	for _, f := range families {
		testUDP(t, w, wire, f)
	}
	w.run("nft", "flush", "ruleset")
	w.inet.Address(netip.MustParsePrefix("203.0.113.77/24")) // an occasion to look
	within(t, patience, "repair", func() bool { return strings.Contains(w.run("nft", "list", "ruleset"), "masquerade") })
	time.Sleep(4 * settle)
	if n := strings.Count(w.log.String(), "modprobe"); n != 1 {
		t.Errorf("the log tells %d times", n)
	}
}

// connections returns how many the host tracks that a client has opened.
func (w *world) connections(client netip.Addr) (n int) {
	w.t.Helper()
	family := netlink.InetFamily(familyOf(client))
	if err := w.host.Do(func() error {
		flows, err := listDump(func() ([]*netlink.ConntrackFlow, error) {
			return netlink.ConntrackTableList(netlink.ConntrackTable, family)
		})
		for _, f := range flows {
			if f.Forward.SrcIP.Equal(client.AsSlice()) {
				n++
			}
		}
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	return n
}
