package tunnel

import (
	"errors"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/quicvpn/quicvpn/internal/packet"
)

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
		s.queuePacket(b)
	case h.Version == 4 && !h.DontFragment:
		// A router's duty (RFC 791, section 2.3).
		if !packet.FragmentIPv4(b, mtu, s.queuePacket) {
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

func (s *Session) queuePacket(b []byte) {
	h, err := packet.Parse(b)
	if err != nil {
		s.drops.Add(packet.DropMalformed, 1)
		return
	}
	s.queueDatagram(packet.FlowHash(h, b), s.prefix, b)
}

// queueDatagram copies a datagram of a flow into the queue.
func (s *Session) queueDatagram(flow uint32, prefix, b []byte) {
	d := datagramPool.Get().(*datagram)
	d.at = time.Now()
	d.b = append(append(d.b[:0], prefix...), b...)
	if out := s.datagrams.push(flow, d); out != nil {
		s.drops.Add(packet.DropQueueFull, 1)
		datagramPool.Put(out)
	}
}

var datagramPool = sync.Pool{New: func() any { return &datagram{b: make([]byte, 0, 1536)} }}

// writeDatagrams sends the datagram queue, but for what has waited too long.
func (s *Session) writeDatagrams() {
	send := s.control.SendDatagram
	if s.own {
		send = s.conn.SendDatagram
	}
	late := func(d *datagram) {
		s.drops.Add(packet.DropLate, 1)
		datagramPool.Put(d)
	}
	var ahead handover
	for {
		ahead.wait(s)
		d := s.datagrams.pop(late)
		if d == nil {
			select {
			case <-s.conn.Context().Done():
				return
			case <-s.datagrams.wake:
			}
			continue
		}
		if err := send(d.b); err == nil {
			ahead.held += len(d.b)
		} else if _, ok := errors.AsType[*quic.DatagramTooLargeError](err); ok {
			s.drops.Add(packet.DropTooBig, 1)
			s.path.update(s.datagramSpace())
		} else {
			s.drops.Add(packet.DropClosed, 1)
		}
		datagramPool.Put(d)
	}
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
		switch {
		case err != nil:
			s.drops.Add(packet.DropMalformed, 1)
			return nil
		case quarter != uint64(s.control.StreamID()/4):
			s.toUDPFlow(quarter, b[n:])
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
