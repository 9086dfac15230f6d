package tun

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A writer is the writing half of a queue.
type writer struct {
	dev   *Device
	put   func(fd uintptr) bool // w.putAll, made once
	out   []packet.Packet
	fd    uintptr
	gone  error // the device is
	co    packet.Coalescer
	split packet.Splitter
	hdr   [vnetLen]byte
	iov   [2 + 128]unix.Iovec
	// sys is the system call.
	sys func(fd uintptr, iov []unix.Iovec) unix.Errno
}

func (w *writer) init(d *Device) {
	w.dev = d
	w.put = w.putAll
	w.sys = writev
	w.co.Emit = w.emit
}

// Write gives packets to the kernel, in their order within each flow. Single
// packets of a flow that follow on each other are joined to super-packets first,
// and super-packets go out whole, or cut where the device does not take them.
// Lengths, offsets and checksums of super-packets are made anew: only Segment
// and Flags are believed. It may write to the packets and keeps none. It is safe
// for concurrent use.
//
// A packet that the kernel refuses is counted, and no error. It returns
// net.ErrClosed after Close, and an error where the link was deleted.
func (q *Queue) Write(pkts []packet.Packet) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.w.out, q.w.gone = pkts, nil
	err := q.conn.Write(q.w.put)
	q.w.out = nil
	if err != nil {
		q.dev.drops.Add(packet.DropClosed, len(pkts))
	}
	return q.dev.ioError(err, q.w.gone)
}

func (w *writer) putAll(fd uintptr) bool {
	w.fd = fd
	w.co.TCP, w.co.UDP = w.dev.offloads.WriteTSO, w.dev.offloads.WriteUSO
	for i := range w.out {
		p := &w.out[i]
		h, err := packet.Parse(p.Data)
		if err != nil || p.Segment != 0 && (h.Fragment || h.HeaderLen == h.IPLen) {
			w.dev.drops.Add(packet.DropMalformed, 1)
			continue
		}
		w.co.Add(p, h)
	}
	w.co.Flush()
	return true
}

// emit writes what comes out of the coalescer.
func (w *writer) emit(r *packet.Run) {
	h := &r.Header
	first := r.Packets[0]
	if r.Segment == 0 {
		w.single(first, h)
		return
	}
	given := len(r.Packets) == 1 // a super-packet that came as one
	if given {
		if len(first.Data)-h.HeaderLen <= int(first.Segment) || !w.whole(h) {
			w.cut(first, h)
			return
		}
		first.SetPartial(*h)
	}
	v := vnet{
		flags: unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, gso: unix.VIRTIO_NET_HDR_GSO_UDP_L4,
		hdrLen: uint16(h.HeaderLen), gsoSize: r.Segment,
		csumStart: uint16(h.IPLen), csumOffset: checksumOffset(h.Proto),
	}
	if h.Proto == packet.TCP {
		v.gso = unix.VIRTIO_NET_HDR_GSO_TCPV4
		if h.Version == 6 {
			v.gso = unix.VIRTIO_NET_HDR_GSO_TCPV6
		}
		if r.Pieces[0][h.IPLen+13]&0x80 != 0 { // CWR
			v.gso |= unix.VIRTIO_NET_HDR_GSO_ECN
		}
	}
	errno := w.super(v, r.Pieces)
	switch {
	case errno == 0:
	case errno != unix.EINVAL:
		w.failed(errno, len(r.Packets))
	case given:
		w.cut(first, h)
	default:
		for _, p := range r.Packets {
			w.single(p, h)
		}
	}
}

// whole reports whether the device takes a super-packet with such a header.
// With options or extension headers kernels differ in what they do.
func (w *writer) whole(h *packet.Header) bool {
	if h.Proto == packet.UDP {
		return h.Plain() && w.dev.offloads.WriteUSO
	}
	return h.Plain() && w.dev.offloads.WriteTSO
}

// cut writes a super-packet's segments.
func (w *writer) cut(p *packet.Packet, h *packet.Header) {
	w.split.Reset(p, *h, 0)
	for b := w.split.Next(); b != nil; b = w.split.Next() {
		w.plain(b)
	}
}

// single writes one packet as it is.
func (w *writer) single(p *packet.Packet, h *packet.Header) {
	if p.Flags&packet.Partial == 0 || h.Fragment || h.HeaderLen == h.IPLen {
		w.plain(p.Data)
		return
	}
	v := vnet{flags: unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, csumStart: uint16(h.IPLen), csumOffset: checksumOffset(h.Proto)}
	v.put(w.hdr[:])
	w.one(p.Data)
}

func (w *writer) plain(b []byte) {
	clear(w.hdr[:])
	w.one(b)
}

// one writes the header and a packet in one piece.
func (w *writer) one(b []byte) {
	w.set(0, w.hdr[:])
	w.set(1, b)
	errno := w.sys(w.fd, w.iov[:2])
	clear(w.iov[:2])
	if errno != 0 {
		w.failed(errno, 1)
	}
}

// super writes the header and the pieces of a super-packet.
func (w *writer) super(v vnet, pieces [][]byte) unix.Errno {
	v.put(w.hdr[:])
	w.set(0, w.hdr[:])
	for i, b := range pieces {
		w.set(1+i, b)
	}
	errno := w.sys(w.fd, w.iov[:1+len(pieces)])
	clear(w.iov[:1+len(pieces)])
	return errno
}

func (w *writer) set(i int, b []byte) {
	w.iov[i].Base = unsafe.SliceData(b)
	w.iov[i].SetLen(len(b))
}

// writev writes one packet. The kernel takes it through its whole network stack
// within the call.
func writev(fd uintptr, iov []unix.Iovec) unix.Errno {
	for {
		_, _, errno := unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		if errno != unix.EINTR {
			return errno
		}
	}
}

func (w *writer) failed(errno unix.Errno, packets int) {
	if errors.Is(errno, unix.EBADFD) {
		w.gone = errno
	}
	w.dev.drops.Add(packet.DropDevice, packets)
}
