package hub

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// Addresses of both IP versions.
var (
	in2, in3, in9    = inside(2), inside(3), inside(9)
	out2, out3, out9 = outside(1, 2), outside(1, 3), outside(1, 9)
	web              = addrs("203.0.113.10", "2001:db8:3::10")
	peer             = addrs("172.19.0.2", "fd19::2")
	peers            = []netip.Prefix{netip.MustParsePrefix("172.19.0.0/16"), netip.MustParsePrefix("fd19::/64")}
)

// A bench is a network with containers whose kernels take what they get: a and b
// with addresses of the block, c without.
type bench struct {
	*network
	sent *recorder
	from map[string]*reader // each sends as a container would
}

func newBench(t testing.TB, cfg Config) *bench {
	t.Helper()
	b := &bench{network: newNetwork(t, netlab.New(t), cfg), sent: &recorder{}, from: make(map[string]*reader)}
	b.online()
	for id, ips := range map[string][]Addr{"a": mapped(in2, out2), "b": mapped(in3, out3), "c": mapped(inside(4), nil)} {
		ns := b.lab.NS(id)
		ns.Sysctl("net.ipv6.conf.default.disable_ipv6", "1") // it would speak up on a new link
		dev := b.device(ns, 2)
		if err := dev.SetUp(); err != nil {
			t.Fatal(err)
		}
		if err := b.Attach(Port{ID: id, Device: dev, Addrs: ips}); err != nil {
			t.Fatal(err)
		}
		b.from[id] = &reader{hub: b.Hub, port: b.ports[id]}
	}
	return b
}

// bothBenches returns an ordinary and an internal one.
func bothBenches(t testing.TB) map[bool]*bench {
	internal := dual()
	internal.Internal = true
	return map[bool]*bench{false: newBench(t, dual()), true: newBench(t, internal)}
}

// online gives the network its uplink.
func (b *bench) online() {
	b.SetUplink(&Uplink{Send: b.sent.Send, Peers: peers, Announced: true, Gateway: gateway})
}

// since returns what was counted since before.
func since(before, now map[string]uint64) map[string]uint64 {
	for why, n := range before {
		if now[why] -= n; now[why] == 0 {
			delete(now, why)
		}
	}
	return now
}

// send routes one packet of a container and says what became of it: where it
// goes, what it is then, or which error answers it.
func (b *bench) send(id string, pkt []byte) (way, is string) {
	r := b.from[id]
	r.view, r.memo, r.out[0] = b.table.Load().views[r.port.Exit], memo{}, packet.Packet{}
	p := packet.Packet{Data: pkt}
	w := r.route(&p)
	switch {
	case w.up:
		return "gateway", describe(p.Data)
	case w.port != nil:
		return w.port.ID, describe(p.Data)
	case r.out[0].Data != nil:
		return "answered", describe(r.out[0].Data)
	}
	return "", ""
}

