package tunnel

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Sending:
//
//  1. WriteMsgUDP gets from quic-go up to 20 KB in segments of one size, or one
//     packet. What was held for another destination, size or control message is
//     flushed first.
//  2. Whole segments are held. A short one ends the run and flushes it, as does
//     a full buffer: nothing could be gained by waiting.
//  3. The flusher yields once, so that a busy writer comes back with more, and
//     then flushes. On an idle machine it runs at once.
//  4. A flush is one sendmsg. Where the kernel refuses it as such, it is repeated
//     segment by segment.

const (
	// maxAggregate leaves room for the headers below 64 KB.
	maxAggregate = 65000
	// maxSegments is what kernels before 6.9 allow in one sendmsg.
	maxSegments = 64
)

// sender is the sending side of a socket. Its lock keeps the order of packets
// and is held while sendmsg waits for room.
type sender struct {
	wake chan struct{} // tells the flusher that something is held

	mu     sync.Mutex // guards the fields below
	closed bool
	gso    bool
	failed error          // of a flush that no writer waited for
	held   []byte         // whole segments that wait to be sent
	seg    int            // their size
	to     netip.AddrPort // their destination
	oob    []byte         // their control messages
	plain  []byte         // scratch: control messages without UDP_SEGMENT
	events []tooBigEvent  // to report when the lock is free
}

func (t *sender) init(gso bool) {
	t.gso = gso
	t.wake = make(chan struct{}, 1)
	if gso {
		t.held = make([]byte, 0, maxAggregate)
	}
}

// WriteTo sends one packet.
func (s *socket) WriteTo(b []byte, addr net.Addr) (int, error) {
	a, ok := addr.(*net.UDPAddr)
	if !ok {
		return 0, s.writeError(addr, syscall.EINVAL)
	}
	n, _, err := s.WriteMsgUDP(b, nil, a)
	return n, err
}

// WriteMsgUDP sends one packet, or several where oob has their size in a
// UDP_SEGMENT message; the last may be short. These may go out a moment later,
// and never after what is written later. Nothing is kept of b and oob.
//
// The error is EMSGSIZE for a single packet that the device cannot carry, or
// says that the socket is of no more use. Other packets that cannot be sent
// count as lost.
func (s *socket) WriteMsgUDP(b, oob []byte, addr *net.UDPAddr) (n, oobn int, err error) {
	ap := addr.AddrPort()
	to := netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	if !to.IsValid() || s.only4 && !to.Addr().Is4() {
		return 0, 0, s.writeError(addr, unix.EAFNOSUPPORT)
	}
	s.tx.mu.Lock()
	err = s.writeLocked(b, oob, to)
	events := s.tx.takeEventsLocked()
	s.tx.mu.Unlock()
	s.report(events)
	if err != nil {
		return 0, 0, err
	}
	return len(b), len(oob), nil
}

func (s *socket) writeError(addr net.Addr, err error) error {
	return &net.OpError{Op: "write", Net: "udp", Source: s.LocalAddr(), Addr: addr, Err: err}
}

func (t *sender) takeEventsLocked() []tooBigEvent {
	events := t.events
	t.events = nil
	return events
}

func (s *socket) writeLocked(b, oob []byte, to netip.AddrPort) error {
	t := &s.tx
	if t.closed {
		return s.writeError(net.UDPAddrFromAddrPort(to), net.ErrClosed)
	}
	if err := t.failed; err != nil {
		t.failed = nil
		return err
	}
	s.errs.sent(to, b)
	seg := segmentSize(oob)
	if len(t.held) > 0 && (seg != t.seg || to != t.to || !bytes.Equal(oob, t.oob)) {
		if err := s.flushLocked(); err != nil {
			return err
		}
	}
	switch {
	case seg == 0:
		_, err := s.sendOneLocked(b, oob, to)
		return err
	case !t.gso || seg > maxAggregate:
		_, err := s.sendSegmentsLocked(b, seg, oob, to)
		return err
	}
	return s.holdLocked(b, seg, oob, to)
}

// holdLocked adds segments to those that are held and flushes when no more may
// follow.
func (s *socket) holdLocked(b []byte, seg int, oob []byte, to netip.AddrPort) error {
	t := &s.tx
	full := min(maxAggregate/seg, maxSegments) * seg
	if len(t.held) > 0 {
		s.counts.merged.Add(1)
	}
	for len(b) > 0 {
		if len(t.held) == 0 {
			t.seg, t.to = seg, to
			t.oob = append(t.oob[:0], oob...)
		}
		n := min(len(b), full-len(t.held))
		t.held = append(t.held, b[:n]...)
		b = b[n:]
		if n%seg != 0 || len(t.held) == full {
			if err := s.flushLocked(); err != nil {
				return err
			}
		}
	}
	if len(t.held) > 0 {
		select {
		case t.wake <- struct{}{}:
		default: // the flusher is on its way
		}
	}
	return nil
}

