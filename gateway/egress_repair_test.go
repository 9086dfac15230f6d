package gateway

import (
	"strings"
	"testing"
	"time"
)

// Another program that means well, or an operator's mistake, does not end the
// way out.
func TestEgressRepairsItsDevice(t *testing.T) {
	const soon = 2 * time.Second // before the next look that nothing occasions
	w := newWorld(t)
	wire := newWire(t, w.open(w.config()))
	state := func() string { // without what the kernel adds and nobody needs
		return w.run("sh", "-c", "ip -o addr show dev quicvpn-gw; (ip route show dev quicvpn-gw; ip -6 route show dev quicvpn-gw) | sed '/proto kernel/d'")
	}
	before := state()
	repairs := 0
	for _, damage := range []string{
		"ip link set quicvpn-gw down",
		"ip link set quicvpn-gw down; ip link set quicvpn-gw up",
		"ip route flush dev quicvpn-gw",
		"ip -6 route flush dev quicvpn-gw",
		"ip addr flush dev quicvpn-gw",
		"ip -6 addr del fd12::1/128 dev quicvpn-gw",
		"ip route replace 10.91.0.0/16 dev eth1 scope link",
	} {
		t.Run(damage, func(t *testing.T) {
			w.run("sh", "-c", damage)
			within(t, soon, "the repair", func() bool { return state() == before })
			for _, f := range families {
				wire.forget()
				testUDP(t, w, wire, f)
			}
			now := strings.Count(w.log.String(), "is put back")
			if now == repairs {
				t.Error("the log does not tell of it")
			}
			repairs = now
		})
	}
	// Nor does the repair occasion the next.
	time.Sleep(4 * settle)
	if now := strings.Count(w.log.String(), "is put back"); now != repairs {
		t.Errorf("%d repairs without damage", now-repairs)
	}
}
