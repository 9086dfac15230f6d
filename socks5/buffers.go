package socks5

import "sync"

// Sizes of buffers: one that a client always has, and one that it shares.
const (
	idleBuffer = 2 << 10
	busyBuffer = 64 << 10 // the longest datagram
)

var buffers = sync.Pool{New: func() any { return new([busyBuffer]byte) }}
