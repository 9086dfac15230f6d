package tunnel

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

var _ quic.OOBCapablePacketConn = (*socket)(nil)

// socketTLS returns what a server and a client of these tests need.
func socketTLS(t testing.TB) (server, client *tls.Config) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"socket.test"}}
	der, err := x509.CreateCertificate(nil, cert, cert, pub, key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	roots.AddCert(cert)
	server = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: []string{"socket"}}
	return server, &tls.Config{RootCAs: roots, ServerName: "socket.test", NextProtos: []string{"socket"}}
}

func socketQUIC() *quic.Config {
	return &quic.Config{
		EnableDatagrams:            true,
		InitialStreamReceiveWindow: 16 << 20, MaxStreamReceiveWindow: 16 << 20,
		InitialConnectionReceiveWindow: 32 << 20, MaxConnectionReceiveWindow: 32 << 20,
		MaxIdleTimeout: 20 * time.Second,
	}
}

// payload is a reader of n bytes that a seed determines.
func payload(seed uint64, n int64) io.Reader {
	var key [32]byte
	binary.BigEndian.PutUint64(key[:], seed)
	return io.LimitReader(rand.NewChaCha8(key), n)
}

func digest(t testing.TB, r io.Reader) (sum [sha256.Size]byte, n int64) {
	t.Helper()
	h := sha256.New()
	n, err := io.CopyBuffer(h, struct{ io.Reader }{r}, make([]byte, 64<<10))
	if err != nil {
		t.Errorf("after %d bytes: %v", n, err)
	}
	return [sha256.Size]byte(h.Sum(nil)), n
}

// echoStreams answers on every stream of every connection with as many bytes as
// the stream's first eight say, and with the hash of the rest of what came.
func echoStreams(t testing.TB, ln *quic.Listener) {
	ctx := context.Background()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept(ctx)
			if err != nil {
				return
			}
			wg.Go(func() {
				for {
					s, err := c.AcceptStream(ctx)
					if err != nil {
						return
					}
					wg.Go(func() { echoStream(t, s) })
				}
			})
			wg.Go(func() {
				for {
					d, err := c.ReceiveDatagram(ctx)
					if err != nil {
						return
					}
					if err := c.SendDatagram(d); err != nil {
						t.Errorf("echo datagram: %v", err)
					}
				}
			})
		}
	})
	t.Cleanup(wg.Wait)
}

func echoStream(t testing.TB, s *quic.Stream) {
	var head [8]byte
	if _, err := io.ReadFull(s, head[:]); err != nil {
		t.Errorf("read request: %v", err)
		return
	}
	back := make(chan error, 1)
	n := int64(binary.BigEndian.Uint64(head[:]))
	sum := make(chan [sha256.Size]byte, 1)
	go func() {
		_, err := io.Copy(s, payload(uint64(n), n))
		if err == nil {
			got := <-sum
			_, err = s.Write(got[:])
		}
		back <- errors.Join(err, s.Close())
	}()
	got, _ := digest(t, s)
	sum <- got
	if err := <-back; err != nil {
		t.Errorf("answer: %v", err)
	}
}

// exchange sends up and asks for down bytes on a new stream, both at once, and
// checks what arrives at either end.
func exchange(t testing.TB, c *quic.Conn, up, down int64) {
	t.Helper()
	s, err := c.OpenStreamSync(context.Background())
	if err != nil {
		t.Error(err)
		return
	}
	sent := make(chan error, 1)
	go func() {
		_, err := s.Write(binary.BigEndian.AppendUint64(nil, uint64(down)))
		if err == nil {
			_, err = io.Copy(s, payload(1, up))
		}
		sent <- errors.Join(err, s.Close())
	}()
	got, n := digest(t, io.LimitReader(s, down))
	if want, _ := digest(t, payload(uint64(down), down)); got != want {
		t.Errorf("the %d of %d bytes down are not those that were sent", n, down)
	}
	sum, err := io.ReadAll(s)
	if want, _ := digest(t, payload(1, up)); err != nil || !bytes.Equal(sum, want[:]) {
		t.Errorf("the bytes up did not arrive as sent (%v)", err)
	}
	if err := <-sent; err != nil {
		t.Errorf("send: %v", err)
	}
}

