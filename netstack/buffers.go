package netstack

import (
	"math/bits"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

const (
	// startBuffer is what a connection may keep in each direction at first. gVisor
	// gives it more as its speed and its round trips need, up to Config.Buffer,
	// which is nearBuffer where nothing is said.
	startBuffer = 128 << 10
	nearBuffer  = 1 << 20

	// memory is what all connections may keep, about: where there are many, each
	// has a share of it, but leastBuffer at least.
	memory      = 256 << 20
	leastBuffer = 16 << 10
)

// buffers tells gVisor what connections may keep.
type buffers struct {
	stack *stack.Stack
	most  int

	mu    sync.Mutex // guards what follows
	conns int
	share int // the most that each may keep in a direction
}

// add counts a connection more, or less, and returns the share of each.
func (b *buffers) add(n int) (share int, err tcpip.Error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns += n
	share = shareOf(b.conns, b.most)
	if share == b.share {
		return share, nil
	}
	b.share = share
	start := min(share, startBuffer)
	if err := b.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &tcpip.TCPReceiveBufferSizeRangeOption{
		Min: tcp.MinBufferSize, Default: start, Max: share}); err != nil {
		return share, err
	}
	return share, b.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &tcpip.TCPSendBufferSizeRangeOption{
		Min: tcp.MinBufferSize, Default: start, Max: share})
}

// shareOf returns what each of n connections may keep in a direction. It changes
// with each doubling only.
func shareOf(n, most int) int {
	return max(min(memory/2>>bits.Len(uint(n)), most), leastBuffer)
}
