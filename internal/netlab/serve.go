package netlab

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"
)

const retry = 20 * time.Millisecond

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// Page is how every page of ServeHTTP starts; the address that the server saw
// the client as follows on the same line.
const Page = "quicvpn netlab: you are "

// ServeHTTP serves pages on the port, of all the namespace's addresses: "/" says
// who asked, "/bytes/N" has N bytes.
func (n *NS) ServeHTTP(port uint16) {
	n.lab.tb.Helper()
	n.serve(port, nil)
}

// ServeHTTPS is ServeHTTP over TLS with a certificate that nobody trusts, large
// enough for the server's first flight to take several packets.
func (n *NS) ServeHTTPS(port uint16) {
	n.lab.tb.Helper()
	cert, err := largeCertificate()
	if err != nil {
		n.lab.tb.Fatalf("make a certificate: %v", err)
	}
	n.serve(port, &tls.Config{Certificates: []tls.Certificate{cert}})
}

func (n *NS) serve(port uint16, conf *tls.Config) {
	n.lab.tb.Helper()
	ln, err := n.Listen("tcp", net.JoinHostPort("", strconv.Itoa(int(port))))
	if err != nil {
		n.lab.tb.Fatalf("serve pages in %s: %v", n.Name, err)
	}
	if conf != nil {
		ln = tls.NewListener(ln, conf)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintf(w, "%s%s\n", Page, host)
	})
	mux.HandleFunc("/bytes/{n}", func(w http.ResponseWriter, r *http.Request) {
		size, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
		// A client that goes away is its own business.
		_, _ = io.CopyN(w, zeros{}, size)
	})
	// What clients do wrong, such as to end in the middle, is not worth a line.
	srv := &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0)}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) }) // always ErrServerClosed, by the Close below
	n.lab.onClose(func() {
		srv.Close()
		wg.Wait()
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// ServeEcho sends back what comes to the port by UDP, from the address it came
// to, as it came.
func (n *NS) ServeEcho(port uint16) {
	n.lab.tb.Helper()
	for _, addr := range n.addresses() {
		pc, err := n.ListenPacket("udp", netip.AddrPortFrom(addr, port).String())
		if err != nil {
			n.lab.tb.Fatalf("serve echo in %s: %v", n.Name, err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			buf := make([]byte, 64<<10)
			for {
				size, from, err := pc.ReadFrom(buf)
				if err != nil {
					return // closed below
				}
				// An echo that the path refuses is for the asker to miss.
				_, _ = pc.WriteTo(buf[:size], from)
			}
		})
		n.lab.onClose(func() {
			pc.Close()
			wg.Wait()
		})
	}
}

// addresses returns the namespace's global addresses.
func (n *NS) addresses() (addrs []netip.Addr) {
	n.lab.tb.Helper()
	n.must("list addresses", func() error {
		all, err := net.InterfaceAddrs()
		for _, a := range all {
			p, perr := netip.ParsePrefix(a.String())
			if perr == nil && p.Addr().IsGlobalUnicast() {
				addrs = append(addrs, p.Addr())
			}
		}
		return err
	})
	return addrs
}

// HTTPClient returns a client whose connections start in the namespace, one for
// each request, and that trusts every certificate.
func (n *NS) HTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext:       n.DialContext,
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
	}}
}

// Get fetches a page from inside the namespace.
func (n *NS) Get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := n.HTTPClient().Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", fmt.Errorf("read page: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("get %s: %s: %s", url, resp.Status, body)
	}
	return string(body), nil
}

// largeCertificate returns a self-signed certificate of about 5 KB.
func largeCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "netlab"},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
	for i := range 120 {
		tmpl.DNSNames = append(tmpl.DNSNames, fmt.Sprintf("name-%d.of.a.large.certificate.example", i))
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
