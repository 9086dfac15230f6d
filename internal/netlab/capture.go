package netlab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A Capture watches one interface. The kernel sorts out the tunnel's packets and
// only counts them, so that it costs a busy tunnel next to nothing.
type Capture struct {
	iface   *Iface
	ends    []netip.AddrPort // of the tunnel
	onLink  []netip.Prefix   // the interface's addresses
	inClear func(src, dst netip.Addr) bool
	tunnels int // socket that takes the tunnel's packets, never read
	others  int // socket that takes all the rest

	mu    sync.Mutex // guards seen
	seen  Traffic
	parse [2048]byte // buffer, under mu
}

// Traffic is what a Capture saw, in packets (a super-packet counts once).
type Traffic struct {
	// Tunnel packets are UDP to or from the tunnel's end.
	Tunnel uint64
	// Clear packets go to a destination off the link, or are what CaptureClear
	// was told. They are not the tunnel's, nor the ICMP errors of a kernel about
	// those, which show no more than they.
	Clear uint64
	// DNS packets are those of port 53, whatever their destination.
	DNS uint64
	// Lost packets were not the tunnel's and came faster than they were looked
	// at. Any of them may have been clear.
	Lost uint64
	// Samples describe the first clear and DNS packets.
	Samples []string
}

// Problem says what is wrong with the traffic of an uplink that is meant to show
// a tunnel and nothing in clear; empty if nothing.
func (t Traffic) Problem() string {
	var wrong []string
	if t.Tunnel == 0 {
		wrong = append(wrong, "no packet of the tunnel was seen")
	}
	if leak := t.Leak(); leak != "" {
		wrong = append(wrong, leak)
	}
	return strings.Join(wrong, "; ")
}

// Leak says what of the traffic was not the tunnel's; empty if nothing.
func (t Traffic) Leak() string {
	if t.Clear == 0 && t.DNS == 0 && t.Lost == 0 {
		return ""
	}
	return fmt.Sprintf("%d packets in clear, %d of port 53, %d lost by the capture: %s",
		t.Clear, t.DNS, t.Lost, strings.Join(t.Samples, ", "))
}

// Capture starts to watch the interface, both directions, from now on. The
// tunnel's packets are those of UDP to or from the given ends.
func (i *Iface) Capture(tunnel ...netip.AddrPort) *Capture {
	i.NS.lab.tb.Helper()
	return i.capture(nil, tunnel)
}

// CaptureClear is Capture for a link that carries more than the tunnel: in clear
// are those packets alone of which a function says so.
func (i *Iface) CaptureClear(inClear func(src, dst netip.Addr) bool, tunnel ...netip.AddrPort) *Capture {
	i.NS.lab.tb.Helper()
	return i.capture(inClear, tunnel)
}

func (i *Iface) capture(inClear func(src, dst netip.Addr) bool, tunnel []netip.AddrPort) *Capture {
	i.NS.lab.tb.Helper()
	c := &Capture{iface: i, ends: tunnel, onLink: i.Addresses(), inClear: inClear}
	if c.inClear == nil {
		c.inClear = func(_, dst netip.Addr) bool { return !c.local(dst) }
	}
	i.NS.must("capture "+i.Name, func() (err error) {
		if c.tunnels, err = packetSocket(i.Index, tunnelFilter(tunnel, 1, 0), 1); err != nil {
			return err
		}
		i.NS.lab.onClose(func() { unix.Close(c.tunnels) })
		if c.others, err = packetSocket(i.Index, tunnelFilter(tunnel, 0, 256), 8<<20); err != nil {
			return err
		}
		i.NS.lab.onClose(func() { unix.Close(c.others) })
		return nil
	})
	return c
}

// packetSocket opens a socket that takes whole IP packets from an interface.
func packetSocket(index int, filter []bpf.Instruction, buffer int) (int, error) {
	raw, err := bpf.Assemble(filter)
	if err != nil {
		return -1, fmt.Errorf("assemble filter: %w", err)
	}
	prog := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		prog[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	// Protocol 0: nothing arrives before the filter is there.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open packet socket: %w", err)
	}
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: index}))
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("set up packet socket: %w", err)
	}
	return fd, nil
}

func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// tunnelFilter returns a socket filter that takes hit bytes of the tunnels'
// packets and miss bytes of all others.
func tunnelFilter(ends []netip.AddrPort, hit, miss uint32) []bpf.Instruction {
	const (
		source      = 0
		destination = 1
	)
	var prog []bpf.Instruction
	// all appends a run of tests that must all hold for the packet to be a hit.
	type test struct {
		load bpf.Instruction
		want uint32
	}
	all := func(tests []test) {
		for i, t := range tests {
			after := 2*(len(tests)-i-1) + 1 // the tests left, and the return
			prog = append(prog, t.load, bpf.JumpIf{Cond: bpf.JumpEqual, Val: t.want, SkipFalse: uint8(after)})
		}
		prog = append(prog, bpf.RetConstant{Val: hit})
	}
	for _, end := range ends {
		for which := uint32(source); which <= destination; which++ {
			addr := end.Addr().Unmap()
			raw := addr.AsSlice()
			var tests []test
			var at, ports uint32
			if addr.Is4() {
				tests = []test{
					{bpf.LoadExtension{Num: bpf.ExtProto}, unix.ETH_P_IP},
					{bpf.LoadAbsolute{Off: 0, Size: 1}, 0x45}, // no options
					{bpf.LoadAbsolute{Off: 9, Size: 1}, unix.IPPROTO_UDP},
				}
				at, ports = 12, 20
			} else {
				tests = []test{
					{bpf.LoadExtension{Num: bpf.ExtProto}, unix.ETH_P_IPV6},
					{bpf.LoadAbsolute{Off: 6, Size: 1}, unix.IPPROTO_UDP},
				}
				at, ports = 8, 40
			}
			for w := 0; w < len(raw); w += 4 {
				tests = append(tests, test{
					bpf.LoadAbsolute{Off: at + which*uint32(len(raw)) + uint32(w), Size: 4},
					binary.BigEndian.Uint32(raw[w:]),
				})
			}
			all(append(tests, test{bpf.LoadAbsolute{Off: ports + which*2, Size: 2}, uint32(end.Port())}))
		}
	}
	return append(prog, bpf.RetConstant{Val: miss})
}

