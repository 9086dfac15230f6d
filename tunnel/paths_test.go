package tunnel

import (
	"encoding/json"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/packet"
)

var pathsEpoch = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func TestPaths(t *testing.T) {
	var p Paths
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	far := Path{RTT: 400 * time.Millisecond, Send: 25e6, Receive: 1e6}
	if got := p.get(a, pathsEpoch); got != (Path{}) {
		t.Errorf("of nothing it knows %+v", got)
	}
	p.learn(a, Path{RTT: time.Second}, pathsEpoch)
	p.learn(a, far, pathsEpoch)
	p.learn(b, Path{RTT: time.Millisecond}, pathsEpoch.Add(time.Hour))
	text, err := json.Marshal(&p)
	if err != nil {
		t.Fatal(err)
	}
	const want = `[{"peer":"192.0.2.1","rtt_ns":400000000,"send_bytes_per_second":25000000,"receive_bytes_per_second":1000000,"learned":"2026-05-01T12:00:00Z"},` +
		`{"peer":"2001:db8::1","rtt_ns":1000000,"learned":"2026-05-01T13:00:00Z"}]`
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("JSON (-want +got):\n%s", diff)
	}
	var again Paths
	if err := json.Unmarshal(text, &again); err != nil {
		t.Fatal(err)
	}
	if got := again.get(a, pathsEpoch.Add(pathLifetime)); got != far {
		t.Errorf("got %+v, want %+v", got, far)
	}
	if got := again.get(a, pathsEpoch.Add(pathLifetime+time.Second)); got != (Path{}) {
		t.Errorf("after its lifetime it is %+v", got)
	}
}

func TestPathsAreBounded(t *testing.T) {
	var p Paths
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
	for i := range 2 * maxPaths {
		p.learn(addr(i), Path{RTT: time.Second}, pathsEpoch.Add(time.Duration(i)*time.Second))
	}
	if len(p.known) != maxPaths {
		t.Errorf("%d paths, want %d", len(p.known), maxPaths)
	}
	if got := p.get(addr(maxPaths-1), pathsEpoch); got.RTT != 0 {
		t.Error("an old one is there")
	}
	if got := p.get(addr(maxPaths), pathsEpoch); got.RTT == 0 {
		t.Error("a newer one is not there")
	}
}

func TestDamagedPaths(t *testing.T) {
	for _, text := range []string{
		``, `{}`, `[{}]`, `[{"peer":"192.0.2.1","rtt_ns":0}]`, `[{"peer":"192.0.2.1","rtt_ns":-5}]`,
		`[{"peer":"","rtt_ns":5}]`, `[{"peer":"::ffff:192.0.2.1","rtt_ns":5}]`, `[{"peer":"192.0.2.1","rtt_ns":60000000001}]`,
		`[{"peer":"192.0.2.1","rtt_ns":5,"send_bytes_per_second":-1}]`, `[{"peer":"192.0.2.1","rtt_ns":5,"send_bytes_per_second":1e13}]`,
		`[{"peer":"192.0.2.1","rtt_ns":5,"receive_bytes_per_second":1e999}]`, `[{"peer":"192.0.2.1","rtt_ns":5}`,
	} {
		var p Paths
		p.learn(client4, Path{RTT: time.Second}, pathsEpoch)
		if err := json.Unmarshal([]byte(text), &p); err == nil {
			t.Errorf("%s was taken", text)
		}
		if len(p.known) != 1 {
			t.Errorf("%s: %d paths are left", text, len(p.known))
		}
	}
}

func FuzzPaths(f *testing.F) {
	f.Add([]byte(`[{"peer":"192.0.2.1","rtt_ns":400000000,"send_bytes_per_second":25000000,"learned":"2026-05-01T12:00:00Z"}]`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var p Paths
		if p.UnmarshalJSON(text) != nil {
			return
		}
		for a := range p.known {
			path := p.get(a, time.Now())
			if w := path.streamWindow(); w < firstStreamWindow || w > wideConnectionWindow {
				t.Errorf("%+v gives a window of %d", path, w)
			}
		}
		again, err := json.Marshal(&p)
		if err != nil {
			t.Fatal(err)
		}
		if err := new(Paths).UnmarshalJSON(again); err != nil {
			t.Errorf("%s: %v", again, err)
		}
	})
}

