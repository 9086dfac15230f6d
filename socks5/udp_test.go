package socks5

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// udpEcho answers datagrams.
func udpEcho(t testing.TB, on string) Addr {
	t.Helper()
	pc, err := net.ListenPacket("udp", on)
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		b := make([]byte, busyBuffer)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			pc.WriteTo(b[:n], from)
		}
	})
	t.Cleanup(func() { pc.Close(); running.Wait() })
	return addrFrom(addrPort(pc.LocalAddr()))
}

// udpClient is one that has asked for an association.
type udpClient struct {
	*net.UDPConn
	t     testing.TB
	tcp   *net.TCPConn
	relay Addr
}

func (w *world) associated(proxy string) *udpClient {
	w.t.Helper()
	c := &udpClient{t: w.t, tcp: dialTCP(w.t, proxy)}
	reply, bound := ask(w.t, c.tcp, commandAssociate, Addr{})
	if reply != succeeded {
		w.t.Fatal(reply)
	}
	c.relay = bound
	c.UDPConn = c.socket()
	return c
}

// socket is another of the client's.
func (c *udpClient) socket() *net.UDPConn {
	c.t.Helper()
	u, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.relay.IP, c.relay.Port)))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { u.Close() })
	u.SetDeadline(time.Now().Add(20 * time.Second))
	return u
}

func datagram(to Addr, data []byte) []byte { return append(to.append([]byte{0, 0, 0}), data...) }

// echoes sends a datagram and wants it back from an address.
func (c *udpClient) echoes(to, from Addr, data []byte) {
	c.t.Helper()
	if _, err := c.Write(datagram(to, data)); err != nil {
		c.t.Fatalf("send %d bytes: %v", len(data), err)
	}
	b := make([]byte, busyBuffer)
	n, err := c.Read(b)
	if err != nil {
		c.t.Fatalf("receive %d bytes: %v", len(data), err)
	}
	got, back, reason := parseDatagram(b[:n])
	if reason != 0 || got != from || !bytes.Equal(back, data) {
		c.t.Fatalf("%d bytes from %v (%v), want %d from %v", len(back), got, reason, len(data), from)
	}
}

func TestAssociate(t *testing.T) {
	w := newWorld(t, nil)
	v6, _ := w.serve("[::1]:0")
	all, _ := w.serve(":0") // both IP versions
	_, port, _ := net.SplitHostPort(all)
	echo4, echo6 := udpEcho(t, "127.0.0.1:0"), udpEcho(t, "[::1]:0")
	for proxy, most := range map[string]int{w.addr: 65507, v6: 65527, "127.0.0.1:" + port: 65507} {
		c := w.associated(proxy)
		if want := addrPort(c.tcp.RemoteAddr()).Addr(); c.relay.IP != want {
			t.Errorf("the client is told %v, want an address at %v", c.relay, want)
		}
		for _, size := range []int{0, 1, 2, 512, 1200, 1452, 1472, 1473, 9000, 32768, min(65507, most-len(datagram(echo4, nil)))} {
			c.echoes(echo4, echo4, bytes.Repeat([]byte("a"), size))
		}
		c.echoes(echo6, echo6, bytes.Repeat([]byte("b"), most-len(datagram(echo6, nil))))
		c.echoes(Addr{Name: "app.test", Port: echo4.Port}, echo4, []byte("by name"))
	}
	if drops := w.Drops(); len(drops) > 0 {
		t.Errorf("dropped: %v", drops)
	}
}

// Datagrams that do not belong are dropped, each for its reason, and do no harm to
// those that do.
func TestAssociateDrops(t *testing.T) {
	w := newWorld(t, nil)
	to := udpEcho(t, "127.0.0.1:0")
	c := w.associated(w.addr)
	stranger, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2)})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	relay := net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.relay.IP, c.relay.Port))
	if _, err := stranger.WriteTo(datagram(to, []byte("stranger")), relay); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stranger's datagram", func() bool { return w.Drops()["stranger"] == 1 })
	for _, b := range [][]byte{
		{}, {0, 0, 0}, {0, 0, 0, 1, 2, 3}, {1, 0, 0, 1, 127, 0, 0, 1, 0, 1}, {0, 0, 0, 2, 127, 0, 0, 1, 0, 1},
		datagram(Addr{IP: to.IP}, nil), // port 0
		{0, 0, 0, 3, 4, 'a', ' ', 'b', '!', 0, 1},
		{0, 0, 0, 3, 200, 'a', 0, 1},
	} {
		send(t, c, b)
	}
	eventually(t, "the malformed ones", func() bool { return w.Drops()["malformed"] == 8 })
	for frag := 1; frag < 256; frag += 127 {
		b := datagram(to, []byte("fragment"))
		b[2] = byte(frag)
		send(t, c, b)
	}
	eventually(t, "the fragments", func() bool { return w.Drops()["fragment"] == 3 })
	c.echoes(to, to, []byte("good"))
	// The port is known by now.
	send(t, c.socket(), datagram(to, []byte("other socket")))
	send(t, c, datagram(Addr{Name: "nowhere.invalid", Port: 53}, []byte("x")))
	eventually(t, "all", func() bool { return w.Drops()["unsent"] == 1 && w.Drops()["stranger"] == 2 })
	c.echoes(to, to, []byte("still good"))
	want := map[string]uint64{"stranger": 2, "malformed": 8, "fragment": 3, "unsent": 1}
	if diff := cmp.Diff(want, w.Drops()); diff != "" {
		t.Errorf("drops (-want +got):\n%s", diff)
	}
}

