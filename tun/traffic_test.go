package tun

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
)

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// socketOption is set on a socket before it is used.
type socketOption func(fd int) error

func (p *pair) listen(t *testing.T, addr netip.Addr, opt socketOption) net.Listener {
	t.Helper()
	var ln net.Listener
	err := p.ns[1].Do(func() (err error) {
		lc := net.ListenConfig{Control: control1(opt)}
		ln, err = lc.Listen(context.Background(), "tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

func control1(opt socketOption) func(string, string, syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) {
			if opt != nil {
				err = opt(int(fd))
			}
		}), err)
	}
}

// echo sends data to a server in the other namespace, which sends it back, and
// compares.
func (p *pair) echo(t *testing.T, addr netip.Addr, n int, opt socketOption) {
	t.Helper()
	ln := p.listen(t, addr, opt)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return // the client's failure is reported
		}
		defer c.Close()
		io.Copy(c, c)
	}()
	var c net.Conn
	err := p.ns[0].Do(func() (err error) {
		d := net.Dialer{Control: control1(opt), Timeout: 5 * time.Second}
		c, err = d.Dial("tcp", ln.Addr().String())
		return err
	})
	if err != nil {
		t.Errorf("dial %v: %v", addr, err)
		return
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Error(err)
	}
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		sent <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	h := sha256.New()
	got, err := io.Copy(h, c)
	if err := errors.Join(err, <-sent); err != nil {
		t.Errorf("%v: %v", addr, err)
	}
	if want := sha256.Sum256(data); !bytes.Equal(h.Sum(nil), want[:]) {
		t.Errorf("%v: %d bytes came back of %d, or others", addr, got, n)
	}
}

func setInt(level, name, v int) socketOption {
	return func(fd int) error { return unix.SetsockoptInt(fd, level, name, v) }
}

func setString(level, name int, v string) socketOption {
	return func(fd int) error { return unix.SetsockoptString(fd, level, name, v) }
}

var (
	// ipOptions are a router alert.
	ipOptions = setString(unix.IPPROTO_IP, unix.IP_OPTIONS, "\x94\x04\x00\x00")
	// extensions are a destination options header that holds padding.
	extensions = setString(unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS, "\x00\x00\x01\x04\x00\x00\x00\x00")
)

func TestTCP(t *testing.T) {
	everyPair(t, func(t *testing.T, p *pair) {
		p.echo(t, pair4[1], 8<<20, nil)
		p.echo(t, pair6[1], 8<<20, nil)
		p.echo(t, pair4[1], 1<<20, ipOptions)
		p.echo(t, pair6[1], 1<<20, extensions)
		p.echo(t, pair4[1], 100<<10, setInt(unix.IPPROTO_TCP, unix.TCP_MAXSEG, 200))
		p.echo(t, pair4[1], 1, nil)
		for i, ns := range p.ns {
			if n := counter(t, ns, "snmp", "Tcp", "InCsumErrors"); n != 0 {
				t.Errorf("%d wrong checksums arrived at %d", n, i)
			}
		}
	})
}

// udpEcho sends datagrams and expects each back.
func (p *pair) udpEcho(t *testing.T, addr netip.Addr, opt socketOption, sizes ...int) {
	t.Helper()
	server, err := p.ns[1].ListenPacket("udp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			if _, err := server.WriteTo(buf[:n], from); err != nil {
				return // the client misses it
			}
		}
	}()
	c, err := p.ns[0].DialContext(deadline(t), "udp", server.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := control1(opt)("", "", raw); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 65536)
	for _, size := range sizes {
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(rand.Uint32())
		}
		if _, err := c.Write(data); err != nil {
			t.Fatalf("%v: send %d bytes: %v", addr, size, err)
		}
		if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		n, err := c.Read(buf)
		if err != nil || !bytes.Equal(buf[:n], data) {
			t.Fatalf("%v: %d bytes came back of %d, or others: %v", addr, n, size, err)
		}
	}
}

func TestUDP(t *testing.T) {
	// Around every border, and far beyond one packet.
	sizes := []int{0, 1, 2, 3, 511, 1000, 1331, 1332, 1333, 1344, 1345, 1352, 1353, 1371, 1372, 1373, 1400, 2800, 9000, 65000}
	everyPair(t, func(t *testing.T, p *pair) {
		for _, addr := range []netip.Addr{pair4[1], pair6[1]} {
			p.udpEcho(t, addr, nil, sizes...)
			p.udpEcho(t, addr, setInt(unix.SOL_SOCKET, unix.SO_NO_CHECK, 0), sizes...)
		}
		p.udpEcho(t, pair4[1], ipOptions, sizes...)
		p.udpEcho(t, pair6[1], extensions, sizes...)
		p.udpEcho(t, pair4[1], setInt(unix.SOL_SOCKET, unix.SO_NO_CHECK, 1), sizes...)
		for i, ns := range p.ns {
			if n := counter(t, ns, "snmp", "Udp", "InCsumErrors"); n != 0 {
				t.Errorf("%d wrong checksums arrived at %d", n, i)
			}
		}
	})
}

