package tun

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// router is a namespace that forwards from one device to another, which hands
// out single packets only: what goes in joined is cut again by the kernel.
func router(t *testing.T, out Config) (in, o *Device) {
	t.Helper()
	ns := netlab.New(t).NS("router")
	ns.Forward()
	in = open(t, ns, Config{Name: "in0", Queues: 1})
	out.Name, out.Queues, out.TxQueueLen = "out0", 1, 5000
	o = open(t, ns, out)
	for _, d := range []*Device{in, o} {
		if err := d.SetUp(); err != nil {
			t.Fatal(err)
		}
	}
	l := ns.Iface("out0")
	l.Address(netip.MustParsePrefix("192.0.2.1/24"))
	l.Address(netip.MustParsePrefix("2001:db8::1/64"))
	// The way back, so that no source filter minds.
	l = ns.Iface("in0")
	l.Address(netip.MustParsePrefix("198.51.100.1/24"))
	l.Address(netip.MustParsePrefix("2001:db8:5::1/64"))
	return in, o
}

// readAll reads until n packets for the test's destinations came.
func readAll(t *testing.T, q *Queue, n int) [][]byte {
	t.Helper()
	timeout := time.AfterFunc(5*time.Second, func() { q.dev.Close() })
	defer timeout.Stop()
	var got [][]byte
	pkts := make([]packet.Packet, 64)
	for len(got) < n {
		k, err := q.Read(pkts)
		if err != nil {
			t.Fatalf("after %d packets of %d: %v", len(got), n, err)
		}
		for i := range pkts[:k] {
			h, err := packet.Parse(pkts[i].Data)
			if err != nil {
				t.Fatal(err)
			}
			if h.DstPort != testPort {
				continue // the kernel's own
			}
			pkts[i].CompleteChecksum(h)
			got = append(got, bytes.Clone(pkts[i].Data))
		}
	}
	// A flow's packets in their order; that of the flows is free.
	slices.SortStableFunc(got, func(a, b []byte) int { return cmp.Compare(sourcePort(t, a), sourcePort(t, b)) })
	return got
}

func sourcePort(t *testing.T, b []byte) uint16 {
	h, err := packet.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	return h.SrcPort
}

const testPort = 4433

// flow makes the packets of one flow, complete with checksums.
func flow(v6, tcp bool, sport uint16, sizes []int) [][]byte {
	var out [][]byte
	seq := uint32(0xfffffe00) // wraps
	for i, n := range sizes {
		hdr := 28
		if tcp {
			hdr = 52 // with a timestamp
		}
		if v6 {
			hdr += 20
		}
		b := make([]byte, hdr+n)
		for j := hdr; j < len(b); j++ {
			b[j] = byte(rand.Uint32())
		}
		at, proto := 20, byte(packet.UDP)
		if tcp {
			proto = packet.TCP
		}
		if v6 {
			at = 40
			b[0] = 0x60
			binary.BigEndian.PutUint16(b[4:], uint16(len(b)-40))
			b[6], b[7] = proto, 64
			copy(b[8:], netip.MustParseAddr("2001:db8:5::2").AsSlice())
			copy(b[24:], netip.MustParseAddr("2001:db8::2").AsSlice())
		} else {
			b[0] = 0x45
			binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
			binary.BigEndian.PutUint16(b[4:], uint16(0xfff0+i))
			b[6], b[8], b[9] = 0x40, 64, proto
			copy(b[12:], netip.MustParseAddr("198.51.100.2").AsSlice())
			copy(b[16:], netip.MustParseAddr("192.0.2.2").AsSlice())
			binary.BigEndian.PutUint16(b[10:], ^onesComplement(b[:20]))
		}
		h := b[at:]
		binary.BigEndian.PutUint16(h, sport)
		binary.BigEndian.PutUint16(h[2:], testPort)
		if tcp {
			binary.BigEndian.PutUint32(h[4:], seq)
			binary.BigEndian.PutUint32(h[8:], 77)
			h[12], h[13] = 8<<4, 0x10
			if i == len(sizes)-1 {
				h[13] |= 0x08
			}
			binary.BigEndian.PutUint16(h[14:], 500)
			copy(h[20:], []byte{1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 0, 6})
			seq += uint32(n)
		} else {
			binary.BigEndian.PutUint16(h[4:], uint16(len(h)))
		}
		p := packet.Packet{Data: b}
		hh, err := packet.Parse(b)
		if err != nil {
			panic(err)
		}
		p.SetPartial(hh)
		p.CompleteChecksum(hh)
		out = append(out, b)
	}
	return out
}

func sizesOf(n, size, last int) []int { return append(slices.Repeat([]int{size}, n-1), last) }

