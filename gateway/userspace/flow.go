package userspace

import (
	"encoding/binary"
	"errors"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

const (
	udpIdle  = 5 * time.Minute  // RFC 4787, section 4.3
	dnsIdle  = 30 * time.Second // of a flow that only asks name servers
	echoIdle = time.Minute      // RFC 5508, section 3.2
	namePort = 53

	// maxRemotes is to how many addresses a flow remembers to have sent. One more
	// has another one forgotten.
	maxRemotes = 4096
	// maxSegments is what all kernels with UDP_SEGMENT take.
	maxSegments = 64
)

// A key is a client's endpoint: its address, and the port, or the identifier of echo
// requests.
type key struct {
	from  netip.AddrPort
	proto uint8
}

// A flow is a socket that stands for a client's endpoint.
type flow struct {
	owned
	exit *Exit
	key  key
	sock *socket
	// queue is that of its answers.
	queue int
	used  atomic.Int64 // when the client sent last, in Unix nanoseconds
	idle  atomic.Int64 // after which it ends

	mu      sync.Mutex // guards what follows
	remotes map[netip.Addr]struct{}
}

// flow returns the flow of a client's endpoint, a new one if there is none.
func (e *Exit) flow(k key) (*flow, error) {
	e.mu.Lock()
	f := e.flows[k]
	e.mu.Unlock()
	owner := e.cfg.Owner(k.from.Addr())
	if f != nil && f.owner == owner {
		return f, nil
	}
	if owner == "" {
		return nil, errNobody
	}
	release, ok := e.cfg.Take(k.from.Addr())
	if !ok {
		return nil, errFull
	}
	f = &flow{owned: owned{owner: owner}, exit: e, key: k, remotes: make(map[netip.Addr]struct{}),
		queue: int((uint32(k.from.Port()) ^ uint32(k.from.Addr().As16()[15])) % uint32(e.cfg.Queues))}
	if err := e.cfg.Do(func() (err error) { f.sock, err = open(k); return err }); err != nil {
		release()
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		f.sock.close()
		release()
		return nil, errFull
	}
	if old := e.flows[k]; old != nil && old.owner == owner { // which another queue has opened meanwhile
		f.sock.close()
		release()
		return old, nil
	} else if old != nil {
		old.sock.close()
	}
	e.flows[k] = f
	f.used.Store(time.Now().UnixNano())
	e.running.Go(func() {
		f.receive()
		e.mu.Lock()
		if e.flows[k] == f {
			delete(e.flows, k)
		}
		e.mu.Unlock()
		f.sock.close()
		release()
	})
	return f, nil
}

var (
	errFull   = errors.New("no room for another socket")
	errNobody = errors.New("nobody has the address")
)

// touch notes that the client sends to an address.
func (f *flow) touch(to netip.Addr, idle time.Duration) {
	f.used.Store(time.Now().UnixNano())
	if f.idle.Load() < int64(idle) {
		f.idle.Store(int64(idle))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, known := f.remotes[to]; known {
		return
	}
	if len(f.remotes) >= maxRemotes {
		for other := range f.remotes {
			delete(f.remotes, other)
			break
		}
	}
	f.remotes[to] = struct{}{}
}

func (f *flow) knows(from netip.Addr) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, known := f.remotes[from]
	return known
}

// sendUDP sends a datagram, or the datagrams of a super-packet.
func (e *Exit) sendUDP(pkt *packet.Packet, h packet.Header) {
	end := len(pkt.Data)
	if pkt.Segment == 0 {
		// What is behind the datagram's own end is not sent.
		end = h.IPLen + int(binary.BigEndian.Uint16(pkt.Data[h.IPLen+4:]))
	}
	if end < h.HeaderLen || end > len(pkt.Data) || h.DstPort == 0 || !pkt.ChecksumHolds(h) && pkt.Segment == 0 {
		e.cfg.Drops.Add(packet.DropMalformed, 1)
		return
	}
	idle := udpIdle
	if h.DstPort == namePort {
		idle = dnsIdle
	}
	payload := pkt.Data[h.HeaderLen:end]
	e.send(pkt, key{netip.AddrPortFrom(h.Src, h.SrcPort), packet.UDP}, netip.AddrPortFrom(h.Dst, h.DstPort), payload, idle)
}

// sendEcho sends an echo request. The kernel puts its own identifier in.
func (e *Exit) sendEcho(pkt *packet.Packet, h packet.Header) {
	t := pkt.Data[h.IPLen:]
	k := key{netip.AddrPortFrom(h.Src, binary.BigEndian.Uint16(t[4:])), h.Proto}
	e.send(pkt, k, netip.AddrPortFrom(h.Dst, 0), t, echoIdle)
}

func (e *Exit) send(pkt *packet.Packet, k key, to netip.AddrPort, payload []byte, idle time.Duration) {
	f, err := e.flow(k)
	if err == nil {
		f.touch(to.Addr(), idle)
		err = f.sendAll(payload, int(pkt.Segment), to)
	}
	switch {
	case err == nil:
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EAFNOSUPPORT), errors.Is(err, syscall.EADDRNOTAVAIL):
		e.refuse(pkt, packet.NoRoute) // at once where the host has no such IP version
	case errors.Is(err, syscall.EHOSTUNREACH):
		e.refuse(pkt, packet.HostUnreachable)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		e.refuse(pkt, packet.AdminProhibited)
	default:
		e.cfg.Drops.Add(packet.DropQueueFull, 1)
	}
}