// The port that a client announces is the only one.
func TestAssociateAnnounced(t *testing.T) {
	w := newWorld(t, nil)
	to := udpEcho(t, "127.0.0.1:0")
	for announced, binds := range map[string]bool{"127.0.0.1": true, "0.0.0.0": true, "::": true, "192.168.7.7": false} {
		const port = 9 // of no socket of the client's
		c := &udpClient{t: t, tcp: w.connect()}
		_, c.relay = ask(t, c.tcp, commandAssociate, Addr{IP: netip.MustParseAddr(announced), Port: port})
		before := w.Drops()["stranger"]
		c.UDPConn = c.socket()
		if !binds {
			c.echoes(to, to, []byte("x"))
			continue
		}
		send(t, c, datagram(to, []byte("x")))
		eventually(t, "the drop", func() bool { return w.Drops()["stranger"] == before+1 })
	}
}

// An association ends with its TCP connection, and with it all that it held; that
// connection ends with the relay.
func TestAssociateEnds(t *testing.T) {
	relays := make(chan *directRelay, 1)
	w := newWorld(t, func(w *world) {
		w.UDPIdle = 300 * time.Millisecond
		w.Associate = func(context.Context) (PacketRelay, error) {
			r, err := newDirectRelay()
			relays <- r
			return r, err
		}
	})
	to := udpEcho(t, "127.0.0.1:0")
	before := descriptors(t)
	c := w.associated(w.addr)
	c.echoes(to, to, []byte("x"))
	<-relays
	c.tcp.Close()
	eventually(t, "the end", func() bool { return w.count() == 0 && descriptors(t) <= before+1 }) // the client's UDP socket
	c = w.associated(w.addr)
	(<-relays).Close()
	expectEnd(t, c.tcp)
	// Idle, but not while datagrams come.
	c = w.associated(w.addr)
	for start := time.Now(); time.Since(start) < 3*w.UDPIdle; time.Sleep(w.UDPIdle / 30) {
		c.echoes(to, to, []byte("x"))
	}
	expectEnd(t, c.tcp)
}

// expectEnd wants a connection to end within its deadline.
func expectEnd(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection does not end")
	}
}

func TestAssociateRefused(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.Associate = func(context.Context) (PacketRelay, error) { return nil, NotAllowed }
	})
	before := descriptors(t)
	c := w.connect()
	if reply, _ := ask(t, c, commandAssociate, Addr{}); reply != NotAllowed {
		t.Error(reply)
	}
	expectEOF(t, c)
	c.Close()
	eventually(t, "descriptors closed", func() bool { return descriptors(t) <= before })
}

// foreign is neither a *net.UDPConn nor the system's, as a socket of a netstack.
type foreign struct{ net.PacketConn }

func TestListenPacket(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.ListenPacket = func(local netip.Addr) (net.PacketConn, error) {
			pc, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0)))
			return foreign{pc}, err
		}
	})
	to := udpEcho(t, "127.0.0.1:0")
	c := w.associated(w.addr)
	c.echoes(to, to, []byte("x"))
}

// namedRelay answers by name, and "big" by more than fits.
type namedRelay struct{ got, closed chan []byte }

func (r *namedRelay) Send(b []byte, to Addr) error {
	r.got <- bytes.Clone(b)
	return nil
}

func (r *namedRelay) Receive() ([]byte, Addr, error) {
	select {
	case b := <-r.got:
		if string(b) == "big" {
			b = make([]byte, 65507)
		}
		return b, Addr{Name: strings.Repeat("n", 253), Port: 9}, nil
	case <-r.closed:
		return nil, Addr{}, net.ErrClosed
	}
}

func (r *namedRelay) Close() error { close(r.closed); return nil }

func TestRelayByName(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.Associate = func(context.Context) (PacketRelay, error) {
			return &namedRelay{make(chan []byte, 1), make(chan []byte)}, nil
		}
	})
	c := w.associated(w.addr)
	send(t, c, datagram(Addr{Name: "a.test", Port: 9}, []byte("big")))
	eventually(t, "the drop", func() bool { return w.Drops()["too-big"] == 1 })
	c.echoes(Addr{Name: "a.test", Port: 9}, Addr{Name: strings.Repeat("n", 253), Port: 9}, []byte("small"))
}

func FuzzDatagram(f *testing.F) {
	f.Add(datagram(Addr{Name: "app.test", Port: 1}, []byte("data")))
	f.Add(datagram(Addr{IP: netip.IPv6Loopback(), Port: 1}, nil))
	f.Add([]byte{0, 0, 1, 1, 127, 0, 0, 1, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		to, data, reason := parseDatagram(b)
		if reason != 0 {
			if data != nil {
				t.Fatalf("dropped for %v, with data", reason)
			}
			return
		}
		if !bytes.HasSuffix(b, data) || to.Port == 0 || to.IP.IsValid() == (to.Name != "") || b[2] != 0 {
			t.Fatalf("%v, %q", to, data)
		}
		again, same, reason := parseDatagram(datagram(to, data))
		if again != to || !bytes.Equal(same, data) || reason != 0 {
			t.Fatalf("%v became %v", to, again)
		}
	})
}
