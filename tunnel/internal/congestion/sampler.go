package congestion

import "time"

// A packet is what the sampler keeps of a packet in flight (draft, "Per-packet
// (P) state").
type packet struct {
	sent          Time
	deliveredTime Time
	firstSent     Time
	delivered     int64
	lost          int64
	txInflight    int64
	size          int32
	state         packetState
	appLimited    bool
}

type packetState uint8

const (
	packetAbsent packetState = iota // never sent, or of no interest any more
	packetFlying
	packetDelivered
	packetLost
)

// A sampler estimates delivery rates (draft, "Delivery Rate Samples"; the same as
// draft-cardwell-iccrg-delivery-rate-estimation). Packets lie in a ring by
// packet number, because the transport below says no more than the number.
type sampler struct {
	ring []packet // its length is a power of two, or zero
	base int64    // lowest number in the ring
	next int64    // one above the highest

	delivered     int64 // draft: C.delivered
	lostBytes     int64 // draft: C.lost
	deliveredTime Time
	firstSent     Time
	appLimited    int64
	inflight      int64

	lastAckedSent Time // of the newest acknowledged packet
}

// A sample is what one ACK tells (draft, "Rate Sample (rs) Output").
type sample struct {
	ok             bool // holds a newest packet
	pn             int64
	sent           Time
	priorDelivered int64
	priorTime      Time
	sendElapsed    time.Duration
	ackElapsed     time.Duration
	appLimited     bool
	txInflight     int64
	lostSince      int64 // draft: RS.lost

	rtt       time.Duration // zero: none
	rate      float64       // bytes a second; zero: none
	delivered int64         // over the interval
	acked     int64         // draft: RS.newly_acked
	lost      int64         // draft: RS.newly_lost
	ce        bool          // the ACK reported ECN-CE
	lostRuns  []lostPacket
}

type lostPacket struct {
	pn   int64
	sent Time
}

const (
	minRing = 64
	maxRing = 1 << 16
)

func (s *sampler) at(pn int64) *packet { return &s.ring[pn&int64(len(s.ring)-1)] }

// sent is the draft's OnPacketSent.
func (s *sampler) sent(now Time, pn, size, inflight int64) {
	if inflight <= size || s.deliveredTime == 0 {
		s.firstSent, s.deliveredTime = now, now
	}
	s.inflight = inflight
	s.makeRoom(pn)
	*s.at(pn) = packet{
		sent: now, deliveredTime: s.deliveredTime, firstSent: s.firstSent,
		delivered: s.delivered, lost: s.lostBytes, txInflight: inflight,
		size: int32(size), state: packetFlying, appLimited: s.appLimited != 0,
	}
}

// makeRoom extends the ring to packet number pn, which is above all others.
func (s *sampler) makeRoom(pn int64) {
	if s.base == s.next || pn < s.next || pn-s.next > maxRing {
		clear(s.ring)
		s.base, s.next = pn, pn
	}
	for pn-s.base >= int64(len(s.ring)) {
		if len(s.ring) == maxRing {
			s.at(s.base).state = packetAbsent // it was lost long ago, and nobody told
			s.base++
			continue
		}
		old := *s
		s.ring = make([]packet, max(minRing, 2*len(s.ring)))
		for n := old.base; n < old.next; n++ {
			*s.at(n) = *old.at(n)
		}
	}
	for ; s.next <= pn; s.next++ {
		s.at(s.next).state = packetAbsent // skipped numbers
	}
}

func (s *sampler) find(pn int64) *packet {
	if pn < s.base || pn >= s.next {
		return nil
	}
	if p := s.at(pn); p.state == packetFlying {
		return p
	}
	return nil
}

// acked is the draft's UpdateRateSample.
func (s *sampler) acked(now Time, pn, size int64, rs *sample) {
	rs.acked += size
	s.delivered += size
	s.deliveredTime = now
	p := s.find(pn)
	if p == nil {
		return
	}
	p.state = packetDelivered
	if rs.ok && (p.sent < rs.sent || p.sent == rs.sent && pn < rs.pn) {
		return
	}
	rs.ok, rs.pn, rs.sent = true, pn, p.sent
	rs.priorDelivered, rs.priorTime = p.delivered, p.deliveredTime
	rs.appLimited, rs.txInflight = p.appLimited, p.txInflight
	rs.sendElapsed = p.sent.Sub(p.firstSent)
	rs.ackElapsed = now.Sub(p.deliveredTime)
	rs.rtt = max(now.Sub(p.sent), 1)
	rs.lostSince = p.lost // generate turns it into a difference
}

// lost tells of a loss and returns the packet, nil if it is not known.
func (s *sampler) lost(pn, size int64, rs *sample) *packet {
	rs.lost += size
	s.lostBytes += size
	p := s.find(pn)
	if p == nil {
		return nil
	}
	p.state = packetLost
	rs.lostRuns = append(rs.lostRuns, lostPacket{pn, p.sent})
	return p
}

// generate is the draft's GenerateRateSample.
func (s *sampler) generate(minRTT time.Duration, rs *sample) {
	if s.appLimited != 0 && s.delivered > s.appLimited {
		s.appLimited = 0
	}
	if !rs.ok {
		return
	}
	if rs.sent > s.firstSent {
		s.firstSent = rs.sent
	}
	s.lastAckedSent = max(s.lastAckedSent, rs.sent)
	rs.delivered = s.delivered - rs.priorDelivered
	rs.lostSince = s.lostBytes - rs.lostSince
	interval := max(rs.sendElapsed, rs.ackElapsed)
	if interval <= 0 || interval < minRTT {
		return // no reliable rate
	}
	rs.rate = float64(rs.delivered) / interval.Seconds()
}

// markAppLimited is the draft's MarkConnectionAppLimited.
func (s *sampler) markAppLimited(inflight int64) {
	s.appLimited = max(s.delivered+inflight, 1)
}

// persistent tells whether the losses of rs, in a row and with nothing delivered
// among them, span so long that the path was gone (RFC 9002, section 7.6).
// Three probe timeouts, with the worst of its variance terms.
func (s *sampler) persistent(rs *sample, rtt time.Duration) bool {
	if len(rs.lostRuns) < 2 || rtt == 0 {
		return false
	}
	limit := 3 * (2*rtt + 25*time.Millisecond)
	first := rs.lostRuns[0]
	for i, l := range rs.lostRuns[1:] {
		prev := rs.lostRuns[i]
		for pn := prev.pn + 1; pn < l.pn; pn++ {
			if s.at(pn).state == packetDelivered {
				first = l
				break
			}
		}
		if l.sent.Sub(first.sent) > limit {
			return true
		}
	}
	return false
}

// forget drops what needs no more answer. The transport declares some packets
// lost without telling (MTU probes, those that a probe timeout repeats): they go
// when they are old and a younger one was delivered.
func (s *sampler) forget(now Time, rtt time.Duration) {
	old := now.Add(-4*rtt - time.Second)
	for ; s.base < s.next; s.base++ {
		p := s.at(s.base)
		if p.state == packetFlying && (p.sent > old || p.sent >= s.lastAckedSent) {
			return
		}
	}
	if len(s.ring) > 16*minRing {
		s.ring = nil // all is delivered: give the memory back
	}
}
