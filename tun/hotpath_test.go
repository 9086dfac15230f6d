package tun

import (
	"bytes"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// batches are what a writer meets.
func batches() map[string][][]byte {
	return map[string][][]byte{
		"tcp":   flow(false, true, 1, sizesOf(40, 1300, 100)),
		"tcp6":  flow(true, true, 1, sizesOf(40, 1300, 100)),
		"udp":   flow(false, false, 1, sizesOf(40, 1200, 1200)),
		"alone": {flow(false, true, 1, []int{1})[0], flow(false, false, 1, []int{1})[0]},
	}
}

// sink is a device in a namespace that drops what is written to it.
func sink(tb testing.TB) *Device {
	tb.Helper()
	var d *Device
	err := netlab.New(tb).NS("sink").Do(func() (err error) {
		d, err = Open(Config{Queues: 1})
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { d.Close() })
	if err := d.SetUp(); err != nil {
		tb.Fatal(err)
	}
	return d
}

func TestWriteDoesNotAllocate(t *testing.T) {
	d := sink(t)
	for name, b := range batches() {
		pkts := make([]packet.Packet, len(b))
		if n := testing.AllocsPerRun(50, func() {
			for i := range b {
				pkts[i] = packet.Packet{Data: b[i]}
			}
			if err := d.Queues()[0].Write(pkts); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations a batch", name, n)
		}
	}
	orig := flow(false, true, 1, []int{40000})[0]
	super := bytes.Clone(orig)
	pkts := make([]packet.Packet, 1)
	for _, off := range []bool{false, true} {
		d.offloads.WriteTSO = !off
		if n := testing.AllocsPerRun(50, func() {
			copy(super, orig) // cutting uses it up
			pkts[0] = packet.Packet{Data: super, Segment: 1300, Flags: packet.Partial}
			if err := d.Queues()[0].Write(pkts); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("super-packet, cut: %v: %v allocations", off, n)
		}
	}
	if drops := d.drops.Snapshot(); len(drops) != 0 {
		t.Errorf("dropped %v", drops)
	}
}

// source is a device into which a socket sends datagrams.
func source(tb testing.TB, segment int) (*Device, int) {
	tb.Helper()
	ns := netlab.New(tb).NS("source")
	ns.Sysctl("net.ipv6.conf.default.disable_ipv6", "1") // it would speak up on a new link
	var d *Device
	fd := -1
	if err := ns.Do(func() (err error) {
		if d, err = Open(Config{Queues: 1}); err != nil {
			return err
		}
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { d.Close(); unix.Close(fd) })
	if err := d.SetUp(); err != nil {
		tb.Fatal(err)
	}
	ns.Iface(d.Name()).Address(netip.MustParsePrefix("192.0.2.1/24"))
	if segment > 0 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, segment); err != nil {
			tb.Fatal(err)
		}
	}
	if err := unix.Connect(fd, sockaddr(netip.MustParseAddr("192.0.2.2"))); err != nil {
		tb.Fatal(err)
	}
	return d, fd
}

// drain reads until n datagrams of a size came, of which one call may bring many.
func drain(tb testing.TB, q *Queue, pkts []packet.Packet, n, size int) {
	for n > 0 {
		k, err := q.Read(pkts)
		if err != nil {
			tb.Fatal(err)
		}
		for i := range pkts[:k] {
			if len(pkts[i].Data) == 28+size {
				n--
			}
		}
	}
}

func TestReadDoesNotAllocate(t *testing.T) {
	d, fd := source(t, 0)
	pkts := make([]packet.Packet, 128)
	data := make([]byte, 1000)
	if n := testing.AllocsPerRun(50, func() {
		for range 32 {
			if _, err := unix.Write(fd, data); err != nil {
				t.Fatal(err)
			}
		}
		drain(t, d.Queues()[0], pkts, 32, len(data))
	}); n != 0 {
		t.Errorf("%v allocations for 32 packets", n)
	}
}

// A reader takes what is there in one call, but not more than it has room for.
func TestReadDrains(t *testing.T) {
	d, fd := source(t, 0)
	q := d.Queues()[0]
	send := func(n int) {
		t.Helper()
		for i := range n {
			data := bytes.Repeat([]byte{byte(i)}, 1000+i)
			if _, err := unix.Write(fd, data); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(100)
	pkts := make([]packet.Packet, 60)
	seen := 0
	for _, want := range []int{60, 40} {
		n, err := q.Read(pkts)
		if err != nil || n != want {
			t.Fatalf("%d packets, %v; want %d", n, err, want)
		}
		for _, p := range pkts[:n] {
			if len(p.Data) != 28+1000+seen || p.Data[28] != byte(seen) || p.Data[len(p.Data)-1] != byte(seen) {
				t.Errorf("packet %d: %d bytes, %x", seen, len(p.Data), p.Data[:40])
			}
			if cap(p.Data) != len(p.Data) {
				t.Errorf("packet %d could grow into the next", seen)
			}
			seen++
		}
	}

	// About 512 KB at a time.
	big, fd := source(t, 1400)
	data := make([]byte, 1400*40)
	for range 30 {
		if _, err := unix.Write(fd, data); err != nil {
			t.Fatal(err)
		}
	}
	left := 30
	for left > 0 {
		n, err := big.Queues()[0].Read(pkts)
		total := 0
		for _, p := range pkts[:n] {
			total += len(p.Data)
			if p.Segment != 1400 || p.Flags != packet.Partial {
				t.Errorf("segment %d, flags %b", p.Segment, p.Flags)
			}
		}
		if left -= n; err != nil || total > readBudget+maxPacket || total < readBudget && left > 0 {
			t.Fatalf("%d bytes in a read, %d packets left: %v", total, left, err)
		}
	}
}

// Several goroutines write to one queue: each packet arrives whole.
func TestConcurrentWrites(t *testing.T) {
	in, out := router(t, Config{})
	var wg sync.WaitGroup
	want := 0
	for w := range uint16(8) {
		b := flow(false, false, w, sizesOf(200, 300+int(w), 300+int(w)))
		want += len(b) * 300
		wg.Go(func() {
			for len(b) > 0 {
				var batch []packet.Packet
				for _, d := range b[:10] {
					batch = append(batch, packet.Packet{Data: d})
				}
				if err := in.Queues()[0].Write(batch); err != nil {
					t.Error(err)
				}
				b = b[10:]
			}
		})
	}
	wg.Wait()
	if drops := in.drops.Snapshot(); len(drops) != 0 {
		t.Errorf("dropped %v", drops)
	}
	got := readAll(t, out.Queues()[0], 8*20)
	for _, b := range got {
		if want := 28 + 10*(300+int(sourcePort(t, b))); len(b) != want {
			t.Fatalf("a super-packet of %d bytes, want %d", len(b), want)
		}
	}
}

// FuzzWrite gives the writer whatever a peer may have sent, with and without the
// device's help: nothing panics, and what reaches the kernel is well formed.
func FuzzWrite(f *testing.F) {
	for _, b := range batches() {
		f.Add(b[0], uint16(700), uint8(1), true)
		f.Add(b[0], uint16(0), uint8(0), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, segment uint16, flags uint8, offloads bool) {
		var w writer
		w.init(&Device{offloads: Offloads{WriteTSO: offloads, WriteUSO: offloads}, drops: new(packet.Drops)})
		w.sys = func(_ uintptr, iov []unix.Iovec) unix.Errno {
			v := parseVnet(unsafe.Slice(iov[0].Base, iov[0].Len))
			var data []byte
			for _, i := range iov[1:] {
				data = append(data, unsafe.Slice(i.Base, i.Len)...)
			}
			h, err := packet.Parse(data)
			if err != nil {
				t.Fatalf("writes %x: %v", data, err)
			}
			if v.flags != 0 && (int(v.csumStart) != h.IPLen || int(v.csumStart+v.csumOffset)+2 > h.HeaderLen) {
				t.Fatalf("%+v for %+v", v, h)
			}
			if v.gso != 0 && (!offloads || v.gsoSize == 0 || len(data) <= h.HeaderLen+int(v.gsoSize) || !h.Plain()) {
				t.Fatalf("%+v for %+v", v, h)
			}
			return []unix.Errno{0, unix.EINVAL}[len(data)%2]
		}
		for _, seg := range []uint16{segment, 0} {
			w.out = nil
			for range 4 {
				w.out = append(w.out, packet.Packet{Data: bytes.Clone(b), Segment: seg, Flags: packet.Flags(flags)})
			}
			w.putAll(0)
		}
	})
}

func BenchmarkWrite(b *testing.B) {
	d := sink(b)
	for name, data := range batches() {
		b.Run(name, func(b *testing.B) {
			pkts := make([]packet.Packet, len(data))
			total := 0
			for _, d := range data {
				total += len(d)
			}
			b.SetBytes(int64(total))
			b.ReportAllocs()
			for b.Loop() {
				for i := range data {
					pkts[i] = packet.Packet{Data: data[i]}
				}
				if err := d.Queues()[0].Write(pkts); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRead includes what the socket does to send.
func BenchmarkRead(b *testing.B) {
	for _, segment := range []int{0, 1400} {
		b.Run("segment="+strconv.Itoa(segment), func(b *testing.B) {
			d, fd := source(b, segment)
			pkts := make([]packet.Packet, 128)
			data := make([]byte, 1400*max(1, segment/35))
			b.SetBytes(int64(len(data)) * 32)
			b.ReportAllocs()
			for b.Loop() {
				for range 32 {
					if _, err := unix.Write(fd, data); err != nil {
						b.Fatal(err)
					}
				}
				drain(b, d.Queues()[0], pkts, 32, len(data))
			}
		})
	}
}