// Datagrams sent in one system call come as a super-packet, and arrive one by
// one and in order.
func TestUDPSegmentation(t *testing.T) {
	const segment, segments, rounds = 700, 40, 20
	for _, cut := range []bool{false, true} {
		for i, addr := range []netip.Addr{pair4[1], pair6[1]} {
			t.Run(fmt.Sprintf("cut=%v,%v", cut, addr), func(t *testing.T) {
				var supers atomic.Int32
				p := newPair(t, [2]Config{}, cut, func(_, _ int, p packet.Packet, h packet.Header) {
					if h.Proto == packet.UDP && p.Segment == segment && p.Flags == packet.Partial {
						supers.Add(1)
					}
				})
				server, err := p.ns[1].ListenPacket("udp", netip.AddrPortFrom(addr, 0).String())
				if err != nil {
					t.Fatal(err)
				}
				defer server.Close()
				c, err := p.ns[0].DialContext(deadline(t), "udp", server.LocalAddr().String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				raw, err := c.(*net.UDPConn).SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				if err := control1(setInt(unix.IPPROTO_UDP, unix.UDP_SEGMENT, segment))("", "", raw); err != nil {
					t.Fatal(err)
				}
				if err := server.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
					t.Fatal(err)
				}
				buf := make([]byte, 65536)
				for round := range rounds {
					data := bytes.Repeat([]byte{byte(round)}, segment*segments-300)
					for s := range segments {
						data[s*segment] = byte(s)
					}
					if _, err := c.Write(data); err != nil {
						t.Fatal(err)
					}
					for s := range segments {
						n, _, err := server.ReadFrom(buf)
						want := data[s*segment : min((s+1)*segment, len(data))]
						if err != nil || !bytes.Equal(buf[:n], want) {
							t.Fatalf("round %d, datagram %d: %d bytes, %v", round, s, n, err)
						}
					}
				}
				if n := supers.Load(); n != rounds {
					t.Errorf("%d super-packets of %d", n, rounds)
				}
				if i == 0 && counter(t, p.ns[1], "snmp", "Udp", "InCsumErrors") != 0 {
					t.Error("wrong checksums arrived")
				}
			})
		}
	}
}

func TestICMP(t *testing.T) {
	everyPair(t, func(t *testing.T, p *pair) {
		for _, to := range []netip.Addr{pair4[1], pair6[1]} {
			for _, size := range []int{8, 1000, 5000} {
				rtts, err := p.ns[0].Ping(deadline(t), netlab.Ping{To: to, Count: 3, Interval: 5 * time.Millisecond, Size: size})
				if err != nil || len(rtts) != 3 {
					t.Errorf("%v with %d bytes: %d answers of 3, %v", to, size, len(rtts), err)
				}
			}
		}
	})
}

// What the house knows nothing of goes through untouched.
func TestOtherProtocols(t *testing.T) {
	const gre, sctp, unassigned = 47, 132, 200
	everyPair(t, func(t *testing.T, p *pair) {
		for _, proto := range []int{gre, sctp, unassigned} {
			for _, addrs := range [][2]netip.Addr{pair4, pair6} {
				in := rawSocket(t, p.ns[1], addrs[1], proto)
				out := rawSocket(t, p.ns[0], addrs[0], proto)
				for _, n := range []int{1, 20, 999, 1340} {
					data := make([]byte, n)
					for i := range data {
						data[i] = byte(rand.Uint32())
					}
					if err := unix.Sendto(out, data, 0, sockaddr(addrs[1])); err != nil {
						t.Fatalf("protocol %d to %v: %v", proto, addrs[1], err)
					}
					buf := make([]byte, 2000)
					got, _, err := unix.Recvfrom(in, buf, 0)
					if err != nil {
						t.Fatalf("protocol %d to %v: %v", proto, addrs[1], err)
					}
					b := buf[:got]
					if addrs[1].Is4() {
						if onesComplement(b[:20]) != 0xffff || b[8] != 64 {
							t.Errorf("protocol %d: header %x", proto, b[:20])
						}
						b = b[20:]
					}
					if !bytes.Equal(b, data) {
						t.Errorf("protocol %d to %v: %d bytes changed", proto, addrs[1], n)
					}
				}
			}
		}
	})
}

func sockaddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}

func rawSocket(t *testing.T, ns *netlab.NS, addr netip.Addr, proto int) int {
	t.Helper()
	domain := unix.AF_INET
	if addr.Is6() {
		domain = unix.AF_INET6
	}
	fd := -1
	err := ns.Do(func() (err error) {
		fd, err = unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, sockaddr(addr)); err != nil {
		t.Fatal(err)
	}
	return fd
}
