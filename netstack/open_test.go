package netstack

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// An app is the other end of a flow of an offline Stack, made by hand.
type app struct {
	o        *offline
	port     uint16
	to       string
	seq, ack uint32 // the next of its own, and of the Stack's
}

// segment returns a packet of the app's.
func (a *app) segment(flags byte, payload []byte) []byte {
	b := withFlags(syn(a.port, a.to), flags)
	h, err := packet.Parse(b)
	if err != nil {
		panic(err)
	}
	binary.BigEndian.PutUint32(b[h.IPLen+4:], a.seq)
	binary.BigEndian.PutUint32(b[h.IPLen+8:], a.ack)
	b = append(b, payload...)
	if h.Version == 4 {
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	} else {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-h.IPLen))
	}
	return b
}

const synFlag, ackFlag = 0x02, 0x10

// open does the handshake.
func (o *offline) open(t testing.TB, port uint16, to string) *app {
	t.Helper()
	a := &app{o: o, port: port, to: to, seq: 1}
	o.sent()
	o.Input([]packet.Packet{single(a.segment(synFlag, nil))})
	within(t, "answer", func() bool {
		for _, p := range o.sent() {
			h, err := packet.Parse(p.Data)
			if err != nil {
				t.Fatal(err)
			}
			if h.DstPort == port { // of other flows there may be late ones
				if p.Data[h.IPLen+13] != synFlag|ackFlag {
					t.Fatalf("a SYN is answered by % x", p.Data)
				}
				a.ack = binary.BigEndian.Uint32(p.Data[h.IPLen+4:]) + 1
				return true
			}
		}
		return false
	})
	a.seq = 2
	o.Input([]packet.Packet{single(a.segment(ackFlag, nil))})
	return a
}

// A quiet has nothing to say, and takes all.
type quiet struct{ *pump }

func (q *quiet) Read([]byte) (int, error)    { <-q.over; return 0, net.ErrClosed }
func (q *quiet) Write(b []byte) (int, error) { return len(b), nil }

func dialQuiet(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) {
	return &quiet{newPump()}, nil
}

func BenchmarkTakes(b *testing.B) {
	o := newOffline(b, Config{Dial: dialQuiet})
	a := o.open(b, 1000, "192.168.1.1")
	p := single(a.segment(ackFlag, nil))
	h, err := packet.Parse(p.Data)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if o.Takes(&p, h) != Held {
			b.Fatal("not held")
		}
	}
}

// FuzzSegment sends segments of any kind within flows that are open.
func FuzzSegment(f *testing.F) {
	o := newOffline(f, Config{Dial: dialQuiet})
	for _, flags := range []byte{ackFlag, ackFlag | 0x01, 0x04, synFlag, synFlag | ackFlag, 0xff, 0} {
		f.Add(flags, uint8(0x50), int32(0), int32(0), []byte("hello"), uint16(0), false)
		f.Add(flags, uint8(0x80), int32(-1), int32(1<<20), make([]byte, 3000), uint16(1000), true)
	}
	// A block of SACK, and timestamps.
	f.Add(byte(ackFlag), uint8(0x80), int32(0), int32(-1), []byte{1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 9}, uint16(0), false)
	f.Add(byte(ackFlag), uint8(0x80), int32(0), int32(0), []byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 9}, uint16(0), true)
	port := uint16(1000)
	var flows [2]*app
	f.Fuzz(func(t *testing.T, flags, offset byte, seq, ack int32, payload []byte, segment uint16, v6 bool) {
		if len(payload) > 60_000 {
			return
		}
		i := 0
		to := "192.168.1.1"
		if v6 {
			i, to = 1, "fd00::1"
		}
		if flows[i] == nil || o.takes(t, flows[i].segment(ackFlag, nil)) != Held {
			port++
			flows[i] = o.open(t, port, to)
		}
		a := *flows[i]
		a.seq += uint32(seq)
		a.ack += uint32(ack)
		p := packet.Packet{Data: a.segment(flags, payload), Flags: packet.Verified, Segment: segment}
		at := 20
		if v6 {
			at = 40
		}
		p.Data[at+12] = offset
		o.Input([]packet.Packet{p})
		for _, p := range o.sent() {
			if h, err := packet.Parse(p.Data); err != nil || !p.ChecksumHolds(h) {
				t.Errorf("left % x: %v", p.Data, err)
			}
		}
	})
}