// Traffic returns what was seen so far.
func (c *Capture) Traffic() Traffic {
	c.iface.NS.lab.tb.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	taken, _, err := statistics(c.tunnels)
	c.iface.check("count tunnel packets", err)
	c.seen.Tunnel += taken
	for {
		n, _, err := unix.Recvfrom(c.others, c.parse[:], 0)
		switch {
		case err == nil:
			c.lookAt(c.parse[:n])
			continue
		case errors.Is(err, unix.ENETDOWN) || errors.Is(err, unix.EINTR):
			continue // said once for each time the link went down
		case !errors.Is(err, unix.EAGAIN):
			c.iface.check("read capture", err)
		}
		break
	}
	_, lost, err := statistics(c.others)
	c.iface.check("count lost packets", err)
	c.seen.Lost += lost
	t := c.seen
	t.Samples = slices.Clone(t.Samples)
	return t
}

// statistics returns a packet socket's counts since the last call: all that
// passed its filter, and how many of them found its buffer full.
func statistics(fd int) (taken, lost uint64, err error) {
	s, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return 0, 0, err
	}
	return uint64(s.Packets), uint64(s.Drops), nil
}

func (c *Capture) lookAt(p []byte) {
	s, ok := summarize(p)
	if !ok {
		return // not IP: ARP
	}
	if q, ok := quoted(p); ok && s.dst.Addr() == q.src.Addr() && (slices.Contains(c.ends, q.src) || slices.Contains(c.ends, q.dst)) {
		return
	}
	isDNS := s.src.Port() == 53 || s.dst.Port() == 53
	isClear := c.inClear(s.src.Addr(), s.dst.Addr())
	if isDNS {
		c.seen.DNS++
	}
	if isClear {
		c.seen.Clear++
	}
	if (isDNS || isClear) && len(c.seen.Samples) < 5 {
		c.seen.Samples = append(c.seen.Samples, s.String())
	}
}

// quoted summarizes the packet that an ICMP error is about.
func quoted(p []byte) (s summary, ok bool) {
	var head int
	var isError bool
	switch {
	case p[0]>>4 == 4 && p[9] == unix.IPPROTO_ICMP:
		head = int(p[0]&15) * 4
		isError = len(p) > head && (p[head] == 3 || p[head] == 11 || p[head] == 12)
	case p[0]>>4 == 6 && p[6] == unix.IPPROTO_ICMPV6:
		head = 40
		isError = len(p) > head && p[head] < 128
	}
	if !isError || len(p) < head+8 {
		return s, false
	}
	s, ok = summarize(p[head+8:])
	return s, ok && s.proto == unix.IPPROTO_UDP
}

// local says whether the destination is on the link.
func (c *Capture) local(a netip.Addr) bool {
	if a.IsLinkLocalUnicast() || a.IsLinkLocalMulticast() || a.IsInterfaceLocalMulticast() ||
		a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return true
	}
	return slices.ContainsFunc(c.onLink, func(p netip.Prefix) bool { return p.Contains(a) })
}

// A summary is one packet in a word. Ports are zero where it shows none.
type summary struct {
	src, dst netip.AddrPort
	proto    byte
	size     int
}

func (s summary) String() string {
	name, ok := map[byte]string{1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6"}[s.proto]
	if !ok {
		name = fmt.Sprintf("protocol %d", s.proto)
	}
	return fmt.Sprintf("%s %s > %s (%d bytes)", name, s.src, s.dst, s.size)
}

func summarize(p []byte) (s summary, ok bool) {
	var src, dst netip.Addr
	var head int
	ports := true
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		head, s.proto, s.size = int(p[0]&15)*4, p[9], int(binary.BigEndian.Uint16(p[2:]))
		src, dst = netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:]))
		ports = binary.BigEndian.Uint16(p[6:])&0x1fff == 0
	case len(p) >= 40 && p[0]>>4 == 6:
		head, s.proto, s.size = 40, p[6], 40+int(binary.BigEndian.Uint16(p[4:]))
		src, dst = netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
	default:
		return s, false
	}
	s.src, s.dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	if ports && (s.proto == unix.IPPROTO_TCP || s.proto == unix.IPPROTO_UDP) && len(p) >= head+4 {
		s.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(p[head:]))
		s.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(p[head+2:]))
	}
	return s, true
}