// runFlusher flushes what is held, until the socket closes.
func (s *socket) runFlusher() {
	t := &s.tx
	for range t.wake {
		runtime.Gosched()
		t.mu.Lock()
		if err := s.flushLocked(); err != nil {
			t.failed = err
		}
		events := t.takeEventsLocked()
		t.mu.Unlock()
		s.report(events)
	}
}

func (t *sender) close(s *socket) error {
	t.mu.Lock()
	err := s.flushLocked()
	t.closed = true
	close(t.wake)
	events := t.takeEventsLocked()
	t.mu.Unlock()
	s.report(events)
	return err
}

// flushLocked sends what is held. An error says that the socket is of no more use.
func (s *socket) flushLocked() error {
	t := &s.tx
	b := t.held
	if len(b) == 0 {
		return nil
	}
	t.held = b[:0] // b stays as it is: the lock is held
	err := s.sendmsgLocked(b, t.oob, t.to)
	if err == nil {
		return nil
	}
	switch errno := errnoOf(err); errno {
	case unix.EIO, unix.EINVAL, unix.EMSGSIZE:
		// Not possible with this device, or a segment too large for it (EINVAL in
		// kernels before 6.14): segment by segment it goes, or says why not.
		sent, err := s.sendSegmentsLocked(b, t.seg, t.oob, t.to)
		if sent && errno != unix.EMSGSIZE {
			s.counts.gsoRefused.Add(1)
			t.gso = false
		}
		return err
	}
	return s.settleLocked(err, (len(b)+t.seg-1)/t.seg, t.to)
}

// sendSegmentsLocked sends segments one by one, and says whether one of full
// size was sent. Those of a size that the device cannot carry are left out and
// are no error.
func (s *socket) sendSegmentsLocked(b []byte, seg int, oob []byte, to netip.AddrPort) (sent bool, err error) {
	t := &s.tx
	t.plain = appendWithoutSegmentSize(t.plain[:0], oob)
	tooBig := false
	for ; len(b) > 0; b = b[min(seg, len(b)):] {
		if tooBig && len(b) >= seg {
			s.counts.tooBig.Add(1)
			continue
		}
		ok, err := s.sendOneLocked(b[:min(seg, len(b))], t.plain, to)
		if err != nil && errnoOf(err) != unix.EMSGSIZE {
			return sent, err
		}
		tooBig = tooBig || err != nil
		sent = sent || ok && len(b) >= seg
	}
	return sent, nil
}

// sendOneLocked sends one packet and says whether it went out.
func (s *socket) sendOneLocked(b, oob []byte, to netip.AddrPort) (sent bool, err error) {
	if err := s.sendmsgLocked(b, oob, to); err != nil {
		return false, s.settleLocked(err, 1, to)
	}
	return true, nil
}

// sendmsgLocked sends one message. The kernel reports an ICMP error that came
// for an earlier packet, to whatever destination, as an error of the next call
// and sends nothing; so an error is believed when it comes a second time.
func (s *socket) sendmsgLocked(b, oob []byte, to netip.AddrPort) error {
	s.counts.sends.Add(1)
	_, _, err := s.conn.WriteMsgUDPAddrPort(b, oob, to)
	switch errnoOf(err) {
	case 0, unix.ENOBUFS, unix.ENOMEM, unix.EIO:
		// Sent, or no way to be an ICMP error. After ENOBUFS some of the segments
		// may be on their way.
		return err
	}
	s.tx.events = append(s.tx.events, s.drainErrors()...)
	s.counts.sends.Add(1)
	_, _, err = s.conn.WriteMsgUDPAddrPort(b, oob, to)
	return err
}

// settleLocked decides what becomes of n packets that failed. It returns nil if
// they count as lost: whatever is wrong with the network or with one destination
// may pass, and is no reason to end a connection, let alone one to another peer.
func (s *socket) settleLocked(err error, n int, to netip.AddrPort) error {
	switch errno := errnoOf(err); errno {
	case unix.EMSGSIZE:
		s.tx.events = append(s.tx.events, s.drainErrors()...)
		s.tx.events = append(s.tx.events, tooBigEvent{to, s.errs.deviceMTU(to.Addr())})
		s.counts.tooBig.Add(uint64(n))
		return err
	case 0, unix.EBADF, unix.ENOTSOCK, unix.EFAULT, unix.EPIPE, unix.EDESTADDRREQ:
		// Zero is closed, or a deadline.
		s.counts.failed(err)
		return err
	default:
		s.counts.lost.Add(uint64(n))
		s.counts.failed(err)
		return nil
	}
}

// errnoOf returns the system call's error within err; zero if there is none.
func errnoOf(err error) syscall.Errno {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	return 0
}