// ecnSocket counts the packets that came with an ECN-capable mark.
type ecnSocket struct {
	*socket
	capable, all atomic.Int64
}

func (s *ecnSocket) ReadBatch(ms []ipv4.Message, flags int) (int, error) {
	n, err := s.socket.ReadBatch(ms, flags)
	for _, m := range ms[:n] {
		s.all.Add(1)
		controlMessages(m.OOB[:m.NN], func(level, typ int32, data, _ []byte) {
			if level == unix.IPPROTO_IP && typ == unix.IP_TOS || level == unix.IPPROTO_IPV6 && typ == unix.IPV6_TCLASS {
				if data[0]&3 == 2 || data[0]&3 == 1 {
					s.capable.Add(1)
				}
			}
		})
	}
	return n, err
}

// serve starts an echo server on a socket and returns its listener.
func serveSocket(t testing.TB, conn net.PacketConn, tlsConf *tls.Config) *quic.Transport {
	t.Helper()
	tr := &quic.Transport{Conn: conn}
	ln, err := tr.Listen(tlsConf, socketQUIC())
	if err != nil {
		t.Fatal(err)
	}
	echoStreams(t, ln)
	t.Cleanup(func() { ln.Close(); tr.Close() })
	return tr
}

func dialSocket(t testing.TB, tr *quic.Transport, to net.Addr, tlsConf *tls.Config, conf *quic.Config) *quic.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := tr.Dial(ctx, to, tlsConf, conf)
	if err != nil {
		t.Fatalf("dial %v: %v", to, err)
	}
	t.Cleanup(func() { c.CloseWithError(0, "") })
	return c
}

// Streams and datagrams of quic-go pass through the socket, both ways at once, in
// all its variants.
func TestSocketQUIC(t *testing.T) {
	for _, tc := range []struct {
		name     string
		server   socketConfig // both ends but for the address
		client   netip.Addr
		to       netip.Addr
		up, down int64
	}{
		{"IPv4", listenAt(netip.IPv4Unspecified()), netip.IPv4Unspecified(), addrB4, 64 << 20, 64 << 20},
		{"IPv6", listenAt(addrB6), netip.IPv6Unspecified(), addrB6, 10 << 20, 10 << 20},
		{"IPv4 at a server for both", socketConfig{}, netip.IPv4Unspecified(), addrB4, 10 << 20, 10 << 20},
		{"IPv6 at a server for both", socketConfig{}, addrA6, addrB6, 10 << 20, 10 << 20},
		{"no GRO", socketConfig{DisableGRO: true}, netip.IPv4Unspecified(), addrB4, 10 << 20, 10 << 20},
		{"no GSO", socketConfig{DisableGSO: true}, netip.IPv4Unspecified(), addrB4, 10 << 20, 10 << 20},
		{"neither", socketConfig{DisableGRO: true, DisableGSO: true}, netip.IPv4Unspecified(), addrB4, 10 << 20, 10 << 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newSocketPair(t)
			serverTLS, clientTLS := socketTLS(t)
			server := &ecnSocket{socket: openSocket(t, p.b, tc.server)}
			serveSocket(t, server, serverTLS)
			clientCfg := tc.server
			clientCfg.Listen = netip.AddrPortFrom(tc.client, 0)
			client := &ecnSocket{socket: openSocket(t, p.a, clientCfg)}
			tr := &quic.Transport{Conn: client}
			defer tr.Close()
			c := dialSocket(t, tr, socketPort(server.socket, tc.to), clientTLS, socketQUIC())

			for i := range 300 {
				d := bytes.Repeat([]byte{byte(i)}, 1+i*1100/300)
				if err := c.SendDatagram(d); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				got, err := c.ReceiveDatagram(ctx)
				cancel()
				if err != nil || !bytes.Equal(got, d) {
					t.Fatalf("datagram %d came back as %d bytes, %v", i, len(got), err)
				}
			}
			exchange(t, c, tc.up, tc.down)
			c.CloseWithError(0, "")

			for name, s := range map[string]*ecnSocket{"server": server, "client": client} {
				st := s.Stats()
				t.Logf("%s: %+v", name, st)
				if st.SendLost+st.SendTooBig+st.GSORefused+st.Oversize+st.ICMPErrors != 0 {
					t.Errorf("%s: stats %+v", name, st)
				}
				// A veth merges nothing by itself: what comes merged was sent merged.
				merges := !tc.server.DisableGRO && !tc.server.DisableGSO
				if merges != (st.Segments > plainMessages*st.Receives) {
					t.Errorf("%s: %d packets took %d calls", name, st.Segments, st.Receives)
				}
				if merged := st.Merged > 0; merged == tc.server.DisableGSO {
					t.Errorf("%s: %d writes merged", name, st.Merged)
				}
				if n, all := s.capable.Load(), s.all.Load(); n < all/2 {
					t.Errorf("%s: ECN in %d of %d packets", name, n, all)
				}
			}
		})
	}
}

