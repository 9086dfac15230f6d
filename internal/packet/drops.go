package packet

import "sync/atomic"

// A Drop is a reason for which a packet was not passed on.
type Drop uint8

const (
	DropMalformed   Drop = iota // not a whole IP packet, or a super-packet that cannot be true
	DropSource                  // a source that the session does not own
	DropDestination             // a destination that the session may not reach
	DropNoSession               // no session to carry it
	DropTooBig                  // larger than the path carries; answered by ICMP
	DropHopLimit                // its hop limit ran out; answered by ICMP
	DropQueueFull               // the tunnel did not take packets as fast as they came
	DropClosed                  // the session ended with the packet in hand
	DropDevice                  // the TUN device refused it
	DropLate                    // waited in the tunnel's queue for too long
	DropUnmapped                // no address stands for its source beyond this host yet
	numDrops
)

func (d Drop) String() string {
	return [numDrops]string{"malformed", "source", "destination", "no-session", "too-big",
		"hop-limit", "queue-full", "closed", "device", "late", "unmapped"}[d]
}

// Drops counts dropped packets by reason. The zero value is ready; it is safe
// for concurrent use.
type Drops [numDrops]atomic.Uint64

// Add counts n packets dropped for one reason.
func (d *Drops) Add(why Drop, n int) { d[why].Add(uint64(n)) }

// Snapshot returns the counters that are not zero, by the name of the reason.
func (d *Drops) Snapshot() map[string]uint64 {
	m := make(map[string]uint64)
	for i := range d {
		if n := d[i].Load(); n > 0 {
			m[Drop(i).String()] = n
		}
	}
	return m
}
