package hub

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

// A batch of packets that is used up and made anew.
type cargo struct {
	orig []packet.Packet
	pkts []packet.Packet
}

func newCargo(pkts ...packet.Packet) *cargo {
	c := &cargo{orig: pkts}
	for _, p := range pkts {
		p.Data = bytes.Clone(p.Data)
		c.pkts = append(c.pkts, p)
	}
	return c
}

// load returns the packets as they were.
func (c *cargo) load() []packet.Packet {
	for i, p := range c.orig {
		data := c.pkts[i].Data[:len(p.Data)]
		copy(data, p.Data)
		c.pkts[i] = packet.Packet{Data: data, Segment: p.Segment, Flags: p.Flags}
	}
	return c.pkts
}

func super(src, dst netip.Addr) packet.Packet {
	return packet.Packet{Data: tcp(netip.AddrPortFrom(src, 9), netip.AddrPortFrom(dst, 80), make([]byte, 30000)), Segment: 1348, Flags: packet.Partial}
}

func TestDoesNotAllocate(t *testing.T) {
	b := newBench(t, dual())
	b.SetUplink(&Uplink{Send: (&quiet{}).Send, Peers: peers, Announced: true, Gateway: gateway})
	r := b.from["a"]
	var out, in []packet.Packet
	for i := range own {
		out = append(out, super(in2[i], in3[i]), super(in2[i], web[i]), super(in2[i], peer[i]))
		out = append(out, single(
			udp(in2[i], in3[i], 80, "x"), udp(in2[i], out3[i], 80, "x"), udp(in2[i], web[i], 80, "x"), udp(in2[i], peer[i], 80, "x"),
			udp(in2[i], own[i], 53, "x"), ping(in2[i], own[i]), // answered by the network
			udp(in2[i], own[i], 80, "x"), udp(in2[i], in9[i], 80, "x"), // refused
			udp(in3[i], web[i], 80, "x"), udp(in2[i], web[i], 80, "x")[:9], // dropped
		)...)
		in = append(in, super(web[i], out2[i]), super(peer[i], in3[i]))
		in = append(in, single(
			udp(web[i], out2[i], 80, "x"), udp(gateway[i], out2[i], 53, "x"),
			icmp(gateway[i], out2[i], 3, 1, udp(out2[i], web[i], 80, "x")),
			udp(in3[i], out2[i], 80, "x"), udp(web[i], out9[i], 80, "x"),
		)...)
	}
	outbound, inbound := newCargo(out...), newCargo(in...)
	if n := testing.AllocsPerRun(200, func() {
		r.forward(outbound.load())
		b.WritePackets(1, inbound.load())
	}); n != 0 {
		t.Errorf("%v allocations a round", n)
	}
}

