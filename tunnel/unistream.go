package tunnel

import (
	"bytes"
	"fmt"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"
)

// acceptUniStreams sorts the streams that the peer opens: those for
// super-packets to super, the others to HTTP/3.
func acceptUniStreams(conn *quic.Conn, own bool, http3, super func(*quic.ReceiveStream)) {
	for {
		stream, err := conn.AcceptUniStream(conn.Context())
		if err != nil {
			return
		}
		go func() {
			if own && peekType(stream) == streamTypeSuper {
				super(stream)
			} else {
				http3(stream)
			}
		}()
	}
}

// deliver hands streams to a session, which may not receive yet.
func deliver(conn *quic.Conn, incoming chan<- *quic.ReceiveStream) func(*quic.ReceiveStream) {
	return func(stream *quic.ReceiveStream) {
		select {
		case incoming <- stream:
		case <-conn.Context().Done():
		}
	}
}

// peekType returns the type of a unidirectional stream without consuming it.
func peekType(stream *quic.ReceiveStream) uint64 {
	var b [8]byte
	if _, err := stream.Peek(b[:1]); err != nil {
		return 0
	}
	n := 1 << (b[0] >> 6) // RFC 9000, section 16
	if n > 1 {
		if _, err := stream.Peek(b[:n]); err != nil {
			return 0
		}
	}
	v, _ := quicvarint.Read(quicvarint.NewReader(bytes.NewReader(b[:n])))
	return v
}

// openStream opens the stream of a queue: its type, the request that it
// belongs to, and the queue's number.
func (s *Session) openStream(queue int) (*quic.SendStream, error) {
	stream, err := s.conn.OpenUniStreamSync(s.conn.Context())
	if err != nil {
		return nil, err
	}
	h := quicvarint.Append(nil, streamTypeSuper)
	h = quicvarint.Append(h, uint64(s.control.StreamID()/4))
	h = quicvarint.Append(h, uint64(queue))
	_, err = stream.Write(h)
	return stream, err
}

// readStreamHeader reads what openStream wrote.
func readStreamHeader(stream *quic.ReceiveStream, id quic.StreamID) (queue int, err error) {
	r := quicvarint.NewReader(stream)
	if _, err := quicvarint.Read(r); err != nil { // the type, which brought us here
		return 0, err
	}
	request, err := quicvarint.Read(r)
	if err != nil {
		return 0, err
	}
	if request != uint64(id/4) {
		return 0, fmt.Errorf("belongs to request %d, which is not there", request)
	}
	q, err := quicvarint.Read(r)
	if err != nil {
		return 0, err
	}
	if q >= maxStreams {
		return 0, fmt.Errorf("queue number %d is not below %d", q, maxStreams)
	}
	return int(q), nil
}