// What the writer joins the kernel cuts into what was put in, byte for byte,
// less the hop that it is away.
func TestKernelCutsWhatTheWriterJoins(t *testing.T) {
	in, out := router(t, none)
	before := in.drops.Snapshot()
	for _, c := range []struct {
		v6, tcp bool
		sizes   []int
	}{
		{false, true, sizesOf(40, 1348, 1348)},
		{false, true, sizesOf(40, 1348, 7)},
		{true, true, sizesOf(40, 1348, 1)},
		{false, false, sizesOf(40, 1200, 1200)},
		{true, false, sizesOf(40, 1200, 3)},
		{false, true, sizesOf(64, 100, 100)},
		{true, false, sizesOf(64, 100, 5)},
		{false, true, sizesOf(100, 536, 20)},
		{false, false, []int{100, 100, 101, 99, 99, 99, 500, 1}},
		{false, true, []int{100, 100, 101, 99, 99, 99, 500, 1}},
		{false, true, []int{1}},
		{true, true, sizesOf(7, 1400, 1400)},
	} {
		var batch []packet.Packet
		var want [][]byte
		for sport := range uint16(3) {
			for _, b := range flow(c.v6, c.tcp, 1000+sport, c.sizes) {
				batch = append(batch, packet.Packet{Data: bytes.Clone(b)})
				if !packet.DecrementHopLimit(b) {
					t.Fatal("hop limit")
				}
				want = append(want, b)
			}
		}
		if err := in.Queues()[0].Write(batch); err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, out.Queues()[0], len(want)); !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("%+v: other packets come out", c)
			for i := range got {
				if !bytes.Equal(got[i], want[i]) {
					t.Fatalf("the first is number %d:\n%x\n%x", i, got[i], want[i])
				}
			}
		}
	}
	if after := in.drops.Snapshot(); len(after) != len(before) {
		t.Errorf("dropped: %v", after)
	}
}

// The kernel gets super-packets and not their parts: the writer joins.
func TestWriterJoins(t *testing.T) {
	in, out := router(t, Config{})
	for _, c := range []struct{ v6, tcp bool }{{false, true}, {true, true}, {false, false}, {true, false}} {
		var batch []packet.Packet
		for _, b := range flow(c.v6, c.tcp, 1000, sizesOf(40, 1200, 1200)) {
			batch = append(batch, packet.Packet{Data: b})
		}
		if err := in.Queues()[0].Write(batch); err != nil {
			t.Fatal(err)
		}
		got := readAll(t, out.Queues()[0], 1)
		if len(got) != 1 || len(got[0]) < 40*1200 {
			t.Errorf("%+v: %d packets, the first of %d bytes", c, len(got), len(got[0]))
		}
	}
}

// A kernel that refuses a super-packet gets its parts.
func TestWriterFallsBack(t *testing.T) {
	in, out := router(t, none)
	q := in.Queues()[0]
	refused := 0
	q.w.sys = func(fd uintptr, iov []unix.Iovec) unix.Errno {
		if unsafe.Slice(iov[0].Base, vnetLen)[1] != unix.VIRTIO_NET_HDR_GSO_NONE {
			refused++
			return unix.EINVAL
		}
		return writev(fd, iov)
	}
	for _, tcp := range []bool{true, false} {
		var batch []packet.Packet
		var want [][]byte
		for _, b := range flow(false, tcp, 1000, sizesOf(40, 1200, 1200)) {
			batch = append(batch, packet.Packet{Data: bytes.Clone(b)})
			packet.DecrementHopLimit(b)
			want = append(want, b)
		}
		if err := q.Write(batch); err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, out.Queues()[0], len(want)); !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("tcp=%v: other packets come out", tcp)
		}
		// A super-packet that came as one.
		super := append([]byte(nil), want[0]...)
		for _, b := range want[1:] {
			super = append(super, b[len(b)-1200:]...)
		}
		binary.BigEndian.PutUint16(super[2:], uint16(len(super)))
		super[8]++
		super[10], super[11] = 0, 0
		binary.BigEndian.PutUint16(super[10:], ^onesComplement(super[:20]))
		if tcp {
			super[20+13] |= 0x08
		}
		if err := q.Write([]packet.Packet{{Data: super, Segment: 1200}}); err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, out.Queues()[0], len(want)); !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("tcp=%v: other packets come out of a super-packet", tcp)
		}
	}
	if refused != 4 {
		t.Errorf("refused %d super-packets, want 4", refused)
	}
}

// The kernel cuts a super-packet that is written whole as the splitter does.
func TestKernelCutsAsTheSplitter(t *testing.T) {
	in, out := router(t, none)
	for _, v6 := range []bool{false, true} {
		for _, tcp := range []bool{false, true} {
			for _, flags := range []byte{0x10, 0x18, 0x19, 0x90, 0xd9} { // up to CWR, ECE, ACK, PSH, FIN
				super := flow(v6, tcp, 1000, []int{40000})[0]
				h, err := packet.Parse(super)
				if err != nil {
					t.Fatal(err)
				}
				if tcp {
					super[h.IPLen+13] = flags
				}
				var split packet.Splitter
				split.Reset(&packet.Packet{Data: bytes.Clone(super), Segment: 1348}, h, 0)
				var want [][]byte
				for b := split.Next(); b != nil; b = split.Next() {
					b = bytes.Clone(b)
					packet.DecrementHopLimit(b)
					want = append(want, b)
				}
				if err := in.Queues()[0].Write([]packet.Packet{{Data: super, Segment: 1348}}); err != nil {
					t.Fatal(err)
				}
				got := readAll(t, out.Queues()[0], len(want))
				for i := range want {
					if !bytes.Equal(got[i], want[i]) {
						t.Fatalf("v6=%v tcp=%v flags %x, segment %d:\n%x\n%x", v6, tcp, flags, i, got[i][:80], want[i][:80])
					}
				}
			}
		}
	}
}
