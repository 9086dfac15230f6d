package gateway

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

func TestRouterAnswersPing(t *testing.T) {
	for _, size := range []int{0, 1, 56, 1272} {
		for _, addrs := range [][2]string{{a4, gw4}, {a6, gw6}} {
			l := newRouterLab(t)
			src, dst := netip.MustParseAddr(addrs[0]), netip.MustParseAddr(addrs[1])
			request := withHops(echoPacket(src, dst, 7, 9, bytes.Repeat([]byte{0xa5}, size)), 1)
			payload := bytes.Clone(request[len(request)-size-4:]) // with id and sequence
			l.a.WritePackets(0, single(request))
			got := l.sa.take()
			if len(got) != 1 {
				t.Fatalf("%d answers to a ping of %d bytes to %s", len(got), size, dst)
			}
			reply := got[0].Data
			h, err := packet.Parse(reply)
			if err != nil || h.Src != dst || h.Dst != src || h.HopLimit != 64 {
				t.Errorf("the reply is from %v to %v, hop limit %d, %v", h.Src, h.Dst, h.HopLimit, err)
			}
			if kind := reply[h.IPLen]; kind != echoReply4 && kind != echoReply6 {
				t.Errorf("the reply has type %d", kind)
			}
			if !checksumsHold(reply) {
				t.Error("the reply's checksum is wrong")
			}
			if !bytes.HasSuffix(reply, payload) {
				t.Error("the reply lacks what the request said")
			}
		}
	}
}

func TestRouterAnswersOnlyWholePings(t *testing.T) {
	fragment := echoPacket(netip.MustParseAddr(a4), netip.MustParseAddr(gw4), 1, 1, make([]byte, 64))
	fragment[6] = 0x20 // more to come
	reply := echoPacket(netip.MustParseAddr(a6), netip.MustParseAddr(gw6), 1, 1, nil)
	reply[40] = echoReply6
	short := ip4(a4, gw4, packet.ICMP, []byte{echoRequest4, 0, 0, 0})
	for name, pkt := range map[string][]byte{"a fragment": fragment, "a reply": reply, "half a header": short} {
		l := newRouterLab(t)
		l.a.WritePackets(0, single(pkt))
		for _, p := range l.sa.take() {
			if h, err := packet.Parse(p.Data); err == nil && (p.Data[h.IPLen] == echoReply4 || p.Data[h.IPLen] == echoReply6) {
				t.Errorf("%s was answered as a ping", name)
			}
		}
		if n := l.drops.Snapshot()["destination"]; n != 1 {
			t.Errorf("%s: %d drops counted", name, n)
		}
	}
}

func TestRouterLimitsAnswers(t *testing.T) {
	l := newRouterLab(t)
	start := time.Now()
	for range 5000 {
		l.a.WritePackets(0, single(udp(a4, "10.0.0.1", "x")))
	}
	most := packet.AnswerBurst + int(time.Since(start)/packet.AnswerInterval) + 1
	if n := len(l.sa.take()); n < packet.AnswerBurst || n > most {
		t.Errorf("%d answers, want %d to %d", n, packet.AnswerBurst, most)
	}
	// One client's flood does not silence the gateway for another.
	l.b.WritePackets(0, single(udp(b4, "10.0.0.1", "x")))
	if n := len(l.sb.take()); n != 1 {
		t.Errorf("the other client got %d answers", n)
	}
}
