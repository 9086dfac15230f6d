package netstack

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// An offline is a Stack without a device, and what it sent.
type offline struct {
	*Stack
	drops packet.Drops

	mu  sync.Mutex
	out []packet.Packet
}

func newOffline(t testing.TB, cfg Config) *offline {
	t.Helper()
	o := new(offline)
	cfg.MTU, cfg.Drops = 1400, &o.drops
	cfg.Output = func(pkts []packet.Packet) {
		o.mu.Lock()
		defer o.mu.Unlock()
		for _, p := range pkts {
			p.Data = bytes.Clone(p.Data)
			o.out = append(o.out, p)
		}
	}
	var err error
	if o.Stack, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	})
	return o
}

// sent returns what was sent since the last call.
func (o *offline) sent() []packet.Packet {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := o.out
	o.out = nil
	return out
}

// refused is a Dial that fails.
func refused(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) {
	return nil, syscall.ECONNREFUSED
}

func single(b []byte) packet.Packet { return packet.Packet{Data: b, Flags: packet.Verified} }

func (o *offline) takes(t *testing.T, b []byte) Claim {
	t.Helper()
	h, err := packet.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	return o.Takes(&packet.Packet{Data: b}, h)
}

// withFlags changes the flags of a TCP packet.
func withFlags(b []byte, flags byte) []byte {
	b = bytes.Clone(b)
	h, err := packet.Parse(b)
	if err != nil {
		panic(err)
	}
	b[h.IPLen+13] = flags
	return b
}

func TestTakes(t *testing.T) {
	const ack, synAck, rst = 0x10, 0x12, 0x04
	hold := make(chan struct{})
	o := newOffline(t, Config{Dial: func(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) {
		<-hold
		return nil, syscall.ECONNREFUSED
	}})
	for _, to := range []string{"192.168.1.1", "fd00::1"} {
		first := syn(1000, to)
		for _, tt := range []struct {
			what string
			b    []byte
			want Claim
		}{
			{"a SYN", first, Begins},
			{"an ACK", withFlags(first, ack), Foreign},
			{"a SYN ACK", withFlags(first, synAck), Foreign},
			{"a RST", withFlags(first, rst), Foreign},
			{"UDP", packet.AppendUDP(nil, netip.MustParseAddrPort("10.91.0.5:1"), netip.MustParseAddrPort("192.168.1.1:53"), nil), Foreign},
		} {
			if got := o.takes(t, tt.b); got != tt.want {
				t.Errorf("%s to %s: %v, want %v", tt.what, to, got, tt.want)
			}
		}
		o.Input([]packet.Packet{single(bytes.Clone(first))})
		if got := o.takes(t, withFlags(first, ack)); got != Held {
			t.Errorf("a packet of a flow to %s: %v", to, got)
		}
		if got := o.takes(t, syn(1001, to)); got != Begins {
			t.Errorf("a SYN from another port to %s: %v", to, got)
		}
	}
	if out := o.sent(); len(out) != 0 {
		t.Errorf("%d packets were sent", len(out))
	}
	close(hold)
	within(t, "end", func() bool { return o.takes(t, withFlags(syn(1000, "fd00::1"), ack)) == Foreign })

	// An address that the Stack listens on is its own altogether.
	if _, err := o.Listen(netip.MustParseAddrPort("192.168.1.1:1080")); err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{syn(1000, "192.168.1.1"), withFlags(syn(1, "192.168.1.1"), ack),
		packet.AppendUDP(nil, netip.MustParseAddrPort("10.91.0.5:1"), netip.MustParseAddrPort("192.168.1.1:53"), nil)} {
		if got := o.takes(t, b); got != Held {
			t.Errorf("a packet for the Stack's own address: %v", got)
		}
	}
	for _, bad := range []string{"0.0.0.0:1", "[::]:1", "[::ffff:1.2.3.4]:1", "224.0.0.1:1", "192.168.1.1:1080"} {
		if _, err := o.Listen(netip.MustParseAddrPort(bad)); err == nil {
			t.Errorf("listens on %s", bad)
		}
	}
}

// What comes while there are too many dials is dropped, and one source has no more
// than its part.
func TestDialFlood(t *testing.T) {
	var dials atomic.Int32
	hold := make(chan struct{})
	o := newOffline(t, Config{Dial: func(ctx context.Context, _, _ netip.AddrPort) (net.Conn, error) {
		dials.Add(1)
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return nil, syscall.ECONNREFUSED
	}})
	before := runtime.NumGoroutine()
	for i := range uint16(10_000) {
		o.Input([]packet.Packet{single(syn(1000+i, "192.168.1.1")), single(syn(1000+i, "192.168.1.1"))})
	}
	within(t, "dials", func() bool { return dials.Load() == maxComingFrom })
	if n := runtime.NumGoroutine() - before; n > maxComingFrom+10 {
		t.Errorf("%d goroutines more", n)
	}
	if n := o.drops.Snapshot()["queue-full"]; n != 2*(10_000-maxComingFrom) {
		t.Errorf("%d SYNs were dropped", n)
	}
	for i := range uint16(100) {
		o.Input([]packet.Packet{single(syn(1000+i, "fd00::1"))}) // from another source
	}
	within(t, "dials of another", func() bool { return dials.Load() == maxComingFrom+100 })
	close(hold)
	within(t, "ends", func() bool {
		o.Stack.mu.Lock()
		defer o.Stack.mu.Unlock()
		return o.coming == 0 && len(o.sources) == 0
	})
	within(t, "answers", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.out) == maxComingFrom+100
	})
}

