package netstack

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tun"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second

func within(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s in %v", what, patience)
		}
	}
}

// A lab is a namespace whose packets all go to a Stack, where an echo answers.
type lab struct {
	*Stack
	ns     *netlab.NS
	open   atomic.Int32 // connections that were admitted and not released
	refuse atomic.Bool
	seen   chan net.Addr // that served connections were for
	lose   func() bool   // whether a packet is lost; nil is never
	// lingers is the Stack's linger.
	lingers time.Duration
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) } // until the peer has enough

func newLab(t *testing.T, serve func(net.Conn), linger time.Duration) *lab {
	t.Helper()
	seen := make(chan net.Addr, 1000)
	l := &lab{seen: seen, lingers: linger}
	l.build(t, Config{Serve: func(c net.Conn) {
		seen <- c.LocalAddr()
		serve(c)
	}})
	return l
}

func newLabOf(t *testing.T, cfg Config) *lab {
	t.Helper()
	l := &lab{lingers: time.Second}
	l.build(t, cfg)
	return l
}

// build makes the namespace and the Stack.
func (l *lab) build(t *testing.T, cfg Config) {
	t.Helper()
	l.ns = netlab.New(t).NS("client")
	var dev *tun.Device
	if err := l.ns.Do(func() (err error) {
		dev, err = tun.Open(tun.Config{Name: "tun0", Queues: 1, MTU: 1400, Drops: new(packet.Drops)})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	nl := l.ns.Netlink()
	link, err := nl.LinkByName("tun0")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"10.91.0.5/32", "fd12::5/128"} {
		addr, err := netlink.ParseAddr(a)
		if err == nil {
			addr.Flags = unix.IFA_F_NODAD // it is used at once
			err = nl.AddrAdd(link, addr)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := nl.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
	for _, dst := range []string{"0.0.0.0/0", "::/0"} {
		n, err := netlink.ParseIPNet(dst)
		if err == nil {
			err = nl.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: n})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	q := dev.Queues()[0]
	cfg.Output = func(pkts []packet.Packet) {
		if l.lose != nil && l.lose() {
			return
		}
		// The device counts what it does not take.
		_ = q.Write(pkts)
	}
	l.start(t, cfg)
	var reading sync.WaitGroup
	reading.Go(func() {
		pkts := make([]packet.Packet, 64)
		for {
			n, err := q.Read(pkts)
			if err != nil {
				return // closed
			}
			if l.lose == nil || !l.lose() {
				l.Input(pkts[:n])
			}
		}
	})
	t.Cleanup(func() {
		dev.Close()
		reading.Wait()
	})
}

// start makes the lab's Stack, and closes it before the device.
func (l *lab) start(t *testing.T, cfg Config) {
	t.Helper()
	cfg.MTU = 1280
	cfg.Admit = func(from netip.Addr) (func(), bool) {
		if l.refuse.Load() {
			return nil, false
		}
		l.open.Add(1)
		return func() { l.open.Add(-1) }, true
	}
	var err error
	l.Stack, err = New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l.linger = l.lingers
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if n := l.open.Load(); n != 0 {
			t.Errorf("%d connections were not released", n)
		}
	})
}

func (l *lab) dial(t *testing.T, to string) *net.TCPConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := l.ns.DialContext(ctx, "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// The kernel's TCP talks to the stack's, under any address.
func TestConnections(t *testing.T) {
	l := newLab(t, echo, time.Second)
	big := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	for _, to := range []string{"192.168.1.1:53", "10.0.0.1:53", "169.254.169.254:53", "240.0.0.1:1", "8.8.8.8:443",
		"[fd00::53]:53", "[2001:db8::1]:65535", "[64:ff9b::1]:53"} {
		t.Run(to, func(t *testing.T) {
			c := l.dial(t, to)
			if got := (<-l.seen).String(); got != to {
				t.Errorf("the connection was for %s", got)
			}
			go func() {
				if _, err := c.Write(big); err != nil {
					t.Error(err)
				}
				if err := c.CloseWrite(); err != nil {
					t.Error(err)
				}
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, big) {
				t.Errorf("%d bytes came back of %d: %v", len(got), len(big), err)
			}
			within(t, "release", func() bool { return l.open.Load() == 0 })
		})
	}
}

func TestRefused(t *testing.T) {
	l := newLab(t, echo, time.Second)
	l.refuse.Store(true)
	if _, err := l.ns.DialContext(t.Context(), "tcp", "192.168.1.1:53"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("error %v, want %v", err, syscall.ECONNREFUSED)
	}
}

// What is refused in a flood costs nothing that stays.
func TestRefusedFlood(t *testing.T) {
	l := new(lab)
	l.refuse.Store(true)
	var answers atomic.Int32
	l.start(t, Config{Serve: echo, Output: func(pkts []packet.Packet) { answers.Add(int32(len(pkts))) }})
	before := runtime.NumGoroutine()
	most := 0
	for i := range 10_000 {
		l.Input([]packet.Packet{{Data: syn(uint16(1000+i), "192.168.1.1"), Flags: packet.Verified}})
		most = max(most, runtime.NumGoroutine()-before)
	}
	if most > 5 {
		t.Errorf("%d goroutines more", most)
	}
	if answers.Load() == 0 {
		t.Error("none of them was answered")
	}
}

func TestManyConnections(t *testing.T) {
	l := newLab(t, echo, time.Second)
	var all sync.WaitGroup
	for range 500 {
		all.Go(func() {
			c := l.dial(t, "192.168.1.1:53")
			defer c.Close()
			var b [3]byte
			if _, err := c.Write([]byte("abc")); err != nil {
				t.Error(err)
			}
			if _, err := io.ReadFull(c, b[:]); err != nil || string(b[:]) != "abc" {
				t.Errorf("read %q: %v", b, err)
			}
		})
	}
	all.Wait()
	within(t, "release", func() bool { return l.open.Load() == 0 })
}

// A stack that ends takes its connections along, and its peers hear of it.
func TestClose(t *testing.T) {
	l := newLab(t, echo, time.Second)
	c := l.dial(t, "192.168.1.1:53")
	<-l.seen
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if n := l.open.Load(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes", n)
	}
	l.Input([]packet.Packet{{Data: syn(1, "192.168.1.1"), Flags: packet.Verified}}) // as may still come
}

// syn returns the first packet of a connection from 10.91.0.5 or fd12::5.
func syn(port uint16, to string) []byte {
	dst := netip.MustParseAddr(to)
	tcp := []byte{byte(port >> 8), byte(port), 0, 53, 0, 0, 0, 1, 0, 0, 0, 0, 5 << 4, 2, 0xff, 0xff, 0, 0, 0, 0}
	var b []byte
	if dst.Is4() {
		b = append(b, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, packet.TCP, 0, 0, 10, 91, 0, 5)
		b = append(b, dst.AsSlice()...)
		var sum uint32
		for i := 0; i < 20; i += 2 {
			sum += uint32(b[i])<<8 | uint32(b[i+1])
		}
		sum = sum>>16 + sum&0xffff
		b[10], b[11] = ^byte(sum>>8), ^byte(sum)
	} else {
		b = append(b, 0x60, 0, 0, 0, 0, 20, packet.TCP, 64)
		b = append(b, netip.MustParseAddr("fd12::5").AsSlice()...)
		b = append(b, dst.AsSlice()...)
	}
	return append(b, tcp...)
}

// Somebody who begins a connection and goes does not keep its place, nor one who
// does not take the end of it.
func TestLimits(t *testing.T) {
	for _, to := range []string{"192.168.1.1", "127.0.0.53", "fe80::1", "::1"} {
		t.Run(to, func(t *testing.T) {
			l := new(lab)
			var answers atomic.Int32
			l.start(t, Config{Serve: echo, Output: func(pkts []packet.Packet) {
				for _, p := range pkts {
					h, err := packet.Parse(p.Data)
					if err != nil || h.Src.String() != to || h.SrcPort != 53 {
						t.Errorf("%v from %v: %v", h.Proto, h.Src, err)
					}
					answers.Add(1)
				}
			}})
			l.handshake = 100 * time.Millisecond
			for port := range uint16(20) {
				l.Input([]packet.Packet{{Data: syn(1000+port, to), Flags: packet.Verified}})
			}
			within(t, "handshake", func() bool { return l.open.Load() == 20 && answers.Load() == 20 })
			within(t, "release", func() bool { return l.open.Load() == 0 })
		})
	}
}

func TestLinger(t *testing.T) {
	const linger = 100 * time.Millisecond
	l := newLab(t, func(c net.Conn) {
		if _, err := c.Write(make([]byte, startBuffer/2)); err != nil {
			t.Error(err)
		}
	}, linger)
	l.dial(t, "192.168.1.1:53") // and neither reads nor closes
	<-l.seen
	start := time.Now()
	within(t, "release", func() bool { return l.open.Load() == 0 })
	if took := time.Since(start); took < linger/2 {
		t.Errorf("released after %v, before the peer could take all", took)
	}
}
