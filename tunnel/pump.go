package tunnel

// The way of a packet through a session:
//
//  1. Send sorts: TCP between quicvpn peers goes to the outbox of its queue,
//     everything else to the datagram queue. Neither waits.
//  2. writeStream carries an outbox onto a unidirectional stream of its own as
//     frames of `length | segment size | flags | packet`.
//  3. writeDatagrams sends the datagram queue as HTTP Datagrams (RFC 9297).
//  4. Receive starts readStream for every stream that the peer opens and
//     readDatagrams, which hand batches to the Sink.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

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

	maxQueuedDatagrams = 256
	maxDatagramDelay   = 100 * time.Millisecond
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

// sendDatagrams queues a packet, segment by segment, for datagrams.
func (s *Session) sendDatagrams(queue int, p *packet.Packet, h packet.Header, errs Sink) {
	mtu := s.MTU()
	if !s.own {
		packet.ClampMSS(p, h, mtu)
	}
	var split packet.Splitter
	split.Reset(p, h, 0)
	for b := split.Next(); b != nil; b = split.Next() {
		s.sendDatagram(queue, b, h, mtu, errs)
	}
}

func (s *Session) sendDatagram(queue int, b []byte, h packet.Header, mtu int, errs Sink) {
	switch {
	case len(b) <= mtu:
		s.queueDatagram(b)
	case h.Version == 4 && !h.DontFragment:
		// A router's duty (RFC 791, section 2.3).
		if !packet.FragmentIPv4(b, mtu, s.queueDatagram) {
			s.drops.Add(packet.DropTooBig, 1)
		}
	default:
		s.drops.Add(packet.DropTooBig, 1)
		if errs == nil {
			return
		}
		from := s.gatewayAddr(h.Version)
		if icmp := packet.AppendTooBig(nil, b, from, mtu); icmp != nil {
			errs.WritePackets(queue, []packet.Packet{{Data: icmp}})
		}
	}
}

// queueDatagram copies a packet into the datagram queue.
func (s *Session) queueDatagram(b []byte) {
	d := datagramPool.Get().(*datagram)
	d.at = time.Now()
	d.b = append(append(d.b[:0], s.prefix...), b...)
	select {
	case s.datagrams <- d:
	default:
		s.drops.Add(packet.DropQueueFull, 1)
		datagramPool.Put(d)
	}
}

type datagram struct {
	at time.Time
	b  []byte
}

type datagramQueue chan *datagram

var datagramPool = sync.Pool{New: func() any { return &datagram{b: make([]byte, 0, 1536)} }}

// writeDatagrams sends the datagram queue. What has waited too long is of no
// use to those who need datagrams, and is dropped.
func (s *Session) writeDatagrams() {
	send := s.control.SendDatagram
	if s.own {
		send = s.conn.SendDatagram
	}
	for {
		select {
		case <-s.conn.Context().Done():
			return
		case d := <-s.datagrams:
			if len(s.datagrams) > 0 && time.Since(d.at) > maxDatagramDelay {
				s.drops.Add(packet.DropQueueFull, 1)
			} else if err := send(d.b); err != nil {
				if _, ok := errors.AsType[*quic.DatagramTooLargeError](err); ok {
					s.drops.Add(packet.DropTooBig, 1)
					s.path.update(s.datagramSpace())
				} else {
					s.drops.Add(packet.DropClosed, 1)
				}
			}
			datagramPool.Put(d)
		}
	}
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
			out.setRate(n, time.Since(start), s.conn)
			c.b = c.b[:0]
			chunkPool.Put(c)
		}
	}
}

// openStream opens the stream of a queue: its type, the request that it
// belongs to, and the queue's number.
func (s *Session) openStream(queue int) (*quic.SendStream, error) {
	stream, err := s.conn.OpenUniStreamSync(s.conn.Context())
	if err != nil {
		return nil, err
	}
	h := quicvarint.Append(nil, streamTypeSuper)
	h = quicvarint.Append(h, uint64(s.control.StreamID()/4))
	h = quicvarint.Append(h, uint64(queue))
	_, err = stream.Write(h)
	return stream, err
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

func readStreamHeader(stream *quic.ReceiveStream, id quic.StreamID) (queue int, err error) {
	r := quicvarint.NewReader(stream)
	if _, err := quicvarint.Read(r); err != nil { // the type, which brought us here
		return 0, err
	}
	request, err := quicvarint.Read(r)
	if err != nil {
		return 0, err
	}
	if request != uint64(id/4) {
		return 0, fmt.Errorf("belongs to request %d, which is not there", request)
	}
	q, err := quicvarint.Read(r)
	if err != nil {
		return 0, err
	}
	if q >= maxStreams {
		return 0, fmt.Errorf("queue number %d is not below %d", q, maxStreams)
	}
	return int(q), nil
}

// streamEnd forgives the ends that come with the session's.
func streamEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("super-packet stream: closed by the other end")
	}
	return err
}

// readDatagrams hands datagrams to the sink, as many at a time as are there,
// each with the queue of its flow.
func (s *Session) readDatagrams(sink Sink) {
	recv := s.control.ReceiveDatagram
	if s.own {
		recv = s.conn.ReceiveDatagram
	}
	ctx := s.conn.Context()
	arrived := make(chan []byte, batchSize)
	go func() {
		defer close(arrived)
		for {
			b, err := recv(ctx)
			if err != nil {
				return
			}
			if b = s.unwrap(b); b != nil {
				arrived <- b
			}
		}
	}()
	queues := len(s.outboxes)
	batches := make([][]packet.Packet, queues)
	for b := range arrived {
		for n := 0; ; n++ {
			s.sortDatagram(b, batches)
			if n == batchSize {
				break
			}
			select {
			case b = <-arrived:
			default:
				b = nil
			}
			if b == nil {
				break
			}
		}
		for q := range batches {
			if len(batches[q]) > 0 {
				sink.WritePackets(q, batches[q])
				clear(batches[q])
				batches[q] = batches[q][:0]
			}
		}
	}
}

// unwrap takes the prefix off a datagram, or returns nil if it is not of this
// session.
func (s *Session) unwrap(b []byte) []byte {
	if s.own {
		quarter, n, err := quicvarint.Parse(b)
		if err != nil || quarter != uint64(s.control.StreamID()/4) {
			s.drops.Add(packet.DropMalformed, 1)
			return nil
		}
		b = b[n:]
	}
	context, n, err := quicvarint.Parse(b)
	if err != nil || context != 0 {
		s.drops.Add(packet.DropMalformed, 1)
		return nil
	}
	return b[n:]
}

func (s *Session) sortDatagram(b []byte, batches [][]packet.Packet) {
	p := packet.Packet{Data: b}
	h, err := packet.Parse(b)
	if err != nil {
		s.drops.Add(packet.DropMalformed, 1)
		return
	}
	if !s.own {
		packet.ClampMSS(&p, h, s.MTU())
	}
	q := packet.FlowHash(h, b) % uint32(len(batches))
	batches[q] = append(batches[q], p)
}

// serveControl serves the request stream, with which the session ends.
func (s *Session) serveControl() {
	err := s.control.serve(s.grant.Addresses)
	if errors.Is(err, io.EOF) {
		err = errors.New("the request has ended")
	}
	s.fail(err) // which does nothing where the session has ended
}
