package hub

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A world stands for the gateway and the tunnels to it: it passes packets from
// one network to the other by their destination.
type world struct {
	t   *testing.T
	lab *netlab.Lab
	mu  sync.Mutex // guards routes
	// routes are by prefix; the last one that fits counts.
	routes []route
	// mtu is that of all tunnels.
	mtu    atomic.Int32
	tooBig atomic.Int32 // packets that were larger
}

type route struct {
	prefix netip.Prefix
	to     *network
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, lab: netlab.New(t)}
	w.mtu.Store(labMTU)
	return w
}

// join makes a network with a block of a number. What its peers are, and whether
// they know its subnets, says u.
func (w *world) join(cfg Config, block int, u Uplink) *network {
	w.t.Helper()
	n := newNetwork(w.t, w.lab, cfg)
	for _, p := range []string{fmt.Sprintf("10.91.%d.0/24", block), fmt.Sprintf("fd91::%x:0/112", block)} {
		w.route(netip.MustParsePrefix(p), n)
	}
	if u.Announced {
		for _, p := range cfg.Subnets {
			w.route(p, n)
		}
	}
	u.Gateway = gateway
	u.Send = func(queue int, pkts []packet.Packet, errs tunnel.Sink) { w.pass(n, queue, pkts, errs) }
	n.SetUplink(&u)
	return n
}

func (w *world) route(p netip.Prefix, to *network) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.routes = append(w.routes, route{p, to})
}

// lookup returns the network of an address, or nil.
func (w *world) lookup(ip netip.Addr) *network {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range slices.Backward(w.routes) {
		if r.prefix.Contains(ip) {
			return r.to
		}
	}
	return nil
}

// pass is what a session and the gateway do: too large is answered by the
// session, a hop limit that ran out by the gateway.
func (w *world) pass(from *network, queue int, pkts []packet.Packet, errs tunnel.Sink) {
	for i := range pkts {
		p := &pkts[i]
		h, err := packet.Parse(p.Data)
		if err != nil {
			w.t.Errorf("the hub has let out: %v", err)
			continue
		}
		router := gateway[0]
		if h.Version == 6 {
			router = gateway[1]
		}
		size := len(p.Data)
		if p.Segment > 0 {
			size = h.HeaderLen + int(p.Segment)
		}
		if mtu := int(w.mtu.Load()); size > mtu {
			w.tooBig.Add(1)
			if b := packet.AppendTooBig(nil, p.Data, router, mtu); b != nil {
				errs.WritePackets(queue, single(b))
			}
			continue
		}
		if !packet.DecrementHopLimit(p.Data) {
			if b := packet.AppendTimeExceeded(nil, p.Data, router); b != nil {
				from.WritePackets(queue, single(b))
			}
			continue
		}
		if to := w.lookup(h.Dst); to != nil {
			to.WritePackets(queue, pkts[i:i+1])
		}
	}
}

// Two hosts whose networks have the same subnets reach each other by their
// blocks.
func TestMapping(t *testing.T) {
	w := newWorld(t)
	one, two := w.join(dual(), 1, Uplink{}), w.join(dual(), 2, Uplink{})
	a := one.attach("a", mapped(inside(2), outside(1, 2)))
	b := two.attach("b", mapped(inside(2), outside(2, 2)))
	b.ServeEcho(7)
	for i, to := range outside(2, 2) {
		if seen := transfer(t, a, b, inside(2)[i], to, 16<<20); seen != outside(1, 2)[i] {
			t.Errorf("%v sees the client as %v, want %v", to, seen, outside(1, 2)[i])
		}
		for _, size := range []int{8, 1300, 5000} {
			rtts, err := a.Ping(deadline(t), netlab.Ping{To: to, Count: 3, Interval: 5 * time.Millisecond, Size: size})
			if err != nil || len(rtts) != 3 {
				t.Errorf("%v with %d bytes: %d answers of 3, %v", to, size, len(rtts), err)
			}
		}
		c := dialUDP(t, a, netip.AddrPortFrom(to, 7))
		for _, size := range []int{0, 1, 2, 1000, 1372, 1373, 5000, 20000} {
			if err := exchange(c, size); err != nil {
				t.Errorf("%v: a datagram of %d bytes: %v", to, size, err)
			}
		}
		// A packet of one container does not get to another's.
		if one.dropped(packet.DropSource)+two.dropped(packet.DropSource) != 0 {
			t.Errorf("dropped for their source: %v, %v", one.drops.Snapshot(), two.drops.Snapshot())
		}
	}
	noWrongChecksums(t, a, b)
}

