package tunnel

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How the path's MTU is learned: an ICMP Fragmentation Needed or Packet Too Big
// that comes for a packet of ours puts an entry with its MTU on the socket's
// error queue (IP_RECVERR), and a packet that the device itself cannot carry puts
// one with the device's. The next call on the socket, read or write, then fails
// with the entry's error number, and whoever made it drains the queue.
//
// Anyone can forge ICMP. A report is believed if it quotes from our packet the
// connection ID, which nobody off the path knows (RFC 9000, section 14.2.1).
// Routers that quote less than that are not believed either.

// A tooBigEvent is a call of OnTooBig that is due.
type tooBigEvent struct {
	remote netip.AddrPort
	mtu    int
}

// errorQueue is what it takes to make sense of the error queue.
type errorQueue struct {
	seed maphash.Seed
	// sentTo has a hash of destination and connection ID for each pair that was
	// sent to lately, at an index taken from the hash.
	sentTo [4096]atomic.Uint64

	mu sync.Mutex // guards device
	// device has the MTU of the way to addresses for which it was exceeded. The
	// kernel does not say the port there; the writer that gets EMSGSIZE knows it.
	device map[netip.Addr]int
}

func (q *errorQueue) init() {
	q.seed = maphash.MakeSeed()
	q.device = make(map[netip.Addr]int)
}

// sent notes where a packet goes.
func (q *errorQueue) sent(to netip.AddrPort, b []byte) {
	if h, ok := q.hash(to, b); ok {
		if slot := q.slot(h); slot.Load() != h {
			slot.Store(h)
		}
	}
}

// wasSent reports whether b, which may be cut short, is from a packet that we
// sent to the address.
func (q *errorQueue) wasSent(to netip.AddrPort, b []byte) bool {
	h, ok := q.hash(to, b)
	return ok && q.slot(h).Load() == h
}

func (q *errorQueue) slot(h uint64) *atomic.Uint64 { return &q.sentTo[h%uint64(len(q.sentTo))] }

// hash returns a number for a destination and the first four bytes of the
// connection ID in a QUIC packet, long header or short (RFC 8999).
func (q *errorQueue) hash(to netip.AddrPort, b []byte) (uint64, bool) {
	start := 1
	if len(b) > 0 && b[0]&0x80 != 0 {
		start = 6
	}
	if len(b) < start+4 {
		return 0, false
	}
	var key [16 + 2 + 4]byte
	addr := to.Addr().As16()
	copy(key[:], addr[:])
	binary.NativeEndian.PutUint16(key[16:], to.Port())
	copy(key[18:], b[start:start+4])
	return maphash.Bytes(q.seed, key[:]), true
}

// deviceMTU returns what the device on the way to an address was found to carry;
// zero if that is not known.
func (q *errorQueue) deviceMTU(to netip.Addr) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.device[to.WithZone("")]
}

func (q *errorQueue) setDeviceMTU(to netip.Addr, mtu int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.device) >= 64 { // enough for what is in flight between two calls
		clear(q.device)
	}
	q.device[to.WithZone("")] = mtu
}

// drainErrors empties the socket's error queue and returns what has to be told
// to OnTooBig.
func (s *socket) drainErrors() (events []tooBigEvent) {
	var quote [64]byte
	var oob [256]byte
	// The bound is for a flood of ICMP, in which nobody else would get to run.
	for range 64 {
		var n, oobn int
		var from unix.Sockaddr
		var err error
		cerr := s.raw.Control(func(fd uintptr) {
			n, oobn, _, from, err = unix.Recvmsg(int(fd), quote[:], oob[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		})
		if cerr != nil || err != nil { // closed, or empty
			return events
		}
		controlMessages(oob[:oobn], func(level, typ int32, data, _ []byte) {
			is4 := level == unix.IPPROTO_IP && typ == unix.IP_RECVERR
			is6 := level == unix.IPPROTO_IPV6 && typ == unix.IPV6_RECVERR
			if (is4 || is6) && len(data) >= int(unsafe.Sizeof(unix.SockExtendedErr{})) {
				e := (*unix.SockExtendedErr)(unsafe.Pointer(&data[0]))
				events = s.socketError(e, socketAddress(from), quote[:n], events)
			}
		})
	}
	return events
}

func (s *socket) socketError(e *unix.SockExtendedErr, remote netip.AddrPort, quote []byte, events []tooBigEvent) []tooBigEvent {
	tooBig := syscall.Errno(e.Errno) == unix.EMSGSIZE
	switch e.Origin {
	case unix.SO_EE_ORIGIN_LOCAL:
		if tooBig {
			s.errs.setDeviceMTU(remote.Addr(), int(e.Info))
		}
		return events
	case unix.SO_EE_ORIGIN_ICMP, unix.SO_EE_ORIGIN_ICMP6:
		s.counts.icmpErrors.Add(1)
	default:
		return events
	}
	switch {
	case !tooBig:
		s.counts.failed(fmt.Errorf("send to %v: %w", remote, syscall.Errno(e.Errno)))
	case s.errs.wasSent(remote, quote):
		events = append(events, tooBigEvent{remote, int(e.Info)})
	default:
		s.counts.icmpIgnored.Add(1)
	}
	return events
}

// report calls OnTooBig; no lock is held.
func (s *socket) report(events []tooBigEvent) {
	if s.onTooBig == nil {
		return
	}
	for _, e := range events {
		s.onTooBig(e.remote, e.mtu)
	}
}

func socketAddress(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		ip := netip.AddrFrom16(sa.Addr).Unmap()
		if ip.Is6() && sa.ZoneId != 0 {
			ip = ip.WithZone(zoneName(sa.ZoneId))
		}
		return netip.AddrPortFrom(ip, uint16(sa.Port))
	}
	return netip.AddrPort{}
}
