package netstack

import (
	"hash/maphash"
	"net"
	"net/netip"
	"sync"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A tuple is what a connection is known by: the app's address, and the one that it
// dialled.
type tuple struct{ from, to netip.AddrPort }

func tupleOf(h *packet.Header) tuple {
	return tuple{netip.AddrPortFrom(h.Src, h.SrcPort), netip.AddrPortFrom(h.Dst, h.DstPort)}
}

// A flow is a connection from its SYN until nothing of it is left.
type flow struct {
	tuple
	release  func()
	upstream net.Conn // what Dial returned

	mu sync.Mutex // guards what follows
	// syn is what the app asked with, last, while it waits for the answer; nil then.
	syn      []byte
	again    bool // it asked more than once
	accepted bool // the handshake has a goroutine
}

// repeats reports whether a packet came before its SYN was answered, and keeps it
// if it is that SYN again: an app that asks anew may begin at another number.
func (f *flow) repeats(p *packet.Packet, h *packet.Header) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.syn == nil {
		return false
	}
	if begins(p, h) {
		f.syn = append(f.syn[:0], p.Data...)
		f.again = true
	}
	return true
}

// flows are all flows of a Stack. It is a table in parts, so that packets that look
// for theirs seldom meet.
type flows struct {
	seed   maphash.Seed
	shards [64]struct {
		sync.RWMutex
		m map[tuple]*flow
	}
}

func (t *flows) init() {
	t.seed = maphash.MakeSeed()
	for i := range t.shards {
		t.shards[i].m = make(map[tuple]*flow)
	}
}

func (t *flows) at(k tuple) int {
	return int(maphash.Comparable(t.seed, k) % uint64(len(t.shards)))
}

// get returns a flow, or nil.
func (t *flows) get(k tuple) *flow {
	shard := &t.shards[t.at(k)]
	shard.RLock()
	defer shard.RUnlock()
	return shard.m[k]
}

func (t *flows) add(f *flow) {
	shard := &t.shards[t.at(f.tuple)]
	shard.Lock()
	defer shard.Unlock()
	shard.m[f.tuple] = f
}

func (t *flows) remove(f *flow) {
	shard := &t.shards[t.at(f.tuple)]
	shard.Lock()
	defer shard.Unlock()
	delete(shard.m, f.tuple)
}
