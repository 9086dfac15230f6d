package tunnel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/quicvpn/quicvpn/internal/packet"
)

const (
	protoConnectUDP = "connect-udp"
	// pathConnectUDP is the default template's, before host and port (RFC 9298,
	// section 3).
	pathConnectUDP = "/.well-known/masque/udp/"

	capsuleDatagram http3.CapsuleType = 0 // RFC 9297, section 3.5

	maxUDP = 65507 // the longest payload of UDP over IPv4

	// udpQueue is how many datagrams wait for a reader.
	udpQueue = 256
)

// A UDPFlow is a UDP socket at the other end of a session, connected to one
// address (RFC 9298). Each Read and Write is one datagram. Those that do not fit a
// datagram of the path go reliably, on the flow's stream; so what is longer than the
// path carries is only as good for real time as the path is free of loss.
type UDPFlow struct {
	conn    *quic.Conn
	session *Session // that reads and writes the datagrams; nil where HTTP/3 does
	stream  udpStream
	drops   *packet.Drops
	prefix  []byte // of every datagram: quarter stream ID if we write it, context ID
	remote  flowAddr
	arrived chan []byte
	read    deadline

	mu     sync.Mutex // held while a capsule is written
	ending sync.Once
	ended  chan struct{} // closed after why is set
	why    error
}

// A udpStream is a stream with datagrams at the client or at the server.
type udpStream interface {
	flowStream
	StreamID() quic.StreamID
	SendDatagram([]byte) error
	ReceiveDatagram(context.Context) ([]byte, error)
}

// DialUDP has the gateway open a UDP socket for address, "host:port", and waits for
// the outcome. A name is resolved by the gateway. Where the gateway does not open one
// the error is a *DialError.
func (s *flows) DialUDP(ctx context.Context, address string) (*UDPFlow, error) {
	host, port, err := splitAddress(address)
	if err != nil {
		return nil, err
	}
	if err := s.awaitSettings(ctx); err != nil {
		return nil, err
	}
	path := pathConnectUDP + host + "/" + strconv.Itoa(int(port)) + "/"
	stream, err := s.request(ctx, &http.Request{
		Method: http.MethodConnect, Proto: protoConnectUDP, Host: s.authority,
		Header: http.Header{http3.CapsuleProtocolHeader: {"?1"}},
		URL: &url.URL{
			Scheme: "https", Host: s.authority, Path: path,
			RawPath: strings.ReplaceAll(path, ":", "%3A"),
		},
	})
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { stream.SetReadDeadline(longAgo) })
	response, err := stream.ReadResponse()
	switch {
	case !stop():
		err = fmt.Errorf("wait for the gateway's answer: %w", context.Cause(ctx))
	case err != nil:
		err = flowError(err)
	case response.StatusCode < 200 || response.StatusCode > 299:
		err = answerError(response)
	}
	if err != nil {
		cancelStream(stream, http3.ErrCodeRequestCanceled)
		return nil, err
	}
	return newUDPFlow(stream, flowAddr{"udp", address}, s), nil
}

// awaitSettings waits for what extended CONNECT needs (RFC 9220, section 3).
func (s *flows) awaitSettings(ctx context.Context) error {
	if s == nil {
		return ErrNoFlows
	}
	select {
	case <-s.client.ReceivedSettings():
	case <-ctx.Done():
		return fmt.Errorf("wait for the settings of the other end: %w", context.Cause(ctx))
	case <-s.conn.Context().Done():
		return s.lost(ctx, context.Cause(s.conn.Context()))
	}
	if settings := s.client.Settings(); !settings.EnableExtendedConnect || s.session == nil && !settings.EnableDatagrams {
		return fmt.Errorf("%w: the proxy does not carry UDP (RFC 9298)", syscall.EOPNOTSUPP)
	}
	return nil
}

func newUDPFlow(stream udpStream, remote flowAddr, on *flows) *UDPFlow {
	f := &UDPFlow{
		conn: on.conn, session: on.session, drops: on.drops, stream: stream, remote: remote,
		arrived: make(chan []byte, udpQueue), ended: make(chan struct{}),
	}
	if s := f.session; s != nil {
		f.prefix = quicvarint.Append(nil, uint64(stream.StreamID()/4))
		s.udpFlows.Store(uint64(stream.StreamID()/4), f)
	} else {
		go f.receive()
	}
	f.prefix = append(f.prefix, 0) // context ID 0: a payload of UDP (RFC 9298, section 5)
	go f.readCapsules()
	return f
}

// toUDPFlow hands on a datagram, if its flow is there.
func (s *Session) toUDPFlow(quarter uint64, b []byte) {
	if f, ok := s.udpFlows.Load(quarter); ok {
		f.(*UDPFlow).deliver(b)
	} else {
		s.drops.Add(packet.DropNoSession, 1)
	}
}

