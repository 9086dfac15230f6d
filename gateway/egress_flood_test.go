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

// A host of containers has a limit for all its addresses together, which holds
// nobody else up, and ends with its block.
func TestEgressLimitsBlocks(t *testing.T) {
	w := newWorld(t)
	e := w.open(w.config())
	wire := newWire(t, e)
	host := Client{Addr4: addr("10.91.0.7"), Addr6: addr("fd12::7"), Block4: prefix("10.91.9.0/24"), Block6: prefix("fd12::900/120")}
	e.admit(host)
	e.admit(host) // again, as after an outage
	for i, f := range families {
		t.Run(f.name, func(t *testing.T) {
			block := []netip.Prefix{host.Block4, host.Block6}[i]
			server := port16(f.inet, 53)
			in := newInbox(t, w.internet, server)
			var sources []netip.Addr
			for src := block.Addr(); len(sources) <= maxBlockConns/maxConns; src = src.Next() {
				sources = append(sources, src)
				for n := range maxConns {
					wire.send(udpPacket(port16(src, uint16(20000+n)), server, []byte("flood")))
				}
			}
			within(t, patience, "another client's packet", func() bool {
				wire.send(udpPacket(port16(f.client, 20000), server, []byte("other")))
				_, ok := in.from("other")
				return ok
			})
			n := 0
			for _, src := range sources {
				n += w.connections(src)
			}
			if n != maxBlockConns {
				t.Errorf("a flood of %d addresses got %d connections, want %d", len(sources), n, maxBlockConns)
			}

			// The rules come back with the block in them.
			w.run("nft", "flush", "ruleset")
			e.refresh(false)
			set := fmt.Sprintf("elements = { %v }", block.Addr())
			if rules := w.run("nft", "list", "ruleset"); !strings.Contains(rules, set) {
				t.Errorf("no %q in the rules:\n%s", set, rules)
			}
		})
	}
	// A single client in what was a block.
	e.admit(Client{Addr4: addr("10.91.9.4"), Addr6: addr("fd12::904")})
	if rules := w.run("nft", "list", "ruleset"); strings.Contains(rules, "elements = { 10.91.9.0 }") || strings.Contains(rules, "elements = { fd12::900 }") {
		t.Errorf("the block is counted still:\n%s", rules)
	}
	// Another program takes the rules away: the next block brings them back.
	w.run("nft", "flush", "ruleset")
	e.admit(host)
	if rules := w.run("nft", "list", "ruleset"); !strings.Contains(rules, "10.91.9.0") || !strings.Contains(rules, "masquerade") {
		t.Errorf("the rules are not back:\n%s", rules)
	}
}
