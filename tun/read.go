package tun

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

const (
	maxPacket  = vnetLen + 65535
	readBudget = 512 << 10 // bytes that one Read hands out, about
)

// A readBuffer holds what one Read hands out. A queue has one from the first
// packet that it finds until it finds none: those that are idle, most of many,
// need none.
type readBuffer [readBudget + maxPacket]byte

var readBuffers = sync.Pool{New: func() any { return new(readBuffer) }}

// A Queue is one of the device's queues. One goroutine reads it; any number may
// write to it.
//
// The kernel gives the packets of a flow to the queue to which the flow's other
// direction was written last: who keeps a flow on one queue gets it from there.
type Queue struct {
	dev  *Device
	file *os.File
	conn syscall.RawConn

	// The reader's.
	drain   func(fd uintptr) bool // q.drainAll, made once
	buf     *readBuffer           // nil while it waits
	in      []packet.Packet
	n       int
	readErr error

	mu sync.Mutex // guards the writer
	w  writer
}

func newQueue(d *Device, f *os.File) (*Queue, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	q := &Queue{dev: d, file: f, conn: conn}
	q.drain = q.drainAll
	q.w.init(d)
	return q, nil
}

func (q *Queue) control(f func(fd int) error) error { return control(q.file, f) }

// Read waits for a packet and takes what else is there, up to len(pkts) packets
// or about 512 KB. The packets are valid, and the caller's to write to, until
// the next Read, which clears pkts where it has to wait. It returns net.ErrClosed
// after Close.
//
// Super-packets come whole, with their Segment. Partial and Verified are as the
// kernel says.
func (q *Queue) Read(pkts []packet.Packet) (int, error) {
	if len(pkts) == 0 {
		return 0, nil
	}
	q.in, q.n, q.readErr = pkts, 0, nil
	err := q.conn.Read(q.drain)
	if q.n == 0 {
		q.release()
	}
	q.in = nil
	if q.n > 0 {
		return q.n, nil // an error comes again
	}
	return 0, q.dev.ioError(err, q.readErr)
}

// ioError makes one error of the runtime's and of the system call's.
func (d *Device) ioError(runtime, call error) error {
	err := runtime
	if err == nil {
		err = call
	}
	switch {
	case err == nil:
		return nil
	case d.closed.Load():
		return net.ErrClosed
	case runtime != nil || errors.Is(call, unix.EBADFD):
		// The poller reports nothing but an error on it.
		return fmt.Errorf("tun: the link %s was deleted: open it anew: %w", d.name, err)
	}
	return fmt.Errorf("tun: %s: %w", d.name, err)
}

// drainAll reads until the queue is empty, and reports false where it was empty
// from the start.
func (q *Queue) drainAll(fd uintptr) bool {
	if q.buf == nil {
		q.buf = readBuffers.Get().(*readBuffer)
	}
	for off := 0; q.n < len(q.in) && off <= readBudget; {
		b := q.buf[off : off+maxPacket]
		n, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), maxPacket)
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			if q.n == 0 {
				q.release()
			}
			return q.n > 0
		default:
			q.readErr = errno
			return true
		}
		p, ok := decode(b[:n:n])
		if !ok {
			q.dev.drops.Add(packet.DropMalformed, 1)
			continue
		}
		q.in[q.n] = p
		q.n++
		// The IP header starts at a multiple of 16.
		off = (off+int(n)+vnetLen+15)&^15 - vnetLen
	}
	return true
}

// release gives the buffer back, if there is one. The caller's packets of the
// last time would keep it from the garbage collector.
func (q *Queue) release() {
	if q.buf != nil {
		clear(q.in)
		readBuffers.Put(q.buf)
		q.buf = nil
	}
}

// decode makes a packet of what the kernel handed out.
func decode(b []byte) (packet.Packet, bool) {
	if len(b) < vnetLen {
		return packet.Packet{}, false
	}
	v := parseVnet(b)
	p := packet.Packet{Data: b[vnetLen:]}
	h, err := packet.Parse(p.Data)
	if err != nil {
		return p, false
	}
	if v.flags&unix.VIRTIO_NET_HDR_F_NEEDS_CSUM != 0 {
		if int(v.csumStart) == h.IPLen && h.HeaderLen > h.IPLen && v.csumOffset == checksumOffset(h.Proto) {
			p.Flags |= packet.Partial
		} else if v.gso != unix.VIRTIO_NET_HDR_GSO_NONE || !packet.CompleteChecksumAt(p.Data, int(v.csumStart), int(v.csumOffset)) {
			return p, false
		}
	} else if v.flags&unix.VIRTIO_NET_HDR_F_DATA_VALID != 0 {
		p.Flags |= packet.Verified
	}
	switch v.gso {
	case unix.VIRTIO_NET_HDR_GSO_NONE:
		return p, true
	case unix.VIRTIO_NET_HDR_GSO_TCPV4, unix.VIRTIO_NET_HDR_GSO_TCPV6:
		if h.Proto != packet.TCP {
			return p, false
		}
	case unix.VIRTIO_NET_HDR_GSO_UDP_L4:
		if h.Proto != packet.UDP {
			return p, false
		}
	default:
		return p, false
	}
	if h.HeaderLen == h.IPLen || v.gsoSize == 0 {
		return p, false
	}
	if len(p.Data)-h.HeaderLen > int(v.gsoSize) {
		p.Segment = v.gsoSize
	}
	return p, true
}

// checksumOffset is where the checksum lies in a TCP or UDP header.
func checksumOffset(proto uint8) uint16 {
	if proto == packet.UDP {
		return 6
	}
	return 16
}
