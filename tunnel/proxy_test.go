package tunnel

import (
	"bytes"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/tunnel/masquetest"
)

func startForeignProxy(t *testing.T) (p *masquetest.Proxy, address string, roots *x509.CertPool) {
	t.Helper()
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	p, roots = masquetest.Start(t, udp, new(net.Dialer).DialContext), x509.NewCertPool()
	roots.AppendCertsFromPEM(p.Certificate)
	return p, udp.LocalAddr().String(), roots
}

// A proxy that knows nothing of quicvpn carries TCP and UDP.
func TestForeignProxy(t *testing.T) {
	foreign, address, roots := startForeignProxy(t)
	p := &Proxy{Address: address, RootCAs: roots, User: "u", Password: "p:w"}
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
	foreign.Stop()
	for _, a := range foreign.Authorizations() {
		if a != "Basic dTpwOnc=" {
			t.Errorf("Proxy-Authorization: %q", a)
		}
	}
	if len(foreign.Authorizations()) != 3 {
		t.Errorf("%d requests", len(foreign.Authorizations()))
	}
}

// A proxy whose certificate nobody vouches for is not asked, one that is away is
// told of as such, and one that has restarted is connected to again.
func TestForeignProxyTrouble(t *testing.T) {
	foreign, address, roots := startForeignProxy(t)
	stranger := &Proxy{Address: address}
	defer stranger.Close()
	if _, err := stranger.DialTCP(within(t, 10*time.Second), "192.0.2.1:80"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("%v, want that the certificate is not trusted", err)
	}
	p := &Proxy{Address: address, RootCAs: roots}
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
	foreign.Stop()
	if _, err := p.DialTCP(within(t, 300*time.Millisecond), to); err == nil {
		t.Error("it connects to nobody")
	}
	for _, address := range []string{"", "example.com", "127.0.0.1:0", "127.0.0.1:99999"} {
		if _, err := (&Proxy{Address: address}).DialTCP(t.Context(), to); err == nil || !strings.Contains(err.Error(), "proxy") {
			t.Errorf("%q: %v", address, err)
		}
	}
}
