package publish

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A udpServer is a published UDP port.
//
//  1. serve reads a datagram of a client, and the address that it was sent to
//  2. session finds the client's socket in the container's namespace, or makes it
//  3. answers of the app leave by that socket's own goroutine, from the address
//     that the client had sent to, since the client expects them from there
type udpServer struct {
	conn      *net.UDPConn
	to        *container
	published Port
	buffers   sync.Pool // of *[maxDatagram]byte
	full      sync.Once // guards the message that there are too many sessions
	dropped   drops

	mu       sync.Mutex
	sessions map[flow]*session // guarded by mu
}

// maxDatagram is more than any datagram's payload has.
const maxDatagram = 64 << 10

// A flow is what tells a client's sessions apart.
type flow struct {
	client netip.AddrPort
	host   netip.Addr // that the client sends to
}

// A session is a client's socket in the container's namespace.
type session struct {
	flow
	app     *net.UDPConn
	control []byte // of answers: that they leave from flow.host

	// Guarded by the server's mu.
	last     time.Time
	answered bool
}

// drops counts datagrams that did not arrive.
type drops struct {
	full     atomic.Uint64 // too many sessions
	noSocket atomic.Uint64 // none could be made in the container's namespace
	toApp    atomic.Uint64 // the app does not listen, or the datagram is too large
	toClient atomic.Uint64 // the host cannot send it
}

func newUDPServer(conn *net.UDPConn, p Port, to *container) *udpServer {
	return &udpServer{
		conn: conn, to: to, published: p,
		buffers:  sync.Pool{New: func() any { return new([maxDatagram]byte) }},
		sessions: map[flow]*session{},
	}
}

func (s *udpServer) port() uint16 { return s.conn.LocalAddr().(*net.UDPAddr).AddrPort().Port() }
func (s *udpServer) Close() error { return closed(s.conn) }

func (s *udpServer) serve(ctx context.Context) {
	var answers sync.WaitGroup
	buf, control := make([]byte, maxDatagram), make([]byte, 128)
	for {
		n, nc, _, client, err := s.conn.ReadMsgUDPAddrPort(buf, control)
		if err != nil {
			if retry(ctx, s.to, s.published, err) {
				continue
			}
			break
		}
		sess, isNew := s.session(ctx, client, control[:nc])
		if isNew {
			answers.Go(func() { s.answer(sess) })
		}
		if sess != nil {
			s.send(sess, buf[:n])
		}
	}
	s.mu.Lock()
	for _, sess := range s.sessions {
		sess.app.Close()
	}
	s.mu.Unlock()
	answers.Wait()
	s.dropped.log(s.to.log, s.published)
}

// session returns the session of a datagram with its control message, or nil
// where it can have none.
func (s *udpServer) session(ctx context.Context, client netip.AddrPort, control []byte) (sess *session, isNew bool) {
	host, err := answerFrom(control)
	if err != nil {
		s.dropped.toClient.Add(1) // nor would the answer
		return nil, false
	}
	f := flow{client, host}
	s.mu.Lock()
	sess, n := s.sessions[f], len(s.sessions)
	if sess != nil {
		sess.last = time.Now()
	}
	s.mu.Unlock()
	switch {
	case sess != nil:
		return sess, false
	case n >= s.to.limit:
		s.dropped.full.Add(1)
		s.full.Do(func() {
			s.to.log.Warn("a published port has too many clients; further ones are ignored until some have been quiet for a while", "port", s.published, "limit", s.to.limit)
		})
		return nil, false
	}
	app, err := s.to.dialUDP(ctx, client.Addr(), s.published.ContainerPort)
	if err != nil {
		s.dropped.noSocket.Add(1)
		s.to.log.Debug("a client of a published port is ignored", "port", s.published, "client", client, "error", err)
		return nil, false
	}
	sess = &session{flow: f, app: app, control: slices.Clone(control), last: time.Now()}
	s.mu.Lock()
	s.sessions[f] = sess
	s.mu.Unlock()
	return sess, true
}