// deliver queues the payload of an HTTP Datagram.
func (f *UDPFlow) deliver(b []byte) {
	id, n, err := quicvarint.Parse(b)
	if err != nil || id != 0 || len(b)-n > maxUDP {
		f.drops.Add(packet.DropMalformed, 1)
		return
	}
	select {
	case f.arrived <- b[n:]:
	default:
		f.drops.Add(packet.DropQueueFull, 1)
	}
}

// receive takes datagrams from HTTP/3, where we do not read them ourselves.
func (f *UDPFlow) receive() {
	for {
		b, err := f.stream.ReceiveDatagram(f.stream.Context())
		if err != nil {
			return
		}
		f.deliver(b)
	}
}

// readCapsules reads the stream, with which the flow ends.
func (f *UDPFlow) readCapsules() {
	parser := http3.NewCapsuleParser(f.stream)
	for {
		typ, r, err := parser.Next()
		switch {
		case err != nil:
		case typ != capsuleDatagram:
			err = r.Discard()
		case r.Remaining() > 8+maxUDP:
			err = fmt.Errorf("a datagram of %d bytes", r.Remaining())
		default:
			b := make([]byte, r.Remaining())
			if _, err = io.ReadFull(r, b); err == nil {
				f.deliver(b)
			}
		}
		if err != nil {
			f.end(flowError(err))
			return
		}
	}
}

// end ends the flow; err is what Read then returns.
func (f *UDPFlow) end(err error) {
	f.ending.Do(func() {
		f.why = err
		close(f.ended)
		if f.session != nil {
			f.session.udpFlows.Delete(uint64(f.stream.StreamID() / 4))
		}
		f.stream.CancelRead(quic.StreamErrorCode(http3.ErrCodeNoError))
		f.stream.Close()
	})
}

// Close ends the flow, and with it the socket at the other end.
func (f *UDPFlow) Close() error {
	f.end(net.ErrClosed)
	return nil
}

// Read returns one datagram; what does not fit b is lost. It returns io.EOF when the
// other end has closed the flow.
func (f *UDPFlow) Read(b []byte) (int, error) {
	d, err := f.Receive()
	return copy(b, d), err
}

// Receive is Read without a copy: the datagram is the caller's.
func (f *UDPFlow) Receive() ([]byte, error) {
	select {
	case d := <-f.arrived: // what came before the end
		return d, nil
	default:
	}
	select {
	case d := <-f.arrived:
		return d, nil
	case <-f.ended:
		return nil, f.why
	case <-f.read.passed():
		return nil, os.ErrDeadlineExceeded
	}
}

// Write sends one datagram, and may block where it is too long for a datagram of the
// path.
func (f *UDPFlow) Write(b []byte) (int, error) {
	select {
	case <-f.ended:
		return 0, f.why
	default:
	}
	if len(b) > maxUDP {
		return 0, syscall.EMSGSIZE
	}
	if s := f.session; s != nil {
		s.heard.sentNow()
		if len(f.prefix)+len(b) > s.MTU()+s.datagramOverhead() {
			return f.writeCapsule(b)
		}
		s.queueDatagram(crc32.ChecksumIEEE(f.prefix), f.prefix, b)
		return len(b), nil
	}
	err := f.stream.SendDatagram(append(bytes.Clone(f.prefix), b...))
	if _, ok := errors.AsType[*quic.DatagramTooLargeError](err); ok {
		return f.writeCapsule(b)
	}
	if err != nil {
		return 0, flowError(err)
	}
	return len(b), nil
}

func (f *UDPFlow) writeCapsule(b []byte) (int, error) {
	c := quicvarint.Append(make([]byte, 0, len(b)+16), uint64(capsuleDatagram))
	c = quicvarint.Append(c, uint64(1+len(b)))
	c = append(append(c, 0), b...) // context ID 0
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.stream.Write(c); err != nil {
		return 0, flowError(err)
	}
	return len(b), nil
}

// LocalAddr is the session's; RemoteAddr is the address that was asked for.
func (f *UDPFlow) LocalAddr() net.Addr  { return f.conn.LocalAddr() }
func (f *UDPFlow) RemoteAddr() net.Addr { return f.remote }

func (f *UDPFlow) SetDeadline(t time.Time) error {
	f.read.set(t)
	return f.SetWriteDeadline(t)
}

func (f *UDPFlow) SetReadDeadline(t time.Time) error {
	f.read.set(t)
	return nil
}

func (f *UDPFlow) SetWriteDeadline(t time.Time) error { return f.stream.SetWriteDeadline(t) }

// A deadline is a time that passes. Its zero value does not.
type deadline struct {
	mu    sync.Mutex
	timer *time.Timer
	over  chan struct{} // closed when it has passed
}

func (d *deadline) passed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over == nil {
		d.over = make(chan struct{})
	}
	return d.over
}

// set replaces the time, for readers that wait as well where it comes sooner.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		d.over = nil // it has passed, or does just now
	}
	d.timer = nil
	if d.over == nil {
		d.over = make(chan struct{})
	}
	if t.IsZero() {
		return
	}
	over := d.over
	d.timer = time.AfterFunc(time.Until(t), func() { close(over) })
}

var _ net.Conn = (*UDPFlow)(nil)