func TestFromContainer(t *testing.T) {
	benches := bothBenches(t)
	for i, version := range []string{"IPv4", "IPv6"} {
		// What an error is called.
		prohibited, unreachable := " icmp 3/13", " icmp 3/1"
		reply := " icmp 0/0"
		if i == 1 {
			prohibited, unreachable = " icmp 1/1", " icmp 1/3"
			reply = " icmp 129/0"
		}
		about := func(src, dst netip.Addr, port string) string { return " about " + flow(src, dst, port) }
		broadcast := addrs("172.18.255.255", "ff02::1")[i]
		network := addrs("172.18.0.0", "ff0e::1")[i]
		loopback := addrs("127.0.0.1", "::1")[i]
		linkLocal := addrs("169.254.169.254", "fe80::1")[i]
		everyone := addrs("255.255.255.255", "::")[i]
		for _, tt := range []struct {
			name     string
			from     string
			pkt      []byte
			way, is  string
			dropped  packet.Drop
			internal bool
			offline  bool
		}{
			{name: "sibling", from: "a", pkt: udp(in2[i], in3[i], 80, "x"), way: "b", is: flow(in2[i], in3[i], "80")},
			{name: "sibling without address outside", from: "a", pkt: udp(in2[i], inside(4)[i], 80, "x"), way: "c", is: flow(in2[i], inside(4)[i], "80")},
			{name: "sibling, DNS", from: "a", pkt: udp(in2[i], in3[i], 53, "x"), way: "b", is: flow(in2[i], in3[i], "53")},
			{name: "sibling on an internal network", from: "a", pkt: udp(in2[i], in3[i], 80, "x"), internal: true, way: "b", is: flow(in2[i], in3[i], "80")},
			{name: "sibling without a tunnel", from: "a", pkt: udp(in2[i], in3[i], 80, "x"), offline: true, way: "b", is: flow(in2[i], in3[i], "80")},
			{name: "sibling's address outside", from: "a", pkt: udp(in2[i], out3[i], 80, "x"), way: "b", is: flow(out2[i], in3[i], "80")},
			{name: "the same without one's own", from: "c", pkt: udp(inside(4)[i], out3[i], 80, "x"), dropped: packet.DropUnmapped},

			{name: "internet", from: "a", pkt: udp(in2[i], web[i], 80, "x"), way: "gateway", is: flow(out2[i], web[i], "80")},
			{name: "internet, DNS", from: "a", pkt: udp(in2[i], web[i], 53, "x"), way: "gateway", is: flow(out2[i], web[i], "53")},
			{name: "peer", from: "a", pkt: udp(in2[i], peer[i], 80, "x"), way: "gateway", is: flow(in2[i], peer[i], "80")},
			{name: "peer, unmapped", from: "c", pkt: udp(inside(4)[i], peer[i], 80, "x"), way: "gateway", is: flow(inside(4)[i], peer[i], "80")},
			{name: "nobody's address of the block", from: "a", pkt: udp(in2[i], out9[i], 80, "x"), way: "gateway", is: flow(out2[i], out9[i], "80")},
			{name: "internet, unmapped", from: "c", pkt: udp(inside(4)[i], web[i], 80, "x"), dropped: packet.DropUnmapped},
			{name: "internet without a tunnel", from: "a", pkt: udp(in2[i], web[i], 80, "x"), offline: true, dropped: packet.DropNoSession},
			{name: "internet from an internal network", from: "a", pkt: udp(in2[i], web[i], 80, "x"), internal: true, way: "answered",
				is: own[i].String() + " > " + in2[i].String() + prohibited + about(in2[i], web[i], "80"), dropped: packet.DropDestination},

			{name: "own address, ping", from: "a", pkt: ping(in2[i], own[i]), way: "a", is: own[i].String() + " > " + in2[i].String() + reply},
			{name: "own address, ping without a tunnel", from: "a", pkt: ping(in2[i], own[i]), offline: true, way: "a", is: own[i].String() + " > " + in2[i].String() + reply},
			{name: "own address, ping on an internal network", from: "a", pkt: ping(in2[i], own[i]), internal: true, way: "a", is: own[i].String() + " > " + in2[i].String() + reply},
			{name: "own address, DNS", from: "a", pkt: udp(in2[i], own[i], 53, "x"), way: "gateway", is: flow(out2[i], gateway[i], "53")},
			{name: "own address, DNS by TCP", from: "a", pkt: tcp(netip.AddrPortFrom(in2[i], 9), netip.AddrPortFrom(own[i], 53), nil), way: "gateway", is: flow(out2[i], gateway[i], "53")},
			{name: "own address, DNS, unmapped", from: "c", pkt: udp(inside(4)[i], own[i], 53, "x"), dropped: packet.DropUnmapped},
			{name: "own address, DNS without a tunnel", from: "a", pkt: udp(in2[i], own[i], 53, "x"), offline: true, dropped: packet.DropNoSession},
			{name: "own address, DNS on an internal network", from: "a", pkt: udp(in2[i], own[i], 53, "x"), internal: true, way: "answered",
				is: own[i].String() + " > " + in2[i].String() + prohibited + about(in2[i], own[i], "53"), dropped: packet.DropDestination},
			{name: "own address, another port", from: "a", pkt: udp(in2[i], own[i], 80, "x"), way: "answered",
				is: own[i].String() + " > " + in2[i].String() + prohibited + about(in2[i], own[i], "80"), dropped: packet.DropDestination},
			{name: "own address, another port without a tunnel", from: "a", pkt: udp(in2[i], own[i], 80, "x"), offline: true, way: "answered",
				is: own[i].String() + " > " + in2[i].String() + prohibited + about(in2[i], own[i], "80"), dropped: packet.DropDestination},
			{name: "own address, an error", from: "a", pkt: icmp(in2[i], own[i], 3, 1, udp(own[i], in2[i], 53, "x")), dropped: packet.DropDestination},
			{name: "the gateway's address", from: "a", pkt: udp(in2[i], gateway[i], 80, "x"), way: "gateway", is: flow(out2[i], gateway[i], "80")},
			{name: "the gateway's address, ping", from: "a", pkt: icmp(in2[i], gateway[i], 8, 128, nil), way: "gateway", is: out2[i].String() + " > " + gateway[i].String() + " icmp " + []string{"8/0", "128/0"}[i]},
			{name: "the gateway's address, DNS", from: "a", pkt: udp(in2[i], gateway[i], 53, "x"), way: "answered",
				is: own[i].String() + " > " + in2[i].String() + prohibited + about(in2[i], gateway[i], "53"), dropped: packet.DropDestination},

			{name: "nobody's", from: "a", pkt: udp(in2[i], in9[i], 80, "x"), way: "answered",
				is: own[i].String() + " > " + in2[i].String() + unreachable + about(in2[i], in9[i], "80"), dropped: packet.DropDestination},
			{name: "broadcast", from: "a", pkt: udp(in2[i], broadcast, 80, "x"), dropped: packet.DropDestination},
			{name: "the subnet itself", from: "a", pkt: udp(in2[i], network, 80, "x"), dropped: packet.DropDestination},
			{name: "everyone", from: "a", pkt: udp(in2[i], everyone, 80, "x"), dropped: packet.DropDestination},
			{name: "loopback", from: "a", pkt: udp(in2[i], loopback, 80, "x"), dropped: packet.DropDestination},
			// The gateway judges those of IPv4: name servers may be among them.
			{name: "link-local", from: "a", pkt: udp(in2[i], linkLocal, 53, "x"), way: []string{"gateway", ""}[i], is: []string{flow(out2[i], linkLocal, "53"), ""}[i], dropped: packet.DropDestination},

			{name: "sibling's source", from: "a", pkt: udp(in3[i], web[i], 80, "x"), dropped: packet.DropSource},
			{name: "sibling's source to a sibling", from: "a", pkt: udp(in3[i], inside(4)[i], 80, "x"), dropped: packet.DropSource},
			{name: "nobody's source", from: "a", pkt: udp(in9[i], in3[i], 80, "x"), dropped: packet.DropSource},
			{name: "own address outside as source", from: "a", pkt: udp(out2[i], web[i], 80, "x"), dropped: packet.DropSource},
			{name: "the network's own source", from: "a", pkt: ping(own[i], in3[i]), dropped: packet.DropSource},
			{name: "source of the internet", from: "a", pkt: udp(web[i], in3[i], 80, "x"), dropped: packet.DropSource},
			{name: "link-local source", from: "a", pkt: udp(linkLocal, in3[i], 80, "x"), dropped: packet.DropSource},
			{name: "spoofed ping", from: "a", pkt: ping(in3[i], own[i]), dropped: packet.DropSource},

			{name: "half a packet", from: "a", pkt: udp(in2[i], web[i], 80, "x")[:27], dropped: packet.DropMalformed},
			{name: "nothing", from: "a", pkt: []byte{}, dropped: packet.DropMalformed},
		} {
			t.Run(version+"/"+tt.name, func(t *testing.T) {
				b := benches[tt.internal]
				b.online()
				if tt.offline {
					b.SetUplink(nil)
				}
				before := b.drops.Snapshot()
				want := map[string]uint64{}
				if tt.way == "" || tt.way == "answered" {
					want[tt.dropped.String()] = 1
				}
				way, is := b.send(tt.from, tt.pkt)
				if way != tt.way || is != tt.is {
					t.Errorf("goes to %q as %q, want %q as %q", way, is, tt.way, tt.is)
				}
				if way != "" && way != "answered" && !checksumsHold(tt.pkt) {
					t.Error("its checksums are wrong")
				}
				if diff := cmp.Diff(want, since(before, b.drops.Snapshot())); diff != "" {
					t.Errorf("drops (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// flow is what describe says of a packet of TCP or UDP.
func flow(src, dst netip.Addr, port string) string {
	return src.String() + " > " + dst.String() + ":" + port
}

func TestFromTunnel(t *testing.T) {
	benches := bothBenches(t)
	for i, version := range []string{"IPv4", "IPv6"} {
		unreachable := []string{" icmp 3/0", " icmp 1/0"}[i]
		fromPort := func(src, dst netip.Addr, port uint16) []byte {
			return udpPacket(netip.AddrPortFrom(src, port), netip.AddrPortFrom(dst, 999), "answer")
		}
		linkLocal := addrs("169.254.1.1", "fe80::1")[i]
		multicast := addrs("224.0.0.1", "ff02::1")[i]
		loopback := addrs("127.0.0.1", "::1")[i]
		later := laterFragment(gateway[i], out2[i])
		for _, tt := range []struct {
			name     string
			pkt      []byte
			segment  uint16
			to, is   string
			dropped  packet.Drop
			internal bool
			quiet    bool // not announced
			trusted  bool
		}{
			{name: "for an address outside", pkt: fromPort(web[i], out2[i], 80), to: "a", is: flow(web[i], in2[i], "999")},
			{name: "from a peer for an address outside", pkt: fromPort(peer[i], out3[i], 80), to: "b", is: flow(peer[i], in3[i], "999")},
			{name: "from a peer", pkt: fromPort(peer[i], in2[i], 80), to: "a", is: flow(peer[i], in2[i], "999")},
			{name: "from a peer for one that is not mapped", pkt: fromPort(peer[i], inside(4)[i], 80), to: "c", is: flow(peer[i], inside(4)[i], "999")},
			{name: "from a peer, not announced", pkt: fromPort(peer[i], in2[i], 80), quiet: true, dropped: packet.DropDestination},
			{name: "from the internet for an address inside", pkt: fromPort(web[i], in2[i], 80), dropped: packet.DropDestination},
			{name: "for nobody outside", pkt: fromPort(web[i], out9[i], 80), dropped: packet.DropDestination},
			{name: "for nobody inside", pkt: fromPort(peer[i], in9[i], 80), dropped: packet.DropDestination},
			{name: "for the network's own address", pkt: ping(peer[i], own[i]), dropped: packet.DropDestination},
			{name: "for many", pkt: fromPort(web[i], multicast, 80), dropped: packet.DropDestination},
			{name: "to an internal network", pkt: fromPort(web[i], out2[i], 80), internal: true, dropped: packet.DropDestination},

			{name: "from the container itself", pkt: fromPort(in2[i], out2[i], 80), dropped: packet.DropSource},
			{name: "from its own address outside", pkt: fromPort(out2[i], out2[i], 80), dropped: packet.DropSource},
			{name: "from a sibling", pkt: fromPort(in3[i], out2[i], 80), dropped: packet.DropSource},
			{name: "from a sibling's address outside", pkt: fromPort(out3[i], out2[i], 80), dropped: packet.DropSource},
			{name: "from nobody in the subnet", pkt: fromPort(in9[i], out2[i], 80), dropped: packet.DropSource},
			{name: "from the network's own address", pkt: fromPort(own[i], out2[i], 53), dropped: packet.DropSource},
			{name: "from a link-local address", pkt: fromPort(linkLocal, out2[i], 53), to: []string{"a", ""}[i], is: []string{flow(linkLocal, in2[i], "999"), ""}[i], dropped: packet.DropSource},
			{name: "from loopback", pkt: fromPort(loopback, out2[i], 80), dropped: packet.DropSource},
			{name: "from many", pkt: fromPort(multicast, out2[i], 80), dropped: packet.DropSource},

			{name: "the resolver's answer", pkt: fromPort(gateway[i], out2[i], 53), to: "a", is: flow(own[i], in2[i], "999")},
			{name: "the resolver's answer, unmapped", pkt: fromPort(gateway[i], in2[i], 53), to: "a", is: flow(own[i], in2[i], "999")},
			{name: "the rest of it", pkt: later, to: "a", is: flow(own[i], in2[i], "0")},
			{name: "the gateway's other ports", pkt: fromPort(gateway[i], out2[i], 80), to: "a", is: flow(gateway[i], in2[i], "999")},
			{name: "another's resolver", pkt: fromPort(web[i], out2[i], 53), to: "a", is: flow(web[i], in2[i], "999")},
			{name: "error about a question to the resolver", pkt: icmp(gateway[i], out2[i], 3, 1, udp(out2[i], gateway[i], 53, "x")), to: "a",
				is: own[i].String() + " > " + in2[i].String() + unreachable + " about " + flow(in2[i], own[i], "53")},
			{name: "error about another packet", pkt: icmp(gateway[i], out2[i], 3, 1, udp(out2[i], web[i], 53, "x")), to: "a",
				is: gateway[i].String() + " > " + in2[i].String() + unreachable + " about " + flow(in2[i], web[i], "53")},
			{name: "error of the session's", pkt: icmp(gateway[i], out2[i], 3, 1, udp(out2[i], web[i], 80, "x")), trusted: true, to: "a",
				is: gateway[i].String() + " > " + in2[i].String() + unreachable + " about " + flow(in2[i], web[i], "80")},
			{name: "error of the session's, unmapped", pkt: icmp(gateway[i], in2[i], 3, 1, udp(in2[i], peer[i], 80, "x")), trusted: true, quiet: true, to: "a",
				is: gateway[i].String() + " > " + in2[i].String() + unreachable + " about " + flow(in2[i], peer[i], "80")},
			{name: "error about a peer's", pkt: icmp(gateway[i], in2[i], 3, 1, udp(in2[i], peer[i], 80, "x")), to: "a",
				is: gateway[i].String() + " > " + in2[i].String() + unreachable + " about " + flow(in2[i], peer[i], "80")},

			{name: "half a packet", pkt: fromPort(web[i], out2[i], 80)[:27], dropped: packet.DropMalformed},
			{name: "nothing", pkt: []byte{}, dropped: packet.DropMalformed},
			{name: "a super-packet of tiny segments", pkt: fromPort(web[i], out2[i], 80), segment: 1, dropped: packet.DropMalformed},
		} {
			t.Run(version+"/"+tt.name, func(t *testing.T) {
				b := benches[tt.internal]
				b.online()
				if tt.quiet {
					b.SetUplink(&Uplink{Peers: peers, Gateway: gateway})
				}
				before := b.drops.Snapshot()
				want := map[string]uint64{}
				if tt.to == "" {
					want[tt.dropped.String()] = 1
				}
				p := packet.Packet{Data: tt.pkt, Segment: tt.segment}
				to, is := "", ""
				if port := b.table.Load().views[b.Exit].accept(&p, &memo{}, tt.trusted); port != nil {
					to, is = port.ID, describe(p.Data)
					if h, err := packet.Parse(p.Data); err != nil || h.FragmentOffset == 0 && !checksumsHold(p.Data) {
						t.Error("its checksums are wrong")
					}
				}
				if to != tt.to || is != tt.is {
					t.Errorf("goes to %q as %q, want %q as %q", to, is, tt.to, tt.is)
				}
				if diff := cmp.Diff(want, since(before, b.drops.Snapshot())); diff != "" {
					t.Errorf("drops (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// laterFragment is the second part of a datagram.
func laterFragment(src, dst netip.Addr) []byte {
	if src.Is6() {
		return ipPacket(src, dst, 44, append([]byte{packet.UDP, 0, 0, 8 << 3, 0, 0, 0, 1}, "more"...))
	}
	b := ipPacket(src, dst, packet.UDP, []byte("more"))
	b[6], b[7] = 0, 8
	b[10], b[11] = 0, 0
	sum := ^onesSum(b[:20], 0)
	b[10], b[11] = byte(sum>>8), byte(sum)
	return b
}

// Two exits may lead to gateways whose blocks are the same.
func TestExits(t *testing.T) {
	b := newBench(t, dual())
	other, sent := b.NewExit(), &recorder{}
	other.SetUplink(&Uplink{Send: sent.Send, Gateway: gateway})
	ns := b.lab.NS("d")
	ns.Sysctl("net.ipv6.conf.default.disable_ipv6", "1") // it would speak up on a new link
	dev := b.device(ns, 2)
	if err := dev.SetUp(); err != nil {
		t.Fatal(err)
	}
	in5 := inside(5)
	if err := b.Attach(Port{ID: "d", Device: dev, Addrs: mapped(in5, out2), Exit: other}); err != nil {
		t.Fatal(err)
	}
	b.from["d"] = &reader{hub: b.Hub, port: b.ports["d"]}

	for id, in := range map[string][]netip.Addr{"a": in2, "d": in5} {
		if to, is := b.send(id, udp(in[0], web[0], 80, "x")); to != "gateway" || !strings.HasPrefix(is, out2[0].String()) {
			t.Errorf("%s sends to %q as %q, want the gateway to see %v", id, to, is, out2[0])
		}
	}
	for id, exit := range map[string]*Exit{"a": b.Exit, "d": other} {
		view := b.table.Load().views[exit]
		p := packet.Packet{Data: udp(web[0], out2[0], 80, "x")}
		if port := view.accept(&p, &memo{}, false); port == nil || port.ID != id {
			t.Errorf("an answer comes to %v, want %s", port, id)
		}
		// Not even a peer reaches a container by an exit that is not its own.
		p = packet.Packet{Data: udp(peers[0].Addr().Next(), map[string]netip.Addr{"a": in5[0], "d": in2[0]}[id], 80, "x")}
		if port := view.accept(&p, &memo{}, false); port != nil {
			t.Errorf("by the exit of %s a packet comes to %s", id, port.ID)
		}
	}
	b.SetUplink(nil)
	if to, _ := b.send("a", udp(in2[0], web[0], 80, "x")); to == "gateway" {
		t.Error("without its own uplink a container has another's")
	}
	if err := New(dual()).Attach(Port{ID: "e", Device: dev, Addrs: mapped(inside(6), nil), Exit: other}); err == nil {
		t.Error("an exit of another hub is taken")
	}
}
