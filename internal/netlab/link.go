package netlab

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A LinkConfig describes a veth pair. The zero value is two unnamed ends without
// addresses, MTU 1500, as fast as the machine.
type LinkConfig struct {
	// A and B are the ends in the first and the second namespace.
	A, B End
	// MTU of both ends; zero means 1500.
	MTU int
	// Rate in bits a second, for each direction; zero means unlimited.
	Rate uint64
}

// An End is one end of a link.
type End struct {
	// Name of the interface; empty means "eth0".
	Name string
	// Addresses with their prefix lengths.
	Addresses []netip.Prefix
}

// An Iface is an interface in a namespace.
type Iface struct {
	NS    *NS
	Name  string
	Index int
}

// Link joins two namespaces with a veth pair, both ends up.
func (l *Lab) Link(a, b *NS, cfg LinkConfig) (ia, ib *Iface) {
	l.tb.Helper()
	if cfg.MTU == 0 {
		cfg.MTU = 1500
	}
	for _, end := range []*End{&cfg.A, &cfg.B} {
		if end.Name == "" {
			end.Name = "eth0"
		}
	}
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: cfg.A.Name, MTU: cfg.MTU},
		PeerName:      cfg.B.Name,
		PeerMTU:       uint32(cfg.MTU),
		PeerNamespace: netlink.NsFd(b.net.Fd()),
	}
	if err := a.nl.LinkAdd(veth); err != nil {
		l.tb.Fatalf("link %s and %s: %v", a.Name, b.Name, err)
	}
	ia, ib = a.Iface(cfg.A.Name), b.Iface(cfg.B.Name)
	ia.Up()
	ib.Up()
	for i, end := range []End{cfg.A, cfg.B} {
		iface := []*Iface{ia, ib}[i]
		iface.waitCarrier() // an address set before it takes a second to be usable
		for _, p := range end.Addresses {
			iface.Address(p)
		}
		iface.SetRate(cfg.Rate)
	}
	ia.waitAddresses()
	ib.waitAddresses()
	return ia, ib
}

// waitAddresses waits for the link-local address that the kernel sets.
func (i *Iface) waitAddresses() {
	i.NS.lab.tb.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		addrs, err := i.NS.nl.AddrList(i.link(), netlink.FAMILY_V6)
		i.check("list addresses", err)
		usable := func(a netlink.Addr) bool { return a.Flags&unix.IFA_F_TENTATIVE == 0 }
		if slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.IsLinkLocalUnicast() && usable(a) }) {
			return
		}
		if time.Now().After(deadline) {
			i.NS.lab.tb.Fatalf("%s in %s has no usable link-local address", i.Name, i.NS.Name)
		}
	}
}

func (i *Iface) waitCarrier() {
	i.NS.lab.tb.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		link, err := i.NS.nl.LinkByIndex(i.Index)
		i.check("wait for the carrier", err)
		if link.Attrs().OperState == netlink.OperUp {
			return
		}
		if time.Now().After(deadline) {
			i.NS.lab.tb.Fatalf("%s in %s has no carrier", i.Name, i.NS.Name)
		}
	}
}

// Iface finds an interface of the namespace.
func (n *NS) Iface(name string) *Iface {
	n.lab.tb.Helper()
	link, err := n.nl.LinkByName(name)
	if err != nil {
		n.lab.tb.Fatalf("find interface %s in %s: %v", name, n.Name, err)
	}
	return &Iface{NS: n, Name: name, Index: link.Attrs().Index}
}

func (i *Iface) link() netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: i.Name, Index: i.Index}}
}

func (i *Iface) check(what string, err error) {
	i.NS.lab.tb.Helper()
	if err != nil {
		i.NS.lab.tb.Fatalf("%s of %s in %s: %v", what, i.Name, i.NS.Name, err)
	}
}

// Address adds an address, usable at once.
func (i *Iface) Address(p netip.Prefix) {
	i.NS.lab.tb.Helper()
	addr := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	i.check("set address "+p.String(), i.NS.nl.AddrAdd(i.link(), addr))
}

// Down sets the interface down: the peer loses its carrier and keeps its routes,
// this end loses those by a neighbour for good. A cable that is pulled is Down at
// the end that has none.
func (i *Iface) Down() {
	i.NS.lab.tb.Helper()
	i.check("set down", i.NS.nl.LinkSetDown(i.link()))
}

// Up sets the interface up.
func (i *Iface) Up() {
	i.NS.lab.tb.Helper()
	i.check("set up", i.NS.nl.LinkSetUp(i.link()))
}

// SetMTU changes the MTU of this end alone.
func (i *Iface) SetMTU(mtu int) {
	i.NS.lab.tb.Helper()
	i.check("set MTU", i.NS.nl.LinkSetMTU(i.link(), mtu))
}

// SetRate limits what the interface sends, in bits a second, with a queue of
// 50 ms; zero removes the limit.
func (i *Iface) SetRate(bits uint64) {
	i.NS.lab.tb.Helper()
	attrs := netlink.QdiscAttrs{LinkIndex: i.Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	if bits == 0 {
		qdiscs, err := i.NS.nl.QdiscList(i.link())
		i.check("list queues", err)
		for _, q := range qdiscs {
			if q.Type() == "tbf" {
				i.check("remove rate", i.NS.nl.QdiscDel(q))
			}
		}
		return
	}
	bytes := bits / 8
	burst := max(bytes/200, 16<<10) // 5 ms
	i.check("set rate", i.NS.nl.QdiscReplace(&netlink.Tbf{
		QdiscAttrs: attrs,
		Rate:       bytes,
		Buffer:     netlink.Xmittime(bytes, uint32(burst)),
		Limit:      uint32(burst + bytes/20),
	}))
}

// Addresses returns the interface's addresses with their prefix lengths.
func (i *Iface) Addresses() []netip.Prefix {
	i.NS.lab.tb.Helper()
	addrs, err := i.NS.nl.AddrList(i.link(), netlink.FAMILY_ALL)
	i.check("list addresses", err)
	var ps []netip.Prefix
	for _, a := range addrs {
		ip, _ := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		ps = append(ps, netip.PrefixFrom(ip.Unmap(), ones))
	}
	return ps
}

// Route sends what is for dst to a neighbour.
func (n *NS) Route(dst netip.Prefix, via netip.Addr) {
	n.lab.tb.Helper()
	n.routeFrom(dst, via, netip.Addr{})
}

// routeFrom is Route with the source address that the namespace's own packets
// get; the zero one leaves it to the kernel.
func (n *NS) routeFrom(dst netip.Prefix, via, src netip.Addr) {
	n.lab.tb.Helper()
	if err := n.nl.RouteAdd(&netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice(), Src: src.AsSlice()}); err != nil {
		n.lab.tb.Fatalf("route %s by %s in %s: %v", dst, via, n.Name, err)
	}
}

// DefaultRoute sends all that has no other route to the neighbours given.
func (n *NS) DefaultRoute(via ...netip.Addr) {
	n.lab.tb.Helper()
	for _, v := range via {
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if v.Is6() {
			all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		n.Route(all, v)
	}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
