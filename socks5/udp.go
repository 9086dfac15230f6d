package socks5

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A PacketRelay exchanges datagrams with hosts for one client. Send and Receive are
// called by one goroutine each.
type PacketRelay interface {
	// Send sends a datagram. An error means that this one was dropped. It must not
	// keep b.
	Send(b []byte, to Addr) error
	// Receive waits for a datagram and returns it with its sender: the name that it
	// was sent to, where the sender's address is not known. The datagram is valid
	// until the next call. An error ends the association.
	Receive() (b []byte, from Addr, err error)
	// Close ends Receive.
	Close() error
}

// An association relays the datagrams of a client (RFC 1928 section 7), for as long
// as the TCP connection by which the client has asked for it.
//
//  1. fromClient waits for a datagram of the client and no one else, takes its header
//     off, and sends it to the relay
//  2. fromRelay puts a header before a datagram of the relay and sends it to the client
//  3. hold waits for the end of the TCP connection, or of idleness
//
// The header is part of the client's datagrams: with it a payload must not pass
// 65,507 bytes by IPv4, 65,527 by IPv6.
type association struct {
	conn  net.Conn // TCP
	pc    net.PacketConn
	relay PacketRelay
	drops *drops
	idle  time.Duration

	peer   netip.Addr                     // the client; it has no other address
	client atomic.Pointer[netip.AddrPort] // once its port is known
	last   atomic.Int64                   // when there was a datagram, in Unix nanoseconds
}

// associate serves UDP ASSOCIATE; from is where the client says that it will send
// from.
func (v *service) associate(conn net.Conn, from Addr) {
	local, peer := addrPort(conn.LocalAddr()).Addr(), addrPort(conn.RemoteAddr()).Addr()
	pc, err := v.listenPacket(local)
	if err != nil {
		v.log().Warn("a proxy cannot open a socket for a client's datagrams", "local", local, "error", err)
		v.reply(conn, GeneralFailure)
		return
	}
	defer pc.Close()
	relay, err := v.openRelay(conn)
	if err != nil {
		return
	}
	a := &association{conn: conn, pc: pc, relay: relay, drops: &v.drops, idle: v.udpIdle(), peer: peer}
	a.expect(from)
	if _, err := conn.Write(appendReply(nil, succeeded, addrFrom(addrPort(pc.LocalAddr())))); err != nil {
		relay.Close()
		return
	}
	a.run()
}

// openRelay tells the client of an error.
func (v *service) openRelay(conn net.Conn) (PacketRelay, error) {
	watched, stop := v.watch(conn)
	ctx, cancel := context.WithTimeout(watched, v.dialTimeout())
	defer cancel()
	relay, err := v.Associate(ctx)
	_, gone := stop()
	if err != nil {
		v.log().Debug("a proxy cannot relay datagrams", "error", err)
		if !gone {
			v.reply(conn, replyTo(err))
		}
	}
	return relay, err
}

func (s *Server) listenPacket(local netip.Addr) (net.PacketConn, error) {
	if s.ListenPacket != nil {
		return s.ListenPacket(local)
	}
	return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0)))
}

// expect takes the port that the client has announced. One that is announced with
// another address than the client's is that of another side of a NAT: then, and
// where none is announced, the first datagram tells.
func (a *association) expect(from Addr) {
	if from.Port != 0 && (from.IP == a.peer || from.IP.IsUnspecified()) {
		client := netip.AddrPortFrom(a.peer, from.Port)
		a.client.Store(&client)
	}
}

func (a *association) run() {
	a.touch()
	var running sync.WaitGroup
	for _, pass := range []func(){a.fromClient, a.fromRelay} {
		running.Go(func() {
			pass()
			a.conn.Close() // ends hold
		})
	}
	a.hold()
	a.pc.Close()
	a.relay.Close()
	running.Wait()
}

func (a *association) touch() { a.last.Store(time.Now().UnixNano()) }

// hold returns when the client closes its TCP connection, on which it has nothing to
// say, or was idle.
func (a *association) hold() {
	var b [512]byte
	a.conn.SetReadDeadline(time.Now().Add(a.idle))
	for {
		_, err := a.conn.Read(b[:])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			last := time.Unix(0, a.last.Load())
			if time.Since(last) >= a.idle {
				return
			}
			a.conn.SetReadDeadline(last.Add(a.idle))
		} else if err != nil {
			return
		}
	}
}

// fromClient returns when the socket is closed.
func (a *association) fromClient() {
	for awaitDatagram(a.pc) == nil && a.oneFromClient() == nil {
	}
}

// oneFromClient returns an error of the socket.
func (a *association) oneFromClient() error {
	buf := buffers.Get().(*[busyBuffer]byte)
	defer buffers.Put(buf)
	n, from, err := readFrom(a.pc, buf[:])
	if err != nil {
		return err
	}
	client := a.client.Load()
	if from.Addr() != a.peer || client != nil && *client != from {
		a.drops.add(dropStranger)
		return nil
	}
	to, data, reason := parseDatagram(buf[:n])
	if reason != 0 {
		a.drops.add(reason)
		return nil
	}
	if client == nil {
		first := from // or each datagram's address would be on the heap
		a.client.Store(&first)
	}
	a.touch()
	if a.relay.Send(data, to) != nil {
		a.drops.add(dropUnsent)
	}
	return nil
}

// fromRelay returns when the relay ends.
func (a *association) fromRelay() {
	for {
		data, from, err := a.relay.Receive()
		if err != nil {
			return
		}
		a.touch()
		client := a.client.Load()
		if client == nil || len(from.Name) > 255 {
			a.drops.add(dropNoClient)
			continue
		}
		buf := buffers.Get().(*[busyBuffer]byte)
		b := append(from.append(append(buf[:0], 0, 0, 0)), data...)
		if err := writeTo(a.pc, b, *client); errors.Is(err, syscall.EMSGSIZE) {
			a.drops.add(dropTooBig)
		} else if err != nil {
			a.drops.add(dropNoClient)
		}
		buffers.Put(buf)
	}
}

// parseDatagram splits a client's datagram into its header, which says where to, and
// the data. A reason means that it has to be dropped.
func parseDatagram(b []byte) (to Addr, data []byte, reason drop) {
	if len(b) < 4 || b[0] != 0 || b[1] != 0 {
		return to, nil, dropMalformed
	}
	if b[2] != 0 {
		return to, nil, dropFragment
	}
	to, data, err := cutAddr(b[3:])
	if err != nil || to.Port == 0 {
		return to, nil, dropMalformed
	}
	return to, data, 0
}

// awaitDatagram waits until there is something to read, so that an idle association
// holds no buffer. A socket that is not the system's it leaves to its Read.
func awaitDatagram(pc net.PacketConn) error {
	c, ok := pc.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n != 0 || err != nil
	})
}

func readFrom(pc net.PacketConn, b []byte) (n int, from netip.AddrPort, err error) {
	if u, ok := pc.(*net.UDPConn); ok {
		n, from, err = u.ReadFromUDPAddrPort(b)
		return n, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), err
	}
	n, addr, err := pc.ReadFrom(b)
	if err != nil {
		return 0, from, err
	}
	return n, addrPort(addr), nil
}

func writeTo(pc net.PacketConn, b []byte, to netip.AddrPort) error {
	if u, ok := pc.(*net.UDPConn); ok {
		_, err := u.WriteToUDPAddrPort(b, to)
		return err
	}
	_, err := pc.WriteTo(b, net.UDPAddrFromAddrPort(to))
	return err
}