// farPath forwards UDP to an address, each packet a while later.
func farPath(t *testing.T, to netip.AddrPort, oneWay time.Duration) netip.AddrPort {
	t.Helper()
	listen := func() *net.UDPConn {
		c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		c.SetReadBuffer(4 << 20)
		return c
	}
	front, back := listen(), listen()
	clients := make(chan netip.AddrPort, 1)
	type late struct {
		b  []byte
		at time.Time
	}
	// carry hands on what comes from one socket by another.
	carry := func(from, by *net.UDPConn, dst func(src netip.AddrPort) netip.AddrPort) (wait func()) {
		way, done := make(chan late, 4096), make(chan struct{})
		var target netip.AddrPort
		go func() {
			defer close(way)
			for {
				b := make([]byte, 2000)
				n, src, err := from.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				if !target.IsValid() {
					target = dst(src)
				}
				way <- late{b[:n], time.Now().Add(oneWay)}
			}
		}()
		go func() {
			defer close(done)
			for p := range way {
				time.Sleep(time.Until(p.at))
				by.WriteToUDPAddrPort(p.b, target)
			}
		}()
		return func() { <-done }
	}
	there := carry(front, back, func(src netip.AddrPort) netip.AddrPort { clients <- src; return to })
	home := carry(back, front, func(netip.AddrPort) netip.AddrPort { return <-clients })
	t.Cleanup(func() {
		front.Close()
		back.Close()
		there()
		home()
	})
	return addrPort(front.LocalAddr())
}

// bulk sends TCP packets for as long as the other end has got n of them.
func bulk(t *testing.T, from *Session, at *collector, n int) {
	t.Helper()
	src, dst := far4, client4
	if from.client {
		src, dst = client4, far4
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		at.mu.Lock()
		got := len(at.pkts)
		at.mu.Unlock()
		if got >= n {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d packets arrived", got, n)
		}
		for range 4 {
			from.Send(0, []packet.Packet{{Data: tcpPacket(src, dst, 1, 20<<10), Segment: 1000}}, nil)
		}
	}
}

// Both ends learn of the path, and start from there the next time.
func TestPathIsRemembered(t *testing.T) {
	const rtt = 100 * time.Millisecond
	g := startGateway(t, ServerConfig{})
	var paths Paths
	loopback := netip.MustParseAddr("127.0.0.1")

	d := g.dialer(t)
	d.Paths = &paths
	client := dial(t, d, farPath(t, g.Addr(), rtt/2))
	server := <-g.serve
	if client.learner.saved != (Path{}) || server.learner.saved != (Path{}) {
		t.Errorf("at first the client knows %+v, the gateway %+v", client.learner.saved, server.learner.saved)
	}
	atClient, atServer := receive(t, client), receive(t, server)
	bulk(t, client, atServer, 50)
	bulk(t, server, atClient, 50)
	for _, s := range []*Session{client, server} {
		if n := s.steering.Snapshot(); n == nil || n.ResumeTried {
			t.Errorf("without a saved path: %+v", n)
		}
		s.Close("")
	}
	for name, p := range map[string]*Paths{"client": &paths, "gateway": &g.paths} {
		got := p.get(loopback, time.Now())
		if got.RTT < rtt || got.RTT > 3*rtt || got.Receive < 50<<10 {
			t.Errorf("the %s has learned %+v", name, got)
		}
		// Not on a noisy machine, and not of so little data: what it takes.
		got.RTT, got.Send = rtt, 20e6
		p.learn(loopback, got, time.Now())
	}

	client = dial(t, d, farPath(t, g.Addr(), rtt/2))
	server = <-g.serve
	atClient, atServer = receive(t, client), receive(t, server)
	bulk(t, client, atServer, 100)
	bulk(t, server, atClient, 100)
	for name, s := range map[string]*Session{"client": client, "gateway": server} {
		if n := s.steering.Snapshot(); n == nil || !n.ResumeTried {
			t.Errorf("the %s did not start from what it knew: %+v", name, n)
		}
	}
}
