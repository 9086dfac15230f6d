package hub

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// Super-packets go to the gateway whole, and packets with the same way stay
// together.
func TestKeepsBatches(t *testing.T) {
	b := newBench(t, dual())
	super := packet.Packet{Data: tcp(netip.AddrPortFrom(in2[0], 9), netip.AddrPortFrom(web[0], 80), make([]byte, 60000)), Segment: 1000, Flags: packet.Partial}
	var pkts []packet.Packet
	for range 10 {
		s := super
		s.Data = bytes.Clone(super.Data)
		pkts = append(pkts, s)
		pkts = append(pkts, single(udp(in2[1], web[1], 80, "x"), udp(in2[0], peer[0], 80, "x"))...)
	}
	pkts = append(pkts, single(udp(in2[0], in3[0], 80, "x"))...)
	pkts = append(pkts, single(udp(in2[0], web[0], 80, "x"))...)
	r := b.from["a"]
	r.queue = 5
	r.forward(pkts)
	if b.sent.calls != 2 || len(b.sent.pkts) != 31 {
		t.Errorf("%d packets left in %d calls, want 31 in 2", len(b.sent.pkts), b.sent.calls)
	}
	if slices.ContainsFunc(b.sent.queues, func(q int) bool { return q != 5 }) {
		t.Errorf("they left on the queues %d, want 5", b.sent.queues)
	}
	for i, p := range b.sent.pkts[:30] {
		if i%3 == 0 && (len(p.Data) != len(super.Data) || p.Segment != super.Segment || p.Flags != super.Flags) {
			t.Errorf("a super-packet of %d bytes left with %d, segments of %d, flags %d", len(super.Data), len(p.Data), p.Segment, p.Flags)
		}
	}
}

func TestLimitsAnswers(t *testing.T) {
	b := newBench(t, dual())
	answered := 0
	start := time.Now()
	for range 3000 {
		if way, _ := b.send("a", udp(in2[0], own[0], 80, "x")); way == "answered" {
			answered++
		}
	}
	most := packet.AnswerBurst + int(time.Since(start)/packet.AnswerInterval) + 1
	if answered < packet.AnswerBurst || answered > most {
		t.Errorf("%d answers, want %d to %d", answered, packet.AnswerBurst, most)
	}
	// One container's flood does not silence the network for another.
	if way, _ := b.send("b", udp(in3[0], own[0], 80, "x")); way != "answered" {
		t.Error("another container gets no answer")
	}
}

// The table may change at any time: the next batch sees it.
func TestForwardFollowsTheTable(t *testing.T) {
	b := newBench(t, dual())
	r := b.from["a"]
	r.forward(single(udp(in2[0], web[0], 80, "x")))
	if err := b.SetOutside("a", mapped(in2[:1], out9[:1])); err != nil {
		t.Fatal(err)
	}
	r.forward(single(udp(in2[0], web[0], 80, "x")))
	b.SetUplink(nil)
	r.forward(single(udp(in2[0], web[0], 80, "x")))
	var got []string
	for _, p := range b.sent.take() {
		got = append(got, describe(p.Data))
	}
	if diff := cmp.Diff([]string{flow(out2[0], web[0], "80"), flow(out9[0], web[0], "80")}, got); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// A gateway with one IP version has no resolver for the other.
func TestGatewayOfOneVersion(t *testing.T) {
	b := newBench(t, dual())
	b.SetUplink(&Uplink{Send: b.sent.Send, Gateway: gateway[:1]})
	if way, is := b.send("a", udp(in2[0], own[0], 53, "x")); way != "gateway" {
		t.Errorf("IPv4: %q %q", way, is)
	}
	if way, is := b.send("a", udp(in2[1], own[1], 53, "x")); way != "answered" {
		t.Errorf("IPv6: %q %q", way, is)
	}
}
