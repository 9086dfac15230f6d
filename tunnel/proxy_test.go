package tunnel

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
)

// A foreignProxy is a MASQUE proxy made of http3 alone.
type foreignProxy struct {
	t       *testing.T
	address string
	roots   *x509.CertPool
	stop    func()
	auth    []string // of the requests; read it after stop
	running sync.WaitGroup
}

func startForeignProxy(t *testing.T) *foreignProxy {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	p := &foreignProxy{t: t, roots: x509.NewCertPool()}
	p.roots.AddCert(leaf)
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	p.address = udp.LocalAddr().String()
	h3 := http3.Server{
		Handler: p, EnableDatagrams: true,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		h3.Serve(udp)
	}()
	p.stop = sync.OnceFunc(func() {
		h3.Close()
		udp.Close()
		<-done
		p.running.Wait()
	})
	t.Cleanup(p.stop)
	return p
}

func (p *foreignProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.running.Add(1)
	defer p.running.Done()
	p.auth = append(p.auth, r.Header.Get("Proxy-Authorization"))
	network, address := "tcp", r.Host
	if r.Proto == "connect-udp" {
		fields := strings.Split(r.URL.Path, "/")
		network, address = "udp", net.JoinHostPort(fields[4], fields[5])
	}
	upstream, err := net.Dial(network, address)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway) // and not a word more
		return
	}
	defer upstream.Close()
	w.WriteHeader(http.StatusOK)
	stream, err := w.(http3.HTTPStreamer).HTTPStream()
	if err != nil {
		p.t.Error(err)
		return
	}
	if network == "tcp" {
		go func() {
			io.Copy(stream, upstream)
			stream.Close()
		}()
		io.Copy(upstream, stream)
		upstream.(*net.TCPConn).CloseWrite()
		<-stream.Context().Done()
		return
	}
	go func() {
		b := make([]byte, 1500)
		for {
			n, err := upstream.Read(b)
			if err != nil {
				return
			}
			stream.SendDatagram(append([]byte{0}, b[:n]...))
		}
	}()
	go func() {
		for {
			b, err := stream.ReceiveDatagram(context.Background())
			if err != nil {
				return
			}
			upstream.Write(b[1:])
		}
	}()
	io.Copy(io.Discard, stream)
	stream.Close()
}

// A proxy that knows nothing of quicvpn carries TCP and UDP.
func TestForeignProxy(t *testing.T) {
	foreign := startForeignProxy(t)
	p := &Proxy{Address: foreign.address, RootCAs: foreign.roots, User: "u", Password: "p:w"}
	defer p.Close()
	f, err := p.DialTCP(within(t, 10*time.Second), serveTCP(t, echo))
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("0123456789"), 100_000)
	go func() {
		f.Write(data)
		f.CloseWrite()
	}()
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	f.Close()
	if _, err := p.DialTCP(within(t, 10*time.Second), closedPort(t)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, want a refusal", err)
	}

	u, err := p.DialUDP(within(t, 10*time.Second), serveUDP(t))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ { // UDP may lose
		u.Write([]byte("ping"))
		u.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		b := make([]byte, 100)
		if n, err := u.Read(b); err == nil && string(b[:n]) == "ping" {
			break
		} else if i == 20 {
			t.Fatalf("no echo: %v", err)
		}
	}
	u.Close()
	p.Close()
	foreign.stop()
	for _, a := range foreign.auth {
		if a != "Basic dTpwOnc=" {
			t.Errorf("Proxy-Authorization: %q", a)
		}
	}
	if len(foreign.auth) != 3 {
		t.Errorf("%d requests", len(foreign.auth))
	}
}

// A proxy whose certificate nobody vouches for is not asked, one that is away is
// told of as such, and one that has restarted is connected to again.
func TestForeignProxyTrouble(t *testing.T) {
	foreign := startForeignProxy(t)
	stranger := &Proxy{Address: foreign.address}
	defer stranger.Close()
	if _, err := stranger.DialTCP(within(t, 10*time.Second), "192.0.2.1:80"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("%v, want that the certificate is not trusted", err)
	}
	p := &Proxy{Address: foreign.address, RootCAs: foreign.roots}
	defer p.Close()
	to := serveTCP(t, echo)
	for range 2 {
		f, err := p.DialTCP(within(t, 10*time.Second), to)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		p.last.conn.CloseWithError(0, "") // as if it had timed out
	}
	foreign.stop()
	if _, err := p.DialTCP(within(t, 300*time.Millisecond), to); err == nil {
		t.Error("it connects to nobody")
	}
	for _, address := range []string{"", "example.com", "127.0.0.1:0", "127.0.0.1:99999"} {
		if _, err := (&Proxy{Address: address}).DialTCP(t.Context(), to); err == nil || !strings.Contains(err.Error(), "proxy") {
			t.Errorf("%q: %v", address, err)
		}
	}
}
