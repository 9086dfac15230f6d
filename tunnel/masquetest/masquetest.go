// Package masquetest has a MASQUE proxy that is made of quic-go's http3 alone, for
// tests of those that use one.
package masquetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
)

// A Proxy knows CONNECT and CONNECT-UDP, and tells no more than HTTP must.
type Proxy struct {
	// Certificate is the one to trust, in PEM.
	Certificate []byte

	t       testing.TB
	dial    Dial
	stop    func()
	running sync.WaitGroup

	mu   sync.Mutex
	auth []string
}

// Dial is a net.Dialer's DialContext.
type Dial func(ctx context.Context, network, address string) (net.Conn, error)

// Start serves a socket until the test ends, and dials what it is asked for. The
// certificate is for the socket's address.
func Start(t testing.TB, pc net.PacketConn, dial Dial) *Proxy {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{pc.LocalAddr().(*net.UDPAddr).IP},
		IsCA:        true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{t: t, dial: dial, Certificate: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	h3 := http3.Server{
		Handler: p, EnableDatagrams: true,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		h3.Serve(pc)
	}()
	p.stop = sync.OnceFunc(func() {
		h3.Close()
		pc.Close()
		<-done
		p.running.Wait()
	})
	t.Cleanup(p.stop)
	return p
}

// Stop ends it sooner.
func (p *Proxy) Stop() { p.stop() }

// Authorizations returns the Proxy-Authorization of each request.
func (p *Proxy) Authorizations() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.auth
}

func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.running.Add(1)
	defer p.running.Done()
	p.mu.Lock()
	p.auth = append(p.auth, r.Header.Get("Proxy-Authorization"))
	p.mu.Unlock()
	network, address := "tcp", r.Host
	if r.Proto == "connect-udp" {
		fields := strings.Split(r.URL.Path, "/")
		network, address = "udp", net.JoinHostPort(fields[4], fields[5])
	}
	upstream, err := p.dial(r.Context(), network, address)
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