func dialUDP(t *testing.T, from container, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := from.DialContext(deadline(t), "udp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

// exchange sends a datagram and expects it back.
func exchange(c *net.UDPConn, size int) error {
	data := bytes.Repeat([]byte{byte(size)}, size)
	if _, err := c.Write(data); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	buf := make([]byte, 65536)
	n, err := c.Read(buf)
	if err == nil && !bytes.Equal(buf[:n], data) {
		err = fmt.Errorf("%d bytes came back, or others", n)
	}
	return err
}

// Peers that know the subnets see the containers' own addresses, others those of
// the block.
func TestAnnounced(t *testing.T) {
	w := newWorld(t)
	pools := []netip.Prefix{netip.MustParsePrefix("10.91.0.0/16"), netip.MustParsePrefix("fd91::/64")}
	others := Config{Subnets: []netip.Prefix{netip.MustParsePrefix("172.19.0.0/16"), netip.MustParsePrefix("fd19::/64")}, Own: addrs("172.19.0.1", "fd19::1")}
	theirs := addrs("172.19.0.2", "fd19::2")
	one := w.join(dual(), 1, Uplink{Announced: true, Peers: slices.Concat(pools, others.Subnets)})
	two := w.join(others, 2, Uplink{Announced: true, Peers: slices.Concat(pools, subnets)})
	// The third comes too late: its subnets are the first one's.
	late := w.join(dual(), 3, Uplink{Peers: slices.Concat(pools, subnets, others.Subnets)})
	internet := w.join(Config{}, 4, Uplink{})
	webs := addrs("203.0.113.10", "2001:db8:3::10")
	for _, ip := range webs {
		w.route(netip.PrefixFrom(ip, ip.BitLen()), internet)
	}
	a := one.attach("a", mapped(inside(2), outside(1, 2)))
	b := two.attach("b", mapped(theirs, outside(2, 2)))
	c := late.attach("c", mapped(inside(2), outside(3, 2)))
	web := internet.attach("web", mapped(webs, webs))
	for i := range own {
		for _, tt := range []struct {
			from, to     container
			listen, dial netip.Addr
			want         netip.Addr
		}{
			{a, b, theirs[i], theirs[i], inside(2)[i]},
			{b, a, inside(2)[i], inside(2)[i], theirs[i]},
			{a, web, webs[i], webs[i], outside(1, 2)[i]},
			{c, b, theirs[i], theirs[i], outside(3, 2)[i]},
			{b, c, inside(2)[i], outside(3, 2)[i], theirs[i]},
			{c, web, webs[i], webs[i], outside(3, 2)[i]},
		} {
			if seen := transfer(t, tt.from, tt.to, tt.listen, tt.dial, 1<<20); seen != tt.want {
				t.Errorf("%s sees %s as %v, want %v", tt.to.Name, tt.from.Name, seen, tt.want)
			}
		}
	}
}

// Without a mapping the container's address is the block's.
func TestWithoutMapping(t *testing.T) {
	w := newWorld(t)
	one, two := w.join(Config{}, 1, Uplink{}), w.join(dual(), 2, Uplink{})
	a := one.attach("a", mapped(outside(1, 2), outside(1, 2)))
	b := one.attach("b", mapped(outside(1, 3), outside(1, 3)))
	c := two.attach("c", mapped(inside(2), outside(2, 2)))
	for i := range own {
		for _, tt := range []struct {
			from, to     container
			listen, dial netip.Addr
			want         netip.Addr
		}{
			{a, b, outside(1, 3)[i], outside(1, 3)[i], outside(1, 2)[i]},
			{a, c, inside(2)[i], outside(2, 2)[i], outside(1, 2)[i]},
			{c, a, outside(1, 2)[i], outside(1, 2)[i], outside(2, 2)[i]},
		} {
			if seen := transfer(t, tt.from, tt.to, tt.listen, tt.dial, 1<<20); seen != tt.want {
				t.Errorf("%v sees the client as %v, want %v", tt.dial, seen, tt.want)
			}
		}
	}
}

// A container is reached by the address that stands for it from its own host,
// too, and from itself.
func TestOutsideFromInside(t *testing.T) {
	n := newNetwork(t, netlab.New(t), dual())
	a := n.attach("a", mapped(inside(2), outside(1, 2)))
	b := n.attach("b", mapped(inside(3), outside(1, 3)))
	for i := range own {
		if seen := transfer(t, a, b, inside(3)[i], outside(1, 3)[i], 1<<20); seen != outside(1, 2)[i] {
			t.Errorf("%v sees the client as %v", outside(1, 3)[i], seen)
		}
		if seen := transfer(t, a, a, inside(2)[i], outside(1, 2)[i], 1<<20); seen != outside(1, 2)[i] {
			t.Errorf("%v sees itself as %v", outside(1, 2)[i], seen)
		}
	}
}

// The path's MTU gets back to the container through the mapping, and its TCP goes
// on.
func TestPathMTU(t *testing.T) {
	w := newWorld(t)
	one, two := w.join(dual(), 1, Uplink{}), w.join(dual(), 2, Uplink{})
	a := one.attach("a", mapped(inside(2), outside(1, 2)))
	b := two.attach("b", mapped(inside(2), outside(2, 2)))
	b.ServeEcho(7)
	w.mtu.Store(1300)
	for i, to := range outside(2, 2) {
		before := w.tooBig.Load()
		transfer(t, a, b, inside(2)[i], to, 4<<20)
		if w.tooBig.Load() == before {
			t.Errorf("%v: nothing was too large: this shows nothing", to)
		}
		// Datagrams learn it, too.
		c := dialUDP(t, a, netip.AddrPortFrom(to, 7))
		level, name, header := unix.IPPROTO_IP, unix.IP_MTU, 28
		if to.Is6() {
			level, name, header = unix.IPPROTO_IPV6, unix.IPV6_MTU, 48
		}
		if mtu := socketInt(t, c, level, name); mtu != 1300 {
			t.Errorf("%v: the kernel knows an MTU of %d, want 1300", to, mtu)
		}
		if err := exchange(c, 1300-header); err != nil {
			t.Errorf("%v: a datagram that fits: %v", to, err)
		}
	}
}

func socketInt(t *testing.T, c *net.UDPConn, level, name int) (v int) {
	t.Helper()
	control(t, c, func(fd int) (err error) {
		v, err = unix.GetsockoptInt(fd, level, name)
		return err
	})
	return v
}

func control(t *testing.T, c *net.UDPConn, f func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var inner error
	if err := errors.Join(raw.Control(func(fd uintptr) { inner = f(int(fd)) }), inner); err != nil {
		t.Fatal(err)
	}
}

// A port that is closed says so, from one host to the other: the error quotes a
// packet that both hosts have rewritten.
func TestPortUnreachable(t *testing.T) {
	w := newWorld(t)
	one, two := w.join(dual(), 1, Uplink{}), w.join(dual(), 2, Uplink{})
	a := one.attach("a", mapped(inside(2), outside(1, 2)))
	two.attach("b", mapped(inside(2), outside(2, 2)))
	for _, to := range outside(2, 2) {
		expectError(t, dialUDP(t, a, netip.AddrPortFrom(to, 9)), syscall.ECONNREFUSED)
	}
}

// expectError sends a datagram and expects an error to come back.
func expectError(t *testing.T, c *net.UDPConn, want syscall.Errno) {
	t.Helper()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 10)); !errors.Is(err, want) {
		t.Errorf("%v: %v, want %v", c.RemoteAddr(), err, want)
	}
}

