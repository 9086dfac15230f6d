package tunnel

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Packets that the network does not take are lost packets, whatever the reason:
// the socket goes on, and when the reason is gone so do the packets.
func TestSocketNetworkFaults(t *testing.T) {
	const blocked = `table inet t { chain c { type filter hook output priority 0; udp dport != 0 drop; }; }`
	for _, tc := range []struct {
		name         string
		listen, peer netip.Addr
		broken       func(p *socketPair)
		repaired     func(p *socketPair)
		want         error
	}{
		{"no route", netip.IPv4Unspecified(), addrB4,
			func(p *socketPair) { p.ia.Down() },
			func(p *socketPair) { p.ia.Up() }, unix.ENETUNREACH},
		{"no route for IPv6", netip.IPv6Unspecified(), addrB6,
			func(p *socketPair) { deleteAddress(p, netip.PrefixFrom(addrA6, 64)) },
			func(p *socketPair) { p.ia.Address(netip.PrefixFrom(addrA6, 64)) }, unix.ENETUNREACH},
		{"no source address", addrA4, addrB4, // bound to one that is gone
			func(p *socketPair) { deleteAddress(p, netip.PrefixFrom(addrA4, 24)) },
			func(p *socketPair) { p.ia.Address(netip.PrefixFrom(addrA4, 24)) }, nil},
		{"firewall", netip.IPv4Unspecified(), addrB4,
			func(p *socketPair) { p.a.Nft(blocked) },
			func(p *socketPair) { p.a.Nft("delete table inet t") }, unix.EPERM},
		{"prohibited", netip.IPv6Unspecified(), addrB6,
			func(p *socketPair) {
				p.b.Nft(strings.Replace(strings.Replace(blocked, "output", "input", 1), "drop", "reject with icmpx admin-prohibited", 1))
			},
			func(p *socketPair) { p.b.Nft("delete table inet t") }, unix.EACCES},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newSocketPair(t)
			a, b := openSocket(t, p.a, listenAt(tc.listen)), openSocket(t, p.b, listenAt(tc.peer))
			reading(t, a)
			to := socketPort(b, tc.peer)
			write := func(what string) {
				t.Helper()
				for _, w := range []struct {
					b, oob []byte
				}{{make([]byte, 1000), nil}, {make([]byte, 3*1000), segmentOOB(1000)}, {make([]byte, 2500), segmentOOB(1000)}} {
					if _, _, err := a.WriteMsgUDP(w.b, w.oob, to); err != nil {
						t.Fatalf("%s: write of %d bytes: %v", what, len(w.b), err)
					}
				}
			}
			write("before")
			receivePackets(t, b, 7)
			tc.broken(p)
			for range 10 {
				write("broken")
				time.Sleep(time.Millisecond)
			}
			eventually(t, "the losses are counted", func() bool {
				st := a.Stats()
				return st.SendLost == 70 || st.ICMPErrors > 0
			})
			if err := a.Stats().LastError; err == nil || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("last error %v, want %v", err, tc.want)
			}
			tc.repaired(p)
			write("repaired")
			receivePackets(t, b, 7)
			if st := a.Stats(); st.GSORefused != 0 {
				t.Errorf("stats %+v", st)
			}
		})
	}
}

func deleteAddress(p *socketPair, prefix netip.Prefix) {
	link, err := p.a.Netlink().LinkByIndex(p.ia.Index)
	if err != nil {
		panic(err)
	}
	addrs, err := p.a.Netlink().AddrList(link, unix.AF_UNSPEC)
	if err != nil {
		panic(err)
	}
	for _, a := range addrs {
		if a.IPNet.String() == prefix.String() {
			if err := p.a.Netlink().AddrDel(link, &a); err != nil {
				panic(err)
			}
		}
	}
}

// A peer that is gone answers each packet with an ICMP error. It must not cost
// packets to others.
func TestSocketPortUnreachable(t *testing.T) {
	for _, peer := range []netip.Addr{addrB4, addrB6} {
		t.Run(peer.String(), func(t *testing.T) {
			p := newSocketPair(t)
			p.b.Sysctl("net.ipv4.icmp_ratelimit", "0")
			p.b.Sysctl("net.ipv6.icmp.ratelimit", "0")
			a, b := openSocket(t, p.a, socketConfig{}), openSocket(t, p.b, listenAt(peer))
			reading(t, a)
			gone := socketPort(b, peer)
			gone.Port--
			var want []byte
			for i := range byte(200) {
				if _, err := a.WriteTo(make([]byte, 100), gone); err != nil {
					t.Fatal(err)
				}
				if _, err := a.WriteTo([]byte{i}, socketPort(b, peer)); err != nil {
					t.Fatal(err)
				}
				want = append(want, i)
			}
			got := bytes.Join(receivePackets(t, b, len(want)), nil)
			if !bytes.Equal(got, want) {
				t.Errorf("received %v", got)
			}
			st := a.Stats()
			if st.ICMPErrors < 40 || !errors.Is(st.LastError, unix.ECONNREFUSED) {
				t.Errorf("stats %+v", st)
			}
		})
	}
}

