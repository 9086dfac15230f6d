package socks5

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quicvpn/quicvpn/internal/relay"
)

// The first byte that a client sends.
const (
	version5  = 5    // RFC 1928
	version4  = 4    // SOCKS4 and 4A
	tlsRecord = 0x16 // a TLS handshake
)

// A client is a connection that was accepted. As a net.Conn it is what net/http
// sees: it starts with the byte that told the protocol, and its framing is checked.
// SOCKS5, and what follows a CONNECT, use the connection inside.
type client struct {
	net.Conn
	first     []byte          // not yet read by net/http
	heads     heads           // of what net/http reads
	upgraded  atomic.Bool     // to something else than HTTP
	transport *http.Transport // to servers; used by one request at a time
	release   func()
	closing   sync.Once
}

// Close ends the connection, if that was not done already, and what it held.
func (c *client) Close() error {
	err := c.Conn.Close()
	c.closing.Do(func() {
		if c.transport != nil {
			c.transport.CloseIdleConnections()
		}
		c.release()
	})
	return err
}

// CloseWrite is what net/http ends a connection with whose client still sends.
func (c *client) CloseWrite() error { return relay.CloseWrite(c.Conn) }

// Read is for net/http.
func (c *client) Read(b []byte) (n int, err error) {
	switch {
	case c.heads.refused():
		return c.heads.read(b)
	case len(c.first) > 0:
		n = copy(b, c.first)
		c.first = c.first[n:]
	default:
		n, err = c.Conn.Read(b)
	}
	if c.upgraded.Load() {
		return n, err
	}
	return c.heads.pass(b[:n]), err
}

// handle serves a client by the protocol that its first byte tells.
func (v *service) handle(c *client) {
	c.SetDeadline(time.Now().Add(v.handshakeTimeout()))
	var first [1]byte
	if _, err := io.ReadFull(c.Conn, first[:]); err != nil {
		c.Close()
		return
	}
	switch b := first[0]; {
	case b == version5:
		v.socks(c.Conn)
	case 'A' <= b && b <= 'Z', 'a' <= b && b <= 'z':
		c.first = first[:]
		c.SetDeadline(time.Time{}) // net/http sets its own
		if v.http.give(c) {
			return // to net/http, which closes it
		}
	default:
		v.refuse(c, b)
	}
	c.Close()
}

// refuse ends the connection of a client that speaks another protocol.
func (v *service) refuse(c *client, first byte) {
	hint := "a client speaks neither SOCKS5 nor HTTP to a proxy"
	switch first {
	case version4:
		hint = "a client speaks SOCKS4, which is not supported: configure it with socks5:// or socks5h://"
		// The rejection, in SOCKS4's form: "request rejected or failed".
		c.Conn.Write([]byte{0, 0x5b, 0, 0, 0, 0, 0, 0})
	case tlsRecord:
		hint = "a client speaks TLS to a proxy that has none: configure the proxy's URL with http:// in place of https://, which is about the way to the proxy, not to servers"
	}
	if v.said.foreign.due() {
		v.log().Warn(hint, "client", c.RemoteAddr(), "first_byte", first)
	}
	finish(c.Conn)
}

// finish ends a connection after a last reply. What the client still sends is
// read for a while: the kernel would answer it by a reset, which may overtake the
// reply.
func finish(conn net.Conn) {
	if relay.CloseWrite(conn) != nil {
		return
	}
	conn.SetReadDeadline(time.Now().Add(time.Second))
	io.CopyN(io.Discard, conn, 64<<10)
}

// addrPort returns the IP address and port of a connection's end, or none where it
// has none.
func addrPort(a net.Addr) netip.AddrPort {
	var p netip.AddrPort
	switch a := a.(type) {
	case *net.TCPAddr:
		p = a.AddrPort()
	case *net.UDPAddr:
		p = a.AddrPort()
	}
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}

// An occasion is for a message that clients can provoke: it is due once a minute.
type occasion struct{ last atomic.Int64 } // in Unix nanoseconds

func (o *occasion) due() bool {
	last, now := o.last.Load(), time.Now().UnixNano()
	return now-last >= int64(time.Minute) && o.last.CompareAndSwap(last, now)
}
