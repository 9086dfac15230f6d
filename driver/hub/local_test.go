package hub

import (
	"net/netip"
	"testing"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// taker is a Local that takes what is for a port, and remembers it.
type taker struct {
	port uint16
	got  []string
}

func (l *taker) Ends(_ *packet.Packet, h packet.Header) bool { return h.DstPort == l.port }
func (l *taker) Input(pkts []packet.Packet) {
	for _, p := range pkts {
		l.got = append(l.got, describe(p.Data))
	}
}

// A Local is asked about what leaves and what is for the network's own address, with
// or without a tunnel, and about nothing else.
func TestLocal(t *testing.T) {
	for internal, b := range bothBenches(t) {
		local := &taker{port: 1080}
		b.SetLocal(local)
		for i := range own {
			for _, tt := range []struct {
				name    string
				from    string
				src     netip.Addr
				dst     netip.Addr
				port    uint16
				offline bool
				taken   bool
			}{
				{name: "own address", from: "a", src: in2[i], dst: own[i], port: 1080, taken: !internal},
				{name: "own address, unmapped", from: "c", src: inside(4)[i], dst: own[i], port: 1080, taken: !internal},
				{name: "own address without a tunnel", from: "a", src: in2[i], dst: own[i], port: 1080, offline: true, taken: !internal},
				{name: "own address, another port", from: "a", src: in2[i], dst: own[i], port: 1081},
				{name: "internet", from: "a", src: in2[i], dst: web[i], port: 1080, taken: !internal},
				{name: "internet without a tunnel", from: "a", src: in2[i], dst: web[i], port: 1080, offline: true, taken: !internal},
				{name: "sibling", from: "a", src: in2[i], dst: in3[i], port: 1080},
				{name: "another's source", from: "a", src: in3[i], dst: web[i], port: 1080},
				{name: "nobody", from: "a", src: in2[i], dst: inside(99)[i], port: 1080},
			} {
				local.got = nil
				if tt.offline {
					b.SetUplink(nil)
				}
				r := b.from[tt.from]
				r.view, r.memo = nil, memo{}
				r.forward([]packet.Packet{{Data: udp(tt.src, tt.dst, tt.port, "x")}})
				if (len(local.got) == 1) != tt.taken {
					t.Errorf("internal %t: %s: taken %v, want it: %t", internal, tt.name, local.got, tt.taken)
				}
				b.online()
			}
		}
		// Names are the gateway's business.
		local.port = dnsPort
		local.got = nil
		r := b.from["a"]
		r.view, r.memo = nil, memo{}
		r.forward([]packet.Packet{{Data: udp(in2[0], own[0], dnsPort, "x")}})
		if len(local.got) != 0 {
			t.Errorf("it is asked about names: %v", local.got)
		}
	}
}

// Answers go to containers of the exit, and to nobody else.
func TestAnswer(t *testing.T) {
	b := newBench(t, dual())
	other := b.NewExit()
	for _, tt := range []struct {
		exit *Exit
		dst  netip.Addr
		lost uint64
	}{
		{b.Exit, in2[0], 0},
		{b.Exit, in3[1], 0},
		{b.Exit, out2[0], 1}, // not a container's own
		{b.Exit, web[0], 1},
		{other, in2[0], 1},
	} {
		before := b.dropped(packet.DropDestination)
		src := own[0]
		if tt.dst.Is6() {
			src = own[1]
		}
		tt.exit.Answer(0, []packet.Packet{{Data: udp(src, tt.dst, 1080, "x")}})
		if lost := b.dropped(packet.DropDestination) - before; lost != tt.lost {
			t.Errorf("to %v: %d lost, want %d", tt.dst, lost, tt.lost)
		}
	}
}