// sendAll sends a super-packet in as few calls as the kernel allows.
func (f *flow) sendAll(payload []byte, segment int, to netip.AddrPort) error {
	if segment == 0 || len(payload) <= segment {
		return f.sock.send(payload, 0, to)
	}
	for whole := !f.sock.single.Load(); len(payload) > 0; {
		n := min(len(payload), segment)
		if whole {
			n = min(len(payload), segment*min(maxSegments, math.MaxUint16/segment))
		}
		err := f.sock.send(payload[:n], segment, to)
		if whole && (errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EMSGSIZE)) {
			f.sock.single.Store(true) // the device or the path does not take them
			whole = false
			continue
		}
		if err != nil {
			return err
		}
		payload = payload[n:]
	}
	return nil
}

// receive hands what comes to the client, until the socket is closed.
func (f *flow) receive() {
	for {
		if f.sock.receive(f.take, f.fail) != nil {
			return
		}
	}
}

// mine reports whether the client's address is still the client's.
func (f *flow) mine() bool { return f.exit.cfg.Owner(f.key.from.Addr()) == f.owner }

// take takes what came from an address; segment is the size of the datagrams that
// the kernel has merged, or 0.
func (f *flow) take(payload []byte, segment int, from netip.AddrPort) {
	e := f.exit
	if !f.knows(from.Addr()) {
		e.cfg.Drops.Add(packet.DropSource, 1)
		return
	}
	if !f.mine() {
		e.cfg.Drops.Add(packet.DropNoSession, 1)
		return
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	var pkt packet.Packet
	if f.key.proto == packet.UDP {
		pkt.Data = packet.AppendUDP((*buf)[:0], from, f.key.from, payload)
		h, err := packet.Parse(pkt.Data)
		if err != nil {
			e.cfg.Drops.Add(packet.DropMalformed, 1)
			return
		}
		if segment > 0 && segment < len(payload) {
			pkt.Segment = uint16(segment)
			pkt.SetPartial(h)
		}
	} else if pkt.Data = appendEcho((*buf)[:0], from.Addr(), f.key, payload); pkt.Data == nil {
		return
	}
	e.cfg.Answer(f.queue, []packet.Packet{pkt})
}

// fail tells the client of an ICMP error about what it sent.
func (f *flow) fail(errno syscall.Errno, payload []byte, to netip.AddrPort) {
	if !f.mine() || !f.knows(to.Addr()) {
		return
	}
	var why packet.Unreachable
	switch errno {
	case syscall.ECONNREFUSED:
		why = packet.PortUnreachable
	case syscall.EHOSTUNREACH:
		why = packet.HostUnreachable
	case syscall.ENETUNREACH:
		why = packet.NoRoute
	case syscall.EACCES:
		why = packet.AdminProhibited
	default:
		return
	}
	if f.key.proto == packet.UDP {
		f.exit.cfg.Refuse(packet.AppendUDP(nil, f.key.from, to, payload), why)
	} else if len(payload) >= echoHeader {
		f.exit.cfg.Refuse(appendICMP(nil, f.key.from.Addr(), to.Addr(), f.key, payload[0], payload), why)
	}
}

var buffers = sync.Pool{New: func() any { b := make([]byte, math.MaxUint16+64); return &b }}

func family(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
