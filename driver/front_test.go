package driver

import (
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/sidecar"
)

// newTestFront makes the front of a network whose gateway is not there.
func newTestFront(t *testing.T, change func(*record)) *front {
	t.Helper()
	d := &Driver{cfg: Config{StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}}
	r := newRecord(t)
	r.Endpoints = nil
	change(r)
	n := d.newNetwork(r)
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := n.makeExits(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.close)
	return n.exits[mainExit].front
}

// syn is the first packet of a connection from a container.
func syn(to string) packet.Packet {
	b := packet.AppendUDP(nil, netip.MustParseAddrPort("172.18.0.2:1000"), netip.MustParseAddrPort(to), make([]byte, 12))
	b[9], b[32], b[33] = packet.TCP, 5<<4, 0x02
	return packet.Packet{Data: b, Flags: packet.Verified}
}

func (f *front) ends(t *testing.T, p packet.Packet) bool {
	t.Helper()
	h, err := packet.Parse(p.Data)
	if err != nil {
		t.Fatal(err)
	}
	return f.Ends(&p, h)
}

// What is for the network's own address is for the proxy or for nobody, however
// connections leave.
func TestFrontEnds(t *testing.T) {
	datagram := packet.Packet{Data: packet.AppendUDP(nil, netip.MustParseAddrPort("172.18.0.2:1000"), netip.MustParseAddrPort("172.18.0.1:20000"), nil)}
	for _, proxy := range []bool{true, false} {
		for _, mode := range []sidecar.TCPMode{sidecar.TCPPacket, sidecar.TCPFlow} {
			f := newTestFront(t, func(r *record) { r.NoProxy, r.TCP = !proxy, mode })
			for what, tt := range map[string]struct {
				p    packet.Packet
				want bool
			}{
				"to the proxy":                  {syn("172.18.0.1:1080"), proxy},
				"to another port":               {syn("172.18.0.1:443"), proxy}, // which it refuses
				"a datagram to the own address": {datagram, proxy},
				"to the internet":               {syn("203.0.113.10:1080"), mode == sidecar.TCPFlow},
			} {
				if got := f.ends(t, tt.p); got != tt.want {
					t.Errorf("proxy %t, tcp=%v: %s: %t, want %t", proxy, mode, what, got, tt.want)
				}
			}
		}
	}
}

// Before the first packet a front costs nothing; it may be closed before and after,
// and more than once.
func TestFrontClose(t *testing.T) {
	before := runtime.NumGoroutine()
	f := newTestFront(t, func(*record) {})
	if n := runtime.NumGoroutine(); n > before { // those of tests before may end now
		t.Errorf("%d goroutines before the first packet", n-before)
	}
	if !f.ends(t, syn("172.18.0.1:1080")) {
		t.Fatal("there is no proxy")
	}
	for range 2 {
		if err := f.close(); err != nil {
			t.Error(err)
		}
	}
	f.Input([]packet.Packet{syn("172.18.0.1:1080")})

	unused := newTestFront(t, func(*record) {})
	if err := unused.close(); err != nil {
		t.Error(err)
	}
	if unused.ends(t, syn("172.18.0.1:1080")) {
		t.Error("a proxy opens after the end")
	}
}
