package tunnel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// socketPair is two namespaces with a link between them, and their addresses.
type socketPair struct {
	lab    *netlab.Lab
	a, b   *netlab.NS
	ia, ib *netlab.Iface
}

var (
	addrA4, addrB4 = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	addrA6, addrB6 = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
)

func newSocketPair(t testing.TB) *socketPair {
	t.Helper()
	noLeaks(t)
	p := &socketPair{lab: netlab.New(t)}
	p.a, p.b = p.lab.NS("a"), p.lab.NS("b")
	p.ia, p.ib = p.lab.Link(p.a, p.b, netlab.LinkConfig{
		A: netlab.End{Addresses: []netip.Prefix{netip.PrefixFrom(addrA4, 24), netip.PrefixFrom(addrA6, 64)}},
		B: netlab.End{Addresses: []netip.Prefix{netip.PrefixFrom(addrB4, 24), netip.PrefixFrom(addrB6, 64)}},
	})
	return p
}

// noLeaks checks, after all else is cleaned up, that no goroutine is left.
func noLeaks(t testing.TB) {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
}

// openSocket opens a socket in a namespace, until the test ends.
func openSocket(t testing.TB, ns *netlab.NS, cfg socketConfig) *socket {
	t.Helper()
	var s *socket
	if err := ns.Do(func() (err error) { s, err = listenUDP(cfg); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

func listenAt(addr netip.Addr) socketConfig { return socketConfig{Listen: netip.AddrPortFrom(addr, 0)} }

// socketPort is the way to a socket at an address of its namespace.
func socketPort(s *socket, addr netip.Addr) *net.UDPAddr {
	port := s.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	return net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, port))
}

// segmentOOB is the control message for a segment size.
func segmentOOB(size int) []byte {
	b := make([]byte, unix.CmsgSpace(2))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(b[unix.CmsgLen(0):], uint16(size))
	return b
}

// tosOOB is the control message for the traffic class of one packet.
func tosOOB(is6 bool, tos byte) []byte {
	b := make([]byte, unix.CmsgSpace(4))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = unix.IPPROTO_IP, unix.IP_TOS
	if is6 {
		h.Level, h.Type = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
	}
	h.SetLen(unix.CmsgLen(4))
	binary.NativeEndian.PutUint32(b[unix.CmsgLen(0):], uint32(tos))
	return b
}

// batch is room for messages as quic-go has it.
func batch(n int) []ipv4.Message {
	ms := make([]ipv4.Message, n)
	for i := range ms {
		ms[i] = ipv4.Message{Buffers: [][]byte{make([]byte, 1452)}, OOB: make([]byte, 128)}
	}
	return ms
}

// receivePackets reads n packets, within ten seconds.
func receivePackets(t testing.TB, s *socket, n int) (packets [][]byte) {
	t.Helper()
	if err := s.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	ms := batch(8)
	for len(packets) < n {
		got, err := s.ReadBatch(ms, 0)
		if err != nil {
			t.Fatalf("after %d of %d packets: %v", len(packets), n, err)
		}
		for _, m := range ms[:got] {
			packets = append(packets, append([]byte(nil), m.Buffers[0][:m.N]...))
		}
	}
	return packets
}

// patience is how long tests wait for what must happen; machines may be busy. It is
// shorter than what ends a session in the end.
const patience = idleTimeout - 5*time.Second

// eventually waits until something is so.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// A series of writes of all kinds arrives as the packets that they consist of,
// in order, whatever is merged.
func TestSocketOrder(t *testing.T) {
	for _, cfg := range []socketConfig{{}, {DisableGSO: true}, {DisableGRO: true}} {
		t.Run(fmt.Sprintf("gso=%v gro=%v", !cfg.DisableGSO, !cfg.DisableGRO), func(t *testing.T) {
			p := newSocketPair(t)
			cfg.Listen = netip.AddrPortFrom(addrA4, 0)
			from := openSocket(t, p.a, cfg)
			cfg.Listen = netip.AddrPortFrom(addrB4, 0)
			to := []*socket{openSocket(t, p.b, cfg), openSocket(t, p.b, cfg)}

			rnd := rand.New(rand.NewPCG(7, 7))
			want := make([][][]byte, len(to))
			dst, seg := 0, 1200
			for range 400 {
				if rnd.IntN(8) == 0 {
					dst = rnd.IntN(len(to))
				}
				if rnd.IntN(8) == 0 {
					seg = 1100 + rnd.IntN(300)
				}
				size, oob := 1+rnd.IntN(seg), []byte(nil)
				switch rnd.IntN(4) {
				case 0, 1:
					size, oob = seg*(1+rnd.IntN(16)), segmentOOB(seg)
				case 2:
					size, oob = seg*rnd.IntN(10)+1+rnd.IntN(seg), segmentOOB(seg)
				}
				b := make([]byte, size)
				for i := range b {
					b[i] = byte(rnd.Uint32())
				}
				n, oobn, err := from.WriteMsgUDP(b, oob, socketPort(to[dst], addrB4))
				if err != nil || n != len(b) || oobn != len(oob) {
					t.Fatalf("write: %d, %d, %v", n, oobn, err)
				}
				if oob == nil {
					seg := len(b)
					want[dst] = append(want[dst], append([]byte(nil), b[:seg]...))
				} else {
					for i := 0; i < len(b); i += seg {
						want[dst] = append(want[dst], append([]byte(nil), b[i:min(i+seg, len(b))]...))
					}
				}
				clear(b) // it is the caller's again
				clear(oob)
			}
			for i, s := range to {
				got := receivePackets(t, s, len(want[i]))
				if !slices.EqualFunc(want[i], got, bytes.Equal) {
					t.Fatalf("packets for socket %d differ", i)
				}
			}
			st := from.Stats()
			if cfg.DisableGSO != (st.Merged == 0) {
				t.Errorf("%d of 400 writes were merged", st.Merged)
			}
			if st.SendLost+st.SendTooBig+st.GSORefused != 0 {
				t.Errorf("stats %+v", st)
			}
			rx := to[0].Stats()
			if rx.Segments != uint64(len(want[0])) {
				t.Errorf("%d segments counted, %d came", rx.Segments, len(want[0]))
			}
			if !cfg.DisableGRO && !cfg.DisableGSO && rx.Receives*4 > rx.Segments {
				t.Errorf("%d packets took %d calls", rx.Segments, rx.Receives)
			}
		})
	}
}

// What is held goes out though nothing is written after it.
func TestSocketIdle(t *testing.T) {
	p := newSocketPair(t)
	a, b := openSocket(t, p.a, listenAt(addrA4)), openSocket(t, p.b, listenAt(addrB4))
	to := socketPort(b, addrB4)
	var worst time.Duration
	for range 50 {
		start := time.Now()
		if _, _, err := a.WriteMsgUDP(make([]byte, 2400), segmentOOB(1200), to); err != nil {
			t.Fatal(err)
		}
		receivePackets(t, b, 2)
		worst = max(worst, time.Since(start))
	}
	if worst > 500*time.Millisecond {
		t.Errorf("took up to %v", worst)
	}
}

// Close sends what is held: a CONNECTION_CLOSE behind it would be no use if it
// overtook.
func TestSocketCloseFlushes(t *testing.T) {
	p := newSocketPair(t)
	b := openSocket(t, p.b, listenAt(addrB4))
	for range 20 {
		a := openSocket(t, p.a, listenAt(addrA4))
		if _, _, err := a.WriteMsgUDP(make([]byte, 3600), segmentOOB(1200), socketPort(b, addrB4)); err != nil {
			t.Fatal(err)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		receivePackets(t, b, 3)
	}
}

func TestSocketClosed(t *testing.T) {
	noLeaks(t)
	s, err := listenUDP(listenAt(netip.MustParseAddr("127.0.0.1")))
	if err != nil {
		t.Fatal(err)
	}
	to := s.LocalAddr().(*net.UDPAddr)
	read := make(chan error)
	go func() {
		for {
			if _, err := s.ReadBatch(batch(8), 0); err != nil {
				read <- err
				return
			}
		}
	}()
	wrote := make(chan error)
	for range 4 {
		go func() {
			for {
				if _, _, err := s.WriteMsgUDP(make([]byte, 2400), segmentOOB(1200), to); err != nil {
					wrote <- err
					return
				}
			}
		}()
	}
	time.Sleep(50 * time.Millisecond)
	closed := make(chan error)
	for range 2 {
		go func() { closed <- s.Close() }()
	}
	for _, c := range []chan error{closed, closed} {
		if err := <-c; err != nil {
			t.Errorf("close: %v", err)
		}
	}
	for _, c := range []chan error{read, wrote, wrote, wrote, wrote} {
		if err := <-c; !errors.Is(err, net.ErrClosed) {
			t.Errorf("after close: %v", err)
		}
	}
	if _, err := s.WriteTo([]byte{1}, to); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	if _, _, err := s.ReadFrom(make([]byte, 10)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read after close: %v", err)
	}
}

// A read deadline wakes the reader, and is over when it is taken back: so quic-go
// closes a Transport and leaves the socket usable.
func TestSocketReadDeadline(t *testing.T) {
	noLeaks(t)
	s, err := listenUDP(listenAt(netip.MustParseAddr("127.0.0.1")))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	_, err = s.ReadBatch(batch(1), 0)
	if nerr, ok := errors.AsType[net.Error](err); !ok || !nerr.Timeout() || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
	if err := s.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.WriteTo([]byte("x"), s.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10)
	n, from, err := s.ReadFrom(b)
	if err != nil || string(b[:n]) != "x" || from.String() != s.LocalAddr().String() {
		t.Errorf("read %q from %v, %v", b[:n], from, err)
	}
}

// A packet that quic-go has no room for is dropped, those around it are not.
func TestSocketOversize(t *testing.T) {
	noLeaks(t)
	s, err := listenUDP(listenAt(netip.MustParseAddr("127.0.0.1")))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	to := s.LocalAddr().(*net.UDPAddr)
	for _, w := range []struct{ size, seg int }{{1452, 0}, {1453, 0}, {0, 0}, {5000, 2000}, {60000, 0}, {3, 0}} {
		var oob []byte
		if w.seg != 0 {
			oob = segmentOOB(w.seg)
		}
		if _, _, err := s.WriteMsgUDP(make([]byte, w.size), oob, to); err != nil {
			t.Fatal(err)
		}
	}
	var sizes []int
	for _, p := range receivePackets(t, s, 3) {
		sizes = append(sizes, len(p))
	}
	if d := cmp.Diff([]int{1452, 1000, 3}, sizes); d != "" {
		t.Error(d)
	}
	if n := s.Stats().Oversize; n != 4 {
		t.Errorf("%d packets counted as too large, want 4", n)
	}
}

func TestSocketAllocations(t *testing.T) {
	noLeaks(t)
	s, err := listenUDP(listenAt(netip.MustParseAddr("127.0.0.1")))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	to := s.LocalAddr().(*net.UDPAddr)
	b, oob, ms := make([]byte, 4*1200), segmentOOB(1200), batch(8)
	runtime.GC()
	if n := testing.AllocsPerRun(200, func() {
		if _, _, err := s.WriteMsgUDP(b, oob, to); err != nil {
			t.Fatal(err)
		}
		for got := 0; got < 4; {
			n, err := s.ReadBatch(ms, 0)
			if err != nil {
				t.Fatal(err)
			}
			got += n
		}
	}); n > 1 {
		t.Errorf("%v allocations for a write and its reads", n)
	}
}

// The kernel's control messages are taken apart into what they consist of, and
// anything else is let be.
func FuzzControlMessages(f *testing.F) {
	f.Add(append(segmentOOB(1200), tosOOB(true, 2)...))
	f.Add(tosOOB(false, 1)[:20])
	f.Fuzz(func(t *testing.T, oob []byte) {
		var all []byte
		controlMessages(oob, func(_, _ int32, data, whole []byte) {
			if len(data) > len(whole) {
				t.Errorf("%d bytes of data in %d", len(data), len(whole))
			}
			all = append(all, whole...)
		})
		if !bytes.HasPrefix(oob, all) {
			t.Errorf("%x became %x", oob, all)
		}
		if size := segmentSize(appendWithoutSegmentSize(nil, oob)); size != 0 {
			t.Errorf("segment size %d is still there", size)
		}
	})
}