// Nobody is answered whose packet is not as its sender made it.
func TestInputVerifies(t *testing.T) {
	o := newOffline(t, Config{Dial: refused})
	for _, to := range []string{"192.168.1.1", "fd00::1"} {
		good := syn(1000, to)
		h, err := packet.Parse(good)
		if err != nil {
			t.Fatal(err)
		}
		o.Input([]packet.Packet{{Data: bytes.Clone(good)}}) // without a checksum
		if n := o.drops.Snapshot()["malformed"]; n != 1 {
			t.Errorf("%d packets were malformed", n)
		}
		o.drops = packet.Drops{}
		p := packet.Packet{Data: bytes.Clone(good)}
		p.SetPartial(h)
		partial := packet.Packet{Data: bytes.Clone(p.Data), Flags: p.Flags}
		p.CompleteChecksum(h)
		for _, p := range []packet.Packet{p, partial, single(bytes.Clone(good))} {
			o.Input([]packet.Packet{p})
			within(t, "answer", func() bool { return len(o.sent()) == 1 })
		}
	}
}

// ICMP errors are not answers to everything.
func TestUnreachableLimit(t *testing.T) {
	o := newOffline(t, Config{Dial: func(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) {
		return nil, syscall.EHOSTUNREACH
	}})
	for i := range uint16(1000) {
		o.Input([]packet.Packet{single(syn(1000+i, "192.168.1.1"))})
	}
	within(t, "ends", func() bool {
		o.Stack.mu.Lock()
		defer o.Stack.mu.Unlock()
		return o.coming == 0
	})
	out := o.sent()
	if len(out) < packet.AnswerBurst || len(out) > 900 {
		t.Errorf("%d answers", len(out))
	}
	h, err := packet.Parse(out[0].Data)
	if err != nil || h.Proto != packet.ICMP || h.Src.String() != "192.168.1.1" || out[0].Data[h.IPLen] != 3 || out[0].Data[h.IPLen+1] != 1 {
		t.Errorf("answered by % x: %v", out[0].Data, err)
	}
}

// FuzzInput sends packets of any kind, beside connections that are open.
func FuzzInput(f *testing.F) {
	const app = "10.91.0.5:1000"
	o := newOffline(f, Config{Dial: func(_ context.Context, _, to netip.AddrPort) (net.Conn, error) {
		if to.Port()%2 == 0 {
			return nil, syscall.ENETUNREACH
		}
		return newPump(), nil
	}})
	for _, own := range []string{"10.88.0.1:80", "[fd88::1]:80"} {
		if _, err := o.Listen(netip.MustParseAddrPort(own)); err != nil {
			f.Fatal(err)
		}
		if _, err := o.ListenPacket(netip.MustParseAddrPort(own)); err != nil {
			f.Fatal(err)
		}
	}
	for _, to := range []string{"192.168.1.1", "fd00::53", "10.88.0.1", "fd88::1"} {
		f.Add(syn(1000, to), uint8(0), uint16(0))
		f.Add(syn(1000, to), uint8(packet.Verified), uint16(0))
		f.Add(withFlags(syn(1000, to), 0x10), uint8(packet.Verified), uint16(536))
		f.Add(withFlags(syn(1000, to), 0x04), uint8(packet.Verified), uint16(536))
	}
	f.Add(packet.AppendUDP(nil, netip.MustParseAddrPort(app), netip.MustParseAddrPort("10.88.0.1:80"), make([]byte, 100)), uint8(0), uint16(30))
	f.Add(packet.AppendUDP(nil, netip.MustParseAddrPort("[fd12::5]:1"), netip.MustParseAddrPort("[fd88::1]:80"), make([]byte, 100)), uint8(1), uint16(30))
	f.Fuzz(func(t *testing.T, b []byte, flags uint8, segment uint16) {
		if len(b) > 4 && b[0]>>4 == 4 { // most would fail for the length alone
			binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		}
		p := packet.Packet{Data: b, Flags: packet.Flags(flags), Segment: segment}
		if h, err := packet.Parse(b); err == nil {
			o.Takes(&p, h)
		}
		o.Input([]packet.Packet{p})
		for _, p := range o.sent() {
			h, err := packet.Parse(p.Data)
			if err != nil || !p.ChecksumHolds(h) && (h.Proto == packet.TCP || h.Proto == packet.UDP) {
				t.Errorf("left % x: %v", p.Data, err)
			}
		}
	})
}
