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
	"sync"
	"sync/atomic"
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
