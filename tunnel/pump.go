package tunnel

// The way of a packet through a session:
//
//  1. Send sorts: TCP between quicvpn peers goes to the outbox of its queue,
//     everything else to the datagram queue. Neither waits.
//  2. writeStream carries an outbox onto a unidirectional stream of its own as
//     frames of `length | segment size | flags | packet`.
//  3. writeDatagrams (datagram.go) sends the datagram queue as HTTP Datagrams (RFC 9297).
//  4. Receive starts readStream for every stream that the peer opens and
//     readDatagrams (datagram.go), which hand batches to the Sink.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/quicvpn/quicvpn/internal/packet"
)

const (
	// frameHeader is a frame's length (16 bits, of the packet), segment size
	// (16 bits, zero for a single packet) and flags (8 bits), in network order.
	frameHeader = 5
	// flagPartial says that the transport checksum is partial: QUIC protects
	// the packet, and the receiver's kernel completes what it forwards.
	flagPartial = 1

	batchSize = 128
)

// Send takes packets for the peer and never blocks: what cannot be queued is
// dropped and counted. ICMP errors for packets that do not fit go to errs. It
// may write to the packets and does not keep them.
func (s *Session) Send(queue int, pkts []packet.Packet, errs Sink) {
	if s.conn.Context().Err() != nil {
		s.drops.Add(packet.DropClosed, len(pkts))
		return
	}
	s.heard.sentNow()
	out := s.outboxes[uint(queue)%uint(len(s.outboxes))]
	for i := range pkts {
		p := &pkts[i]
		h, err := packet.Parse(p.Data)
		if err != nil {
			s.drops.Add(packet.DropMalformed, 1)
			continue
		}
		if s.own && framed(p, h) {
			if !out.add(p) {
				s.drops.Add(packet.DropQueueFull, 1)
			}
			continue
		}
		s.sendDatagrams(queue, p, h, errs)
	}
	out.flush()
}

// framed reports whether a packet goes on a stream: TCP, unless its peer would
// refuse it or its length does not fit a frame (a super-packet of IPv6 may be
// longer).
func framed(p *packet.Packet, h packet.Header) bool {
	return h.Proto == packet.TCP && !h.Fragment && len(p.Data) <= math.MaxUint16 &&
		(p.Segment == 0 || p.Segment >= packet.MinSegment)
}

// writeStream writes an outbox to a stream of its own, which it opens when
// there is something to write.
func (s *Session) writeStream(queue int) {
	out := s.outboxes[queue]
	var stream *quic.SendStream
	for {
		select {
		case <-s.conn.Context().Done():
			return
		case <-out.wake:
		}
		for c := out.take(); c != nil; c = out.take() {
			if stream == nil {
				var err error
				if stream, err = s.openStream(queue); err != nil {
					s.fail(fmt.Errorf("open a stream: %w", err))
					return
				}
			}
			start := time.Now()
			out.writing.Store(true)
			n, err := stream.Write(c.b)
			out.writing.Store(false)
			if err != nil {
				s.fail(fmt.Errorf("write to a stream: %w", err))
				return
			}
			out.setRate(n, time.Since(start), s.RTT(), s.rate())
			c.b = c.b[:0]
			chunkPool.Put(c)
		}
	}
}

// Receive hands what the peer sends to sink until the session ends, closes it,
// and returns why it ended: nil if somebody called Close.
func (s *Session) Receive(sink Sink) error {
	var wg sync.WaitGroup
	wg.Go(func() { s.readDatagrams(sink) })
	wg.Go(s.serveControl)
	for {
		select {
		case stream := <-s.incoming:
			wg.Go(func() {
				if err := s.readStream(stream, sink); err != nil {
					s.fail(err)
				}
			})
			continue
		case <-s.conn.Context().Done():
		}
		break
	}
	wg.Wait()
	err := s.ended()
	s.Close("")
	return err
}

// readStream reads the frames of one stream. Between frames, while nothing
// comes, it holds no buffer.
func (s *Session) readStream(stream *quic.ReceiveStream, sink Sink) error {
	queue, err := readStreamHeader(stream, s.control.StreamID())
	if err != nil {
		return fmt.Errorf("super-packet stream: %w", err)
	}
	pkts := make([]packet.Packet, 0, batchSize)
	var first [1]byte
	for {
		if _, err := stream.Peek(first[:]); err != nil {
			return streamEnd(err)
		}
		buf := readBuffers.Get().(*[readBuffer]byte)
		err := readFrames(stream, buf[:], pkts, func(pkts []packet.Packet) {
			sink.WritePackets(queue, pkts)
		})
		readBuffers.Put(buf)
		if err != nil {
			return streamEnd(err)
		}
	}
}

// readBuffer holds the longest frame, and many of them to hand on at once.
const readBuffer = 128 << 10

var readBuffers = sync.Pool{New: func() any { return new([readBuffer]byte) }}

// readFrames reads into buf until no part of a frame is left in it, and hands
// on the packets of whole frames. It returns nil at a frame's end.
func readFrames(r io.Reader, buf []byte, pkts []packet.Packet, emit func([]packet.Packet)) error {
	start, end := 0, 0
	for {
		n, err := r.Read(buf[end:])
		end += n
		pkts = pkts[:0]
		for end-start >= frameHeader {
			length := int(binary.BigEndian.Uint16(buf[start:]))
			if end-start < frameHeader+length {
				break
			}
			p := packet.Packet{
				Data:    buf[start+frameHeader : start+frameHeader+length : start+frameHeader+length],
				Segment: binary.BigEndian.Uint16(buf[start+2:]),
			}
			if buf[start+4]&flagPartial != 0 {
				p.Flags = packet.Partial
			}
			pkts = append(pkts, p)
			start += frameHeader + length
			if len(pkts) == cap(pkts) {
				emit(pkts)
				pkts = pkts[:0]
			}
		}
		if len(pkts) > 0 {
			emit(pkts)
		}
		if start == end {
			return err
		}
		if err != nil {
			return fmt.Errorf("a frame is cut off: %w", err)
		}
		if len(buf)-start < frameHeader+1<<16 {
			end = copy(buf, buf[start:end])
			start = 0
		}
	}
}

// streamEnd forgives the ends that come with the session's.
func streamEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("super-packet stream: closed by the other end")
	}
	return err
}

// serveControl serves the request stream, with which the session ends.
func (s *Session) serveControl() {
	err := s.control.serve(s.handle)
	if errors.Is(err, io.EOF) {
		err = errors.New("the request has ended")
	}
	s.fail(err) // which does nothing where the session has ended
}

// handle does what a capsule asks for.
func (s *Session) handle(c capsule) error {
	switch c := c.(type) {
	case addressRequest:
		return s.control.send(assign(s.grant, c))
	case peerList:
		return s.peersFrom(c)
	case leave:
		return s.left()
	}
	return nil
}