// Many connections share the server's socket, each with a client of its own and
// two with a common one.
func TestSocketManyConnections(t *testing.T) {
	p := newSocketPair(t)
	serverTLS, clientTLS := socketTLS(t)
	server := openSocket(t, p.b, socketConfig{})
	serveSocket(t, server, serverTLS)
	var wg sync.WaitGroup
	for i := range 12 {
		to := addrB4
		if i%2 == 1 {
			to = addrB6
		}
		client := openSocket(t, p.a, socketConfig{})
		tr := &quic.Transport{Conn: client}
		t.Cleanup(func() { tr.Close() })
		for range 2 {
			c := dialSocket(t, tr, socketPort(server, to), clientTLS, socketQUIC())
			wg.Go(func() { exchange(t, c, 1<<20, 1<<20) })
		}
	}
	wg.Wait()
}

// The end of a connection reaches the peer before the socket is gone.
func TestSocketQUICClose(t *testing.T) {
	p := newSocketPair(t)
	serverTLS, clientTLS := socketTLS(t)
	server := openSocket(t, p.b, listenAt(addrB4))
	str := &quic.Transport{Conn: server}
	defer str.Close()
	ln, err := str.Listen(serverTLS, socketQUIC())
	if err != nil {
		t.Fatal(err)
	}
	client := openSocket(t, p.a, listenAt(netip.IPv4Unspecified()))
	ctr := &quic.Transport{Conn: client}
	c := dialSocket(t, ctr, socketPort(server, addrB4), clientTLS, socketQUIC())
	peer, err := ln.Accept(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.OpenUniStream()
	if err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error)
	go func() { // busy, so that segments are held
		_, err := io.Copy(s, payload(1, 1<<40))
		wrote <- err
	}()
	rs, err := peer.AcceptUniStream(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, rs, 1<<20); err != nil {
		t.Fatal(err)
	}
	c.CloseWithError(42, "enough")
	if err := errors.Join(ctr.Close(), client.Close()); err != nil {
		t.Error(err)
	}
	<-wrote
	select {
	case <-peer.Context().Done():
		var closed *quic.ApplicationError
		if err := context.Cause(peer.Context()); !errors.As(err, &closed) || closed.ErrorCode != 42 || closed.ErrorMessage != "enough" {
			t.Errorf("the peer saw %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the peer did not see the end")
	}
}

// Closing the socket below busy connections ends them and all goroutines.
func TestSocketCloseBelowQUIC(t *testing.T) {
	p := newSocketPair(t)
	serverTLS, clientTLS := socketTLS(t)
	server := openSocket(t, p.b, listenAt(addrB4))
	str := &quic.Transport{Conn: server}
	ln, err := str.Listen(serverTLS, socketQUIC())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept(context.Background())
			if err != nil {
				return
			}
			wg.Go(func() {
				if s, err := c.OpenUniStream(); err == nil {
					_, err = io.Copy(s, payload(1, 1<<40))
					if err == nil {
						t.Error("endless bytes ended")
					}
				}
			})
		}
	})
	client := openSocket(t, p.a, listenAt(netip.IPv4Unspecified()))
	ctr := &quic.Transport{Conn: client}
	for range 3 {
		c := dialSocket(t, ctr, socketPort(server, addrB4), clientTLS, socketQUIC())
		s, err := c.AcceptUniStream(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { io.Copy(io.Discard, s) })
	}
	time.Sleep(100 * time.Millisecond)
	var all sync.WaitGroup
	for _, s := range []*socket{server, client} {
		all.Go(func() {
			if err := s.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
	all.Wait()
	for _, tr := range []*quic.Transport{str, ctr} {
		if err := tr.Close(); err != nil {
			t.Errorf("close transport: %v", err)
		}
	}
	wg.Wait()
}

// A connection outlives its network: a link that is down, a firewall.
func TestSocketQUICSurvives(t *testing.T) {
	p := newSocketPair(t)
	serverTLS, clientTLS := socketTLS(t)
	server := openSocket(t, p.b, socketConfig{})
	serveSocket(t, server, serverTLS)
	client := openSocket(t, p.a, listenAt(netip.IPv4Unspecified()))
	tr := &quic.Transport{Conn: client}
	defer tr.Close()
	c := dialSocket(t, tr, socketPort(server, addrB4), clientTLS, socketQUIC())
	done := make(chan struct{})
	go func() {
		defer close(done)
		exchange(t, c, 20<<20, 20<<20)
	}()
	for range 2 {
		time.Sleep(50 * time.Millisecond)
		for _, f := range [][2]func(){
			{p.ia.Down, p.ia.Up},
			{p.ib.Down, p.ib.Up},
			{func() {
				p.a.Nft(`table inet t { chain c { type filter hook output priority 0; policy drop; }; }`)
			}, func() { p.a.Nft("delete table inet t") }},
		} {
			f[0]()
			time.Sleep(50 * time.Millisecond)
			f[1]()
		}
	}
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("the transfer did not end")
	}
	t.Logf("client %+v", client.Stats())
	if err := context.Cause(c.Context()); err != nil {
		t.Errorf("the connection ended: %v", err)
	}
}

// quic-go's own packets make a router's refusal known: those of a handshake that
// are too large, and the probes for a larger MTU.
func TestSocketQUICPathMTU(t *testing.T) {
	for _, tc := range []struct {
		name string
		to   netip.Addr
		mtu  int
		size uint16
	}{
		{"IPv4 probes", serverAddr4, 1400, 1200},
		{"IPv6 probes", serverAddr6, 1400, 1200},
		{"IPv4 handshake", serverAddr4, 1300, 1452},
		{"IPv6 handshake", serverAddr6, 1300, 1452},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newRoutedPair(t, tc.mtu)
			serverTLS, clientTLS := socketTLS(t)
			server := openSocket(t, p.server, socketConfig{})
			serveSocket(t, server, serverTLS)
			cfg, events := tooBigEvents(listenAt(netip.IPv4Unspecified()))
			if tc.to.Is6() {
				cfg.Listen = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
			}
			tr := &quic.Transport{Conn: openSocket(t, p.client, cfg)}
			defer tr.Close()
			conf := socketQUIC()
			conf.InitialPacketSize = tc.size
			to := socketPort(server, tc.to)
			if tc.size == 1452 {
				ctx, cancel := context.WithCancel(context.Background())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					if c, err := tr.Dial(ctx, to, clientTLS, conf); err == nil {
						t.Errorf("a handshake with packets of %d bytes succeeded", conf.InitialPacketSize)
						c.CloseWithError(0, "")
					}
				}()
				if got, want := nextEvent(t, events), (tooBigEvent{to.AddrPort(), tc.mtu}); got != want {
					t.Errorf("%v, want %v", got, want)
				}
				cancel()
				<-ended
				// With what was learned it works.
				conf.InitialPacketSize = uint16(packetSizeOf(tc.to, tc.mtu))
			}
			c := dialSocket(t, tr, to, clientTLS, conf)
			exchange(t, c, 5<<20, 5<<20)
			if tc.size != 1452 {
				if got, want := nextEvent(t, events), (tooBigEvent{to.AddrPort(), tc.mtu}); got != want {
					t.Errorf("%v, want %v", got, want)
				}
			}
		})
	}
}

// packetSizeOf returns the UDP payload of an IP packet.
func packetSizeOf(to netip.Addr, mtu int) int {
	if to.Is4() {
		return mtu - 28
	}
	return mtu - 48
}

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