// A kernel or a device that refuses segments gets single packets from then on,
// and none is lost on the way there.
func TestSocketGSORefused(t *testing.T) {
	p := newSocketPair(t)
	a, b := openSocket(t, p.a, listenAt(addrA4)), openSocket(t, p.b, listenAt(addrB4))
	raw, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// Without checksums the kernel does no segmentation.
	if cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_NO_CHECK, 1) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	to := socketPort(b, addrB4)
	packets := 0
	for i := range byte(20) {
		w := bytes.Repeat([]byte{i}, 3300)
		if _, _, err := a.WriteMsgUDP(w, segmentOOB(1000), to); err != nil {
			t.Fatal(err)
		}
		packets += 4
	}
	for i, got := range receivePackets(t, b, packets) {
		size := 1000
		if i%4 == 3 {
			size = 300
		}
		if !bytes.Equal(got, bytes.Repeat([]byte{byte(i / 4)}, size)) {
			t.Fatalf("packet %d is %d bytes of %d", i, len(got), got[0])
		}
	}
	if st := a.Stats(); st.GSORefused != 1 || st.SendLost != 0 {
		t.Errorf("stats %+v", st)
	}
}

// While the send buffer is full an ICMP error is the only event of the socket,
// at which package net refuses to wait for more. The reader must live on.
func TestSocketErrorWhileFull(t *testing.T) {
	p := newSocketPair(t)
	p.b.Sysctl("net.ipv4.icmp_ratelimit", "0")
	a, b := openSocket(t, p.a, listenAt(addrA4)), openSocket(t, p.b, listenAt(addrB4))
	reading(t, a)
	raw, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, 5000) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	gone := socketPort(b, addrB4)
	gone.Port--
	p.ia.SetRate(200_000)
	written := make(chan error)
	go func() {
		for range 60 {
			if _, err := a.WriteTo(make([]byte, 1000), gone); err != nil {
				written <- err
				return
			}
		}
		written <- nil
	}()
	eventually(t, "ICMP errors come", func() bool { return a.Stats().ICMPErrors > 10 })
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	p.ia.SetRate(0)
	before := a.Stats().Segments
	if _, err := b.WriteTo([]byte("x"), socketPort(a, addrA4)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the reader reads", func() bool { return a.Stats().Segments > before })
}

// A full queue of the device is loss as well.
func TestSocketQueueFull(t *testing.T) {
	p := newSocketPair(t)
	p.ia.SetRate(1_000_000)
	a, b := openSocket(t, p.a, listenAt(addrA4)), openSocket(t, p.b, listenAt(addrB4))
	to := socketPort(b, addrB4)
	for range 20 {
		if _, _, err := a.WriteMsgUDP(make([]byte, 10*1200), segmentOOB(1200), to); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "losses are counted", func() bool { return a.Stats().SendLost > 0 })
	if err := a.Stats().LastError; !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("last error %v, want ENOBUFS", err)
	}
	p.ia.SetRate(0)
	if _, err := a.WriteTo([]byte("x"), to); err != nil {
		t.Fatal(err)
	}
}

// Close ends, though the send buffer is full and does not drain.
func TestSocketCloseWhileFull(t *testing.T) {
	p := newSocketPair(t)
	p.ia.SetRate(10_000)
	a := openSocket(t, p.a, listenAt(addrA4))
	raw, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, 5000) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	written := make(chan error)
	go func() {
		for {
			if _, err := a.WriteTo(make([]byte, 1000), &net.UDPAddr{IP: addrB4.AsSlice(), Port: 9}); err != nil {
				written <- err
				return
			}
		}
	}()
	time.Sleep(100 * time.Millisecond)
	start := time.Now()
	if err := a.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if took := time.Since(start); took > 2*closeTimeout {
		t.Errorf("close took %v", took)
	}
	<-written
}
