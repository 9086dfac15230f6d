package tunnel

import (
	"container/list"
	"net/netip"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"golang.org/x/net/ipv4"
)

// strangers are the connections that have no session. There is room for so many:
// the oldest makes way, so that a flood does not keep out clients, who are quick.
type strangers struct {
	mu    sync.Mutex
	conns list.List // of *quic.Conn, the oldest first
}

// add lets a connection in until leave is called, or time is up.
func (s *strangers) add(conn *quic.Conn) (leave func()) {
	s.mu.Lock()
	e := s.conns.PushBack(conn)
	var oldest *quic.Conn
	if s.conns.Len() > maxStrangers {
		oldest = s.conns.Remove(s.conns.Front()).(*quic.Conn)
	}
	s.mu.Unlock()
	if oldest != nil {
		go oldest.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeExcessiveLoad), "too many connections without a session")
	}
	timeout := time.AfterFunc(joinTimeout, func() {
		conn.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "no request for a tunnel")
	})
	return func() {
		timeout.Stop()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conns.Remove(e) // which does nothing the second time
	}
}

// initialSizes remembers how large the first packets of clients were: what came
// through one way very likely comes through the other.
type initialSizes struct {
	mu    sync.Mutex
	sizes map[netip.AddrPort]int
}

// A sizingSocket tells the sizes of Initial packets as they arrive.
type sizingSocket struct {
	*socket
	sizes *initialSizes
}

func (s sizingSocket) ReadBatch(ms []ipv4.Message, flags int) (int, error) {
	n, err := s.socket.ReadBatch(ms, flags)
	for _, m := range ms[:n] {
		// A long header of type Initial (RFC 9000, section 17.2.2).
		if m.N >= minPacketSize && m.Buffers[0][0]&0xf0 == 0xc0 {
			s.sizes.saw(addrPort(m.Addr), m.N)
		}
	}
	return n, err
}

func (i *initialSizes) saw(remote netip.AddrPort, size int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.sizes == nil || len(i.sizes) >= 1024 { // a hint may be forgotten
		i.sizes = make(map[netip.AddrPort]int)
	}
	i.sizes[netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())] = size
}

func (i *initialSizes) of(remote netip.AddrPort) int {
	i.mu.Lock()
	defer i.mu.Unlock()
	size := i.sizes[remote]
	delete(i.sizes, remote)
	return min(max(size, minPacketSize), firstPacketSize)
}
