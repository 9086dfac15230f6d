package hub

import (
	"net/netip"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// From a container:
//
//  1. run reads a queue of its device, on a goroutine of its own.
//  2. route judges each packet, rewrites its addresses, and answers what goes
//     nowhere.
//  3. pass hands on runs of packets with the same way.
//
// From the gateway:
//
//  4. deliver judges what comes out of the tunnel, and the ICMP errors about what
//     went in, rewrites the addresses back, and hands runs to the devices.
//
// Nothing here allocates for a packet. A flow keeps the number of its queue, so
// that it stays in order.

const batch = 128 // packets that are read at once

const dnsPort = 53

// A memo remembers the verdict on the packet before: a batch is of few flows.
type memo struct {
	src, dst netip.Addr
	verdict
}

// A reader reads one queue of a container's device.
type reader struct {
	hub   *Hub
	port  *port
	queue int

	view *view // that memo is of
	memo memo
	pkts [batch]packet.Packet
	icmp [1280]byte // an answer in the making
	out  [1]packet.Packet
}

// run reads until the device is closed.
func (r *reader) run() {
	q := r.port.queues[r.queue]
	for {
		n, err := q.Read(r.pkts[:])
		if err != nil {
			r.hub.failed(r.port, err)
			return
		}
		r.forward(r.pkts[:n])
	}
}

// forward passes on what a container sends.
func (r *reader) forward(pkts []packet.Packet) {
	if t := r.hub.table.Load(); r.view == nil || t != r.view.table {
		r.view, r.memo = t.views[r.port.Exit], memo{}
	}
	var run way
	start := 0
	for i := range pkts {
		w := r.route(&pkts[i])
		if w != run {
			r.pass(pkts[start:i], run)
			start, run = i, w
		}
	}
	r.pass(pkts[start:], run)
}

// route decides where a packet goes.
func (r *reader) route(p *packet.Packet) way {
	h, err := packet.Parse(p.Data)
	if err != nil {
		r.hub.cfg.Drops.Add(packet.DropMalformed, 1)
		return way{}
	}
	m := &r.memo
	if h.Src != m.src || h.Dst != m.dst {
		*m = memo{h.Src, h.Dst, r.view.outbound(r.port, h.Src, h.Dst)}
	}
	v := &m.verdict
	if v.leaves && h.DstPort != dnsPort && r.view.local != nil && r.view.local.Ends(p, h) {
		return way{local: true}
	}
	switch v.door {
	case ownDoor:
		if packet.AnswerEcho(p.Data, h) {
			return way{port: r.port}
		}
		if h.DstPort != dnsPort || r.hub.cfg.NoNames {
			v = &prohibited
		}
	case gatewayDoor:
		if h.DstPort == dnsPort {
			v = &prohibited
		}
	}
	if v.way == (way{}) {
		r.hub.cfg.Drops.Add(v.why, 1)
		if v.answer {
			r.answer(p.Data, v.because)
		}
		return way{}
	}
	if v.src.IsValid() {
		p.RewriteSource(&h, v.src)
	}
	if v.dst.IsValid() {
		p.RewriteDestination(&h, v.dst)
	}
	return v.way
}

// answer sends the container an ICMP error about its packet, unless it had many.
func (r *reader) answer(orig []byte, why packet.Unreachable) {
	if !r.port.limit.Allow(time.Now()) {
		return
	}
	from := r.hub.own4
	if orig[0]>>4 == 6 {
		from = r.hub.own6
	}
	if b := packet.AppendUnreachable(r.icmp[:0], orig, from, why); b != nil {
		r.out[0] = packet.Packet{Data: b}
		r.port.write(r.queue, r.out[:])
	}
}

// pass hands on a run of packets.
func (r *reader) pass(pkts []packet.Packet, w way) {
	switch {
	case len(pkts) == 0:
	case w.port != nil:
		w.port.write(r.queue, pkts)
	case w.up:
		r.view.uplink.Send(r.queue, pkts, &r.port.Exit.errs)
	case w.local:
		r.view.local.Input(pkts)
	}
}

// write gives packets to the container.
func (p *port) write(queue int, pkts []packet.Packet) {
	// What is lost the device counts, and one that is gone ends its readers.
	_ = p.queues[uint(queue)%uint(len(p.queues))].Write(pkts)
}

// Answer takes what a Local has for containers of the exit. All packets of a flow
// come with one queue number.
func (e *Exit) Answer(queue int, pkts []packet.Packet) {
	t := e.hub.table.Load()
	writeRuns(queue, pkts, func(p *packet.Packet) *port { return t.answered(e, p) })
}

// writeRuns gives each packet to the container that it is for, if any, and those that
// follow each other to one at once.
func writeRuns(queue int, pkts []packet.Packet, to func(*packet.Packet) *port) {
	var run *port
	start := 0
	for i := range pkts {
		p := to(&pkts[i])
		if p != run {
			if run != nil {
				run.write(queue, pkts[start:i])
			}
			start, run = i, p
		}
	}
	if run != nil {
		run.write(queue, pkts[start:])
	}
}

// answered returns the container of an exit that an answer is for, if there is one.
func (t *table) answered(e *Exit, p *packet.Packet) *port {
	h, err := packet.Parse(p.Data)
	if err != nil {
		e.hub.cfg.Drops.Add(packet.DropMalformed, 1)
		return nil
	}
	to := t.inside[h.Dst].port
	if to == nil || to.Exit != e {
		e.hub.cfg.Drops.Add(packet.DropDestination, 1)
		return nil
	}
	return to
}

// WritePackets takes what comes out of the tunnel, from a peer who may be hostile.
func (e *Exit) WritePackets(queue int, pkts []packet.Packet) { e.deliver(queue, pkts, false) }

// An errorSink takes the ICMP errors with which an uplink answers what it was
// sent.
type errorSink struct{ exit *Exit }

func (s *errorSink) WritePackets(queue int, pkts []packet.Packet) { s.exit.deliver(queue, pkts, true) }

// deliver passes on what is for a container.
func (e *Exit) deliver(queue int, pkts []packet.Packet, trusted bool) {
	t := e.hub.table.Load().views[e]
	if t == nil {
		e.hub.cfg.Drops.Add(packet.DropClosed, len(pkts))
		return
	}
	var last memo
	writeRuns(queue, pkts, func(p *packet.Packet) *port { return t.accept(p, &last, trusted) })
}

// accept decides which container a packet is for, if any.
func (t *view) accept(p *packet.Packet, last *memo, trusted bool) *port {
	h, err := packet.Parse(p.Data)
	if err == nil {
		err = p.Check(h)
	}
	if err != nil {
		t.exit.hub.cfg.Drops.Add(packet.DropMalformed, 1)
		return nil
	}
	if h.Src != last.src || h.Dst != last.dst {
		*last = memo{h.Src, h.Dst, t.inbound(h.Src, h.Dst, trusted)}
	}
	v := &last.verdict
	if v.way.port == nil {
		t.exit.hub.cfg.Drops.Add(v.why, 1)
		return nil
	}
	if v.door == gatewayDoor && ofResolver(p.Data, h) {
		p.RewriteSource(&h, v.src)
	}
	if v.dst.IsValid() {
		p.RewriteDestination(&h, v.dst)
	}
	return v.way.port
}

// ofResolver reports whether a packet from the gateway's own address is an answer
// of its resolver, a later fragment of one, or an ICMP error about a question to
// it.
func ofResolver(b []byte, h packet.Header) bool {
	if h.FragmentOffset != 0 {
		return h.Proto == packet.UDP
	}
	q, ok := packet.Quoted(b, h)
	return h.SrcPort == dnsPort || ok && q.Dst == h.Src && q.DstPort == dnsPort
}
