package tunnel

import (
	"fmt"
	"strings"
	"sync/atomic"
)

// socketStats is what a socket has done so far.
type socketStats struct {
	Sends      uint64 // sendmsg calls
	Merged     uint64 // writes that went out in one call with the write before
	SendLost   uint64 // packets that the kernel did not take: no route, a firewall, a full queue
	SendTooBig uint64 // packets that it refused as larger than the device's MTU
	GSORefused uint64 // times that it refused UDP_SEGMENT; after the first it is not used again

	Receives uint64 // recvmmsg calls that returned messages
	Segments uint64 // packets received
	Oversize uint64 // of these, those too large for quic-go, which were dropped

	ICMPErrors  uint64 // ICMP errors for what was sent
	ICMPIgnored uint64 // those about the MTU that quote nothing that was sent

	ReceiveBuffer, SendBuffer int // bytes that the kernel granted

	// LastError is the last reason for a lost packet; nil if there was none.
	LastError error
}

type socketCounters struct {
	sends, merged, lost, tooBig, gsoRefused atomic.Uint64
	receives, segments, oversize            atomic.Uint64
	icmpErrors, icmpIgnored                 atomic.Uint64
	lastError                               atomic.Pointer[error]
}

func (c *socketCounters) failed(err error) { c.lastError.Store(&err) }

// Stats returns what the socket has done so far.
func (s *socket) Stats() socketStats {
	c := &s.counts
	st := socketStats{
		Sends: c.sends.Load(), Merged: c.merged.Load(), SendLost: c.lost.Load(),
		SendTooBig: c.tooBig.Load(), GSORefused: c.gsoRefused.Load(),
		Receives: c.receives.Load(), Segments: c.segments.Load(), Oversize: c.oversize.Load(),
		ICMPErrors: c.icmpErrors.Load(), ICMPIgnored: c.icmpIgnored.Load(),
		ReceiveBuffer: s.recvBuffer, SendBuffer: s.sendBuffer,
	}
	if err := c.lastError.Load(); err != nil {
		st.LastError = *err
	}
	return st
}

// BufferWarning says what to do where the kernel granted less than the wanted
// buffers, which costs packets at high rates; it is empty where all is well.
func (s *socket) BufferWarning() string {
	var sysctls []string
	if s.recvBuffer < wantedSocketBuffer {
		sysctls = append(sysctls, fmt.Sprintf("net.core.rmem_max=%d (now %d)", wantedSocketBuffer, s.recvBuffer))
	}
	if s.sendBuffer < wantedSocketBuffer {
		sysctls = append(sysctls, fmt.Sprintf("net.core.wmem_max=%d (now %d)", wantedSocketBuffer, s.sendBuffer))
	}
	if sysctls == nil {
		return ""
	}
	return "the kernel limits UDP socket buffers: on the host, set sysctl " + strings.Join(sysctls, " and ")
}
