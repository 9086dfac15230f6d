package tunnel

import (
	"context"
	"io"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
)

// BenchmarkSocketStream sends one stream over a veth pair, by quic-go alone and
// with the socket below it.
func BenchmarkSocketStream(b *testing.B) {
	for _, name := range []string{"plain", "socket"} {
		b.Run(name, func(b *testing.B) {
			p := newSocketPair(b)
			serverTLS, clientTLS := socketTLS(b)
			open := func(ns interface {
				ListenPacket(network, address string) (net.PacketConn, error)
			}, at netip.Addr) net.PacketConn {
				pc, err := ns.ListenPacket("udp4", netip.AddrPortFrom(at, 0).String())
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { pc.Close() })
				return pc
			}
			var sconn, cconn net.PacketConn
			if name == "plain" {
				sconn, cconn = open(p.b, addrB4), open(p.a, addrA4)
			} else {
				sconn, cconn = openSocket(b, p.b, listenAt(addrB4)), openSocket(b, p.a, listenAt(addrA4))
			}
			str, ctr := &quic.Transport{Conn: sconn}, &quic.Transport{Conn: cconn}
			b.Cleanup(func() { str.Close(); ctr.Close() })
			ln, err := str.Listen(serverTLS, socketQUIC())
			if err != nil {
				b.Fatal(err)
			}
			conn := dialSocket(b, ctr, sconn.LocalAddr(), clientTLS, socketQUIC())
			peer, err := ln.Accept(context.Background())
			if err != nil {
				b.Fatal(err)
			}
			s, err := conn.OpenUniStream()
			if err != nil {
				b.Fatal(err)
			}
			const chunk = 1 << 20
			buf := make([]byte, chunk)
			if _, err := s.Write(buf); err != nil {
				b.Fatal(err)
			}
			rs, err := peer.AcceptUniStream(context.Background())
			if err != nil {
				b.Fatal(err)
			}
			rbuf := make([]byte, chunk)
			if _, err := io.ReadFull(rs, rbuf); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(chunk)
			before := cpuTime(b)
			b.ResetTimer()
			done := make(chan error, 1)
			go func() {
				for range b.N {
					if _, err := s.Write(buf); err != nil {
						done <- err
						return
					}
				}
				done <- s.Close()
			}()
			for range b.N {
				if _, err := io.ReadFull(rs, rbuf); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			if err := <-done; err != nil {
				b.Fatal(err)
			}
			gbit := float64(b.N) * chunk * 8 / 1e9
			b.ReportMetric(gbit/b.Elapsed().Seconds(), "Gbit/s")
			b.ReportMetric((cpuTime(b)-before).Seconds()/gbit, "cpu-s/Gbit")
			if s, ok := cconn.(*socket); ok && b.N > 100 {
				st, rx := s.Stats(), sconn.(*socket).Stats()
				b.ReportMetric(float64(rx.Segments)/float64(st.Sends), "packets/send")
				b.ReportMetric(float64(rx.Segments)/float64(rx.Receives), "packets/receive")
			}
			runtime.KeepAlive(conn)
		})
	}
}

// cpuTime is the processor time that the process has used.
func cpuTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
