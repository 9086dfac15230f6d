package socks5

import (
	"context"
	"io"
	"net"
	"testing"
)

// BenchmarkRelay moves data from a server to a client: between two TCP connections
// (splice), with something else at the other side (copy), and without a proxy.
func BenchmarkRelay(b *testing.B) {
	chunk := make([]byte, 256<<10)
	source := listen(b, "127.0.0.1:0", func(c *net.TCPConn) {
		defer c.Close()
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
	for _, way := range []string{"direct", "splice", "copy"} {
		b.Run(way, func(b *testing.B) {
			c := dialTCP(b, source.String())
			if way != "direct" {
				c.Close()
				c = dialTCP(b, benchProxy(b, way == "copy"))
				if reply, _ := ask(b, c, commandConnect, source); reply != succeeded {
					b.Fatal(reply)
				}
			}
			b.SetBytes(int64(len(chunk)))
			buf := make([]byte, len(chunk))
			for b.Loop() {
				if _, err := io.ReadFull(c, buf); err != nil {
					b.Fatal(err)
				}
			}
			c.Close()
		})
	}
}

// BenchmarkConnect is a connection through the proxy, from its TCP handshake to the
// first byte of the server; direct it is one without.
func BenchmarkConnect(b *testing.B) {
	server := listen(b, "127.0.0.1:0", func(c *net.TCPConn) {
		defer c.Close()
		c.Write([]byte("x"))
	})
	proxy := benchProxy(b, false)
	for _, way := range []string{"direct", "proxy"} {
		b.Run(way, func(b *testing.B) {
			for b.Loop() {
				addr := proxy
				if way == "direct" {
					addr = server.String()
				}
				c, err := net.Dial("tcp", addr)
				if err != nil {
					b.Fatal(err)
				}
				if way != "direct" {
					ask(b, c, commandConnect, server)
				}
				expect(b, c, []byte("x"))
				c.Close()
			}
		})
	}
}

func BenchmarkAssociate(b *testing.B) {
	to := udpEcho(b, "127.0.0.1:0")
	tcp := dialTCP(b, benchProxy(b, false))
	_, relay := ask(b, tcp, commandAssociate, Addr{})
	c := (&udpClient{t: b, tcp: tcp, relay: relay}).socket()
	sent, got := datagram(to, make([]byte, 1200)), make([]byte, 1500)
	b.ReportAllocs()
	for b.Loop() {
		send(b, c, sent)
		if _, err := c.Read(got); err != nil {
			b.Fatal(err)
		}
	}
}

func benchProxy(b *testing.B, wrap bool) (addr string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	s := &Server{
		Dial: func(ctx context.Context, network, to string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, to)
			if err == nil && wrap {
				return wrapped{c}, nil
			}
			return c, err
		},
		Associate: func(context.Context) (PacketRelay, error) { return newDirectRelay() },
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	b.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	})
	return l.Addr().String()
}