// A hundred containers cost little, also while all of them send to one.
func TestMemory(t *testing.T) {
	const containers, writes, size = 100, 20, 40 * 1300
	const idleLimit, limit = 40 << 20, 120 << 20
	n := newNetwork(t, netlab.New(t), dual())
	ns := n.lab.NS("all")
	ns.Sysctl("net.ipv6.conf.default.disable_ipv6", "1") // a link without an address
	before := inUse()
	var senders []net.Conn
	for i := range containers {
		name, ip := fmt.Sprintf("c%d", i), inside(2 + i)[0]
		dev := n.deviceNamed(ns, name, 2)
		if err := errors.Join(dev.SetUp(), n.Attach(Port{ID: name, Device: dev, Addrs: mapped(inside(2+i), nil)})); err != nil {
			t.Fatal(err)
		}
		ns.Iface(name).Address(netip.PrefixFrom(ip, 32))
		senders = append(senders, sender(t, ns, name, ip, inside(2)[0]))
	}
	idle := inUse() - before

	var wg sync.WaitGroup
	for _, c := range senders[1:] {
		wg.Go(func() {
			data := make([]byte, size)
			for range writes {
				if _, err := c.Write(data); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var most, arrived uint64
	var m runtime.MemStats
	eventually(t, func() error {
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapInuse+m.StackInuse-before)
		if _, arrived = received(t, container{NS: ns}, "c0"); arrived < (containers-1)*writes*size {
			return fmt.Errorf("%d bytes came to the one container", arrived)
		}
		return nil
	})
	wg.Wait()
	t.Logf("MB: %d idle, %d at most while %d MB came to one", idle>>20, most>>20, arrived>>20)
	if idle > idleLimit || most > limit {
		t.Errorf("%d containers take %d bytes, %d under load", containers, idle, most)
	}
	eventually(t, func() error { // the readers are yet to see that nothing is left
		if after := inUse() - before; after > idleLimit {
			return fmt.Errorf("%d containers take %d bytes afterwards", containers, after)
		}
		return nil
	})
}

// sender is a socket that sends super-packets through one of several devices.
func sender(t *testing.T, ns *netlab.NS, device string, from, to netip.Addr) (c net.Conn) {
	t.Helper()
	if err := ns.Do(func() (err error) {
		d := net.Dialer{
			LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
			Control: func(_, _ string, raw syscall.RawConn) error {
				var err error
				return errors.Join(raw.Control(func(fd uintptr) {
					err = errors.Join(unix.BindToDevice(int(fd), device), unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1300))
				}), err)
			},
		}
		c, err = d.Dial("udp", netip.AddrPortFrom(to, 9).String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// inUse returns the bytes that the program uses for itself.
func inUse() uint64 {
	runtime.GC()
	runtime.GC() // pools let go of what they hold at the second one
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}

// Whatever comes out of the tunnel: nothing panics, and what gets through is for
// a container, from somebody else, and as right or wrong as it was.
func FuzzWritePackets(f *testing.F) {
	b := newBench(f, dual())
	for i := range own {
		for _, pkt := range [][]byte{
			udp(web[i], out2[i], 80, "payload"), udp(peer[i], in3[i], 80, "x"), udp(gateway[i], out2[i], 53, "answer"),
			icmp(gateway[i], out2[i], 3, 1, udp(out2[i], web[i], 80, "x")), icmp(gateway[i], out2[i], 3, 1, udp(out2[i], gateway[i], 53, "x")),
			super(web[i], out3[i]).Data, laterFragment(gateway[i], out2[i]), udp(in2[i], out2[i], 80, "spoofed"), ping(web[i], own[i]),
		} {
			f.Add(pkt, uint16(0), uint8(0))
			f.Add(pkt, uint16(1000), uint8(packet.Partial))
		}
	}
	containers := slices.Concat(in2, in3, inside(4))
	f.Fuzz(func(t *testing.T, data []byte, segment uint16, flags uint8) {
		table := b.table.Load().views[b.Exit]
		p := packet.Packet{Data: bytes.Clone(data), Segment: segment, Flags: packet.Flags(flags)}
		if to := table.accept(&p, &memo{}, false); to != nil {
			h, err := packet.Parse(p.Data)
			if err != nil || p.Check(h) != nil {
				t.Fatalf("lets in %x: %v", p.Data, err)
			}
			was, _ := packet.Parse(data)
			if table.inside[h.Dst].port != to || !slices.Contains(containers, h.Dst) {
				t.Errorf("gives %v a packet for %v", to.ID, h.Dst)
			}
			if !unicast(was.Src) || table.isLocal(was.Src) {
				t.Errorf("lets in a packet from %v", was.Src)
			}
			if h.Src != was.Src && h.Src != own[0] && h.Src != own[1] {
				t.Errorf("%v becomes %v", was.Src, h.Src)
			}
		}
		b.WritePackets(int(segment), []packet.Packet{
			{Data: bytes.Clone(data), Segment: segment, Flags: packet.Flags(flags)},
			{Data: bytes.Clone(data)},
		})
	})
}

// BenchmarkForward is what the hub adds to a read and a write.
func BenchmarkForward(b *testing.B) {
	for _, c := range []struct {
		name string
		dst  []netip.Addr
	}{{"gateway", web}, {"peer", peer}} {
		for i, version := range []string{"IPv4", "IPv6"} {
			b.Run(c.name+"/"+version, func(b *testing.B) {
				n := newBench(b, dual())
				n.SetUplink(&Uplink{Send: (&quiet{}).Send, Peers: peers, Announced: true, Gateway: gateway})
				var pkts []packet.Packet
				for range 64 {
					pkts = append(pkts, single(udp(in2[i], c.dst[i], 80, "x"))...)
				}
				cargo := newCargo(pkts...)
				b.ReportAllocs()
				for b.Loop() {
					n.from["a"].forward(cargo.load())
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(pkts)), "ns/packet")
			})
		}
	}
}
