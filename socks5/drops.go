package socks5

import "sync/atomic"

// A drop is a reason for which a datagram was dropped.
type drop uint8

const (
	_             drop = iota
	dropMalformed      // no header, or one without a place to go to
	dropFragment       // a part of a datagram
	dropStranger       // not from the client, or not from its port
	dropUnsent         // the relay did not take it
	dropTooBig         // with its header it fits no datagram to the client
	dropNoClient       // the client's port is not known, or sending there fails
	numDrops
)

func (d drop) String() string {
	return [numDrops]string{"", "malformed", "fragment", "stranger", "unsent", "too-big", "no-client"}[d]
}

type drops [numDrops]atomic.Uint64

func (d *drops) add(why drop) { d[why].Add(1) }

func (d *drops) snapshot() map[string]uint64 {
	m := make(map[string]uint64)
	for i := range d {
		if n := d[i].Load(); n > 0 {
			m[drop(i).String()] = n
		}
	}
	return m
}