// send passes a client's datagram on. The error that an earlier one was refused is
// reported here too, in place of sending.
func (s *udpServer) send(sess *session, b []byte) {
	_, err := sess.app.Write(b)
	if errors.Is(err, unix.ECONNREFUSED) {
		_, err = sess.app.Write(b)
	}
	if err != nil {
		s.dropped.toApp.Add(1)
	}
}

// answer passes the app's datagrams on until the session is idle or closed.
func (s *udpServer) answer(sess *session) {
	defer s.end(sess)
	raw, err := sess.app.SyscallConn()
	if err != nil {
		return
	}
	sess.app.SetReadDeadline(time.Now().Add(s.to.idleUnanswered))
	for {
		err := s.answerOne(sess, raw)
		switch {
		case err == nil:
		case errors.Is(err, unix.ECONNREFUSED):
			// An ICMP error about an earlier datagram: the app does not listen, yet.
			s.dropped.toApp.Add(1)
		case errors.Is(err, os.ErrDeadlineExceeded):
			wait := s.remaining(sess)
			if wait <= 0 {
				return
			}
			sess.app.SetReadDeadline(time.Now().Add(wait))
		default:
			return // closed
		}
	}
}

func (s *udpServer) end(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[sess.flow] == sess {
		delete(s.sessions, sess.flow)
	}
	sess.app.Close()
}

// answerOne waits for a datagram of the app and sends it to the client. A buffer is
// needed only while there is one: sessions are many, and most of them wait.
func (s *udpServer) answerOne(sess *session, raw syscall.RawConn) error {
	var buf *[maxDatagram]byte
	var n int
	var failed error
	err := raw.Read(func(fd uintptr) bool {
		buf = s.buffers.Get().(*[maxDatagram]byte)
		if n, failed = unix.Read(int(fd), buf[:]); failed == unix.EAGAIN {
			s.buffers.Put(buf)
			return false
		}
		return true
	})
	if err != nil {
		return err // of the wait
	}
	defer s.buffers.Put(buf)
	if failed != nil {
		return os.NewSyscallError("read", failed)
	}
	s.mu.Lock()
	sess.last, sess.answered = time.Now(), true
	s.mu.Unlock()
	if _, _, err := s.conn.WriteMsgUDPAddrPort(buf[:n], sess.control, sess.client); err != nil {
		s.dropped.toClient.Add(1)
	}
	return nil
}

// remaining returns for how long a session may still be idle. It takes one that may
// not off the map, in the same moment: the client's next datagram makes another.
func (s *udpServer) remaining(sess *session) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	idle := s.to.idleUnanswered
	if sess.answered {
		idle = s.to.idleAnswered
	}
	wait := idle - time.Since(sess.last)
	if wait <= 0 {
		delete(s.sessions, sess.flow)
	}
	return wait
}

var errNoDestination = errors.New("a datagram came without the address that it was sent to")

// answerFrom returns the address that a datagram was sent to, and makes its control
// message that of the answers. They leave by whatever interface leads to the
// client, but for link-local addresses, which are of one interface.
func answerFrom(control []byte) (netip.Addr, error) {
	if len(control) < unix.CmsgLen(0) {
		return netip.Addr{}, errNoDestination
	}
	h, data, _, err := unix.ParseOneSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, err
	}
	switch {
	case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
		clear(data[:4])                                 // the interface
		return netip.AddrFrom4([4]byte(data[4:8])), nil // the source of what is sent
	case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
		host := netip.AddrFrom16([16]byte(data[:16])).Unmap()
		if !host.IsLinkLocalUnicast() || host.Is4() {
			clear(data[16:20])
		}
		return host, nil
	}
	return netip.Addr{}, errNoDestination
}

func (d *drops) log(log *slog.Logger, p Port) {
	full, noSocket, toApp, toClient := d.full.Load(), d.noSocket.Load(), d.toApp.Load(), d.toClient.Load()
	if full+noSocket+toApp+toClient > 0 {
		log.Info("datagrams of a published port were dropped", "port", p,
			"too_many_clients", full, "no_socket", noSocket, "to_the_app", toApp, "to_the_client", toClient)
	}
}