func TestTraceroute(t *testing.T) {
	w := newWorld(t)
	one, two := w.join(dual(), 1, Uplink{}), w.join(dual(), 2, Uplink{})
	a := one.attach("a", mapped(inside(2), outside(1, 2)))
	two.attach("b", mapped(inside(2), outside(2, 2)))
	for i, to := range outside(2, 2) {
		c := dialUDP(t, a, netip.AddrPortFrom(to, 33434))
		control(t, c, func(fd int) error {
			if to.Is4() {
				return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1), unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 1))
			}
			return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1), unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 1))
		})
		expectError(t, c, syscall.EHOSTUNREACH)
		oob := make([]byte, 512)
		control(t, c, func(fd int) error {
			_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 10), oob, unix.MSG_ERRQUEUE)
			oob = oob[:n]
			return err
		})
		if !bytes.Contains(oob, gateway[i].AsSlice()) {
			t.Errorf("%v: the error does not name the gateway as the hop: %x", to, oob)
		}
	}
}

// Without a tunnel, and without an address of the block, nothing leaves; both may
// come later than the container.
func TestFailsClosed(t *testing.T) {
	w := newWorld(t)
	two := w.join(dual(), 2, Uplink{})
	b := two.attach("b", mapped(inside(2), outside(2, 2)))
	b.ServeEcho(7)
	one := w.join(dual(), 1, Uplink{})
	up := one.table.Load().views[one.Exit].uplink
	one.SetUplink(nil)
	a := one.attach("a", mapped(inside(2), nil))
	send := func(why packet.Drop) {
		t.Helper()
		for _, to := range outside(2, 2) {
			before := one.dropped(why)
			c := dialUDP(t, a, netip.AddrPortFrom(to, 7))
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			eventually(t, func() error {
				if one.dropped(why) == before {
					return fmt.Errorf("nothing is dropped for the reason %v: %v", why, one.drops.Snapshot())
				}
				return nil
			})
		}
	}
	send(packet.DropNoSession)
	one.SetUplink(up)
	send(packet.DropUnmapped)
	if err := one.SetOutside("a", mapped(inside(2), outside(1, 2))); err != nil {
		t.Fatal(err)
	}
	for _, to := range outside(2, 2) {
		if err := exchange(dialUDP(t, a, netip.AddrPortFrom(to, 7)), 100); err != nil {
			t.Errorf("%v, once there is a way: %v", to, err)
		}
	}
	one.SetUplink(nil)
	send(packet.DropNoSession)
}
