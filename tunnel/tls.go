package tunnel

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
)

// Reasons for which a client does not trust a gateway.
var (
	// ErrPin: the gateway's key is not the one that the token names.
	ErrPin = errors.New("the gateway's key is not the one in the token: " +
		"someone is in between, or the gateway has a new identity; get a new token from its operator")
	// ErrNotYetValid and ErrExpired: one of the two clocks is wrong.
	ErrNotYetValid = errors.New("the gateway's certificate is not yet valid: set this machine's clock, or the gateway's")
	ErrExpired     = errors.New("the gateway's certificate has expired: set this machine's clock, or the gateway's")
)

const (
	certLifetime = 90 * 24 * time.Hour
	certRenewal  = 30 * 24 * time.Hour // before the end
	certBackdate = 24 * time.Hour      // for clocks that are slow
)

// newCertificate makes a self-signed certificate for a key. Peers look at the
// key alone, and at the gateway's validity.
func newCertificate(key ed25519.PrivateKey, now time.Time) (*tls.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: serverName},
		DNSNames:     []string{serverName},
		NotBefore:    now.Add(-certBackdate),
		NotAfter:     now.Add(certLifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// serverName is sent as SNI: the pin says who the gateway is, so its name need
// not be told to everyone on the path.
const serverName = "gateway.quicvpn.invalid"

func certFingerprint(c *x509.Certificate) Fingerprint {
	return sha256.Sum256(c.RawSubjectPublicKeyInfo)
}

// clientTLS trusts the pinned key alone.
func clientTLS(key ed25519.PrivateKey, pin Fingerprint, now func() time.Time) (*tls.Config, error) {
	cert, err := newCertificate(key, now())
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         []string{alpnOwn, alpnForeign},
		ServerName:         serverName,
		Certificates:       []tls.Certificate{*cert},
		InsecureSkipVerify: true, // VerifyConnection does it, by pin
		VerifyConnection: func(cs tls.ConnectionState) error {
			leaf := cs.PeerCertificates[0]
			got := certFingerprint(leaf)
			switch t := now(); {
			case subtle.ConstantTimeCompare(got[:], pin[:]) != 1:
				return ErrPin
			case t.Before(leaf.NotBefore):
				return ErrNotYetValid
			case t.After(leaf.NotAfter):
				return ErrExpired
			}
			return nil
		},
	}, nil
}

// serverTLS shows a certificate for the key, made anew when it comes to its
// end, and asks clients for theirs.
func serverTLS(key ed25519.PrivateKey, now func() time.Time) *tls.Config {
	var mu sync.Mutex
	var cert *tls.Certificate
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{alpnOwn, alpnForeign},
		ClientAuth: tls.RequestClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			mu.Lock()
			defer mu.Unlock()
			t := now()
			if cert == nil || t.Before(cert.Leaf.NotBefore) || t.After(cert.Leaf.NotAfter.Add(-certRenewal)) {
				fresh, err := newCertificate(key, t)
				if err != nil {
					return nil, err
				}
				cert = fresh
			}
			return cert, nil
		},
	}
}

// resetKeys derives what must outlive a restart of the gateway from its
// identity: the key of stateless resets (RFC 9000, section 10.3), by which
// clients notice the restart at once, and the key of address validation tokens.
func resetKeys(key ed25519.PrivateKey) (reset quic.StatelessResetKey, token quic.TokenGeneratorKey, err error) {
	for _, k := range []struct {
		info string
		out  []byte
	}{{"stateless reset", reset[:]}, {"address validation", token[:]}} {
		b, err := hkdf.Key(sha256.New, key.Seed(), nil, "quicvpn "+k.info, len(k.out))
		if err != nil {
			return reset, token, err
		}
		copy(k.out, b)
	}
	return reset, token, nil
}

// quicConfig is what both ends ask of a connection.
func quicConfig(size int) *quic.Config {
	return &quic.Config{
		EnableDatagrams:                true,
		InitialPacketSize:              uint16(size),
		InitialStreamReceiveWindow:     firstStreamWindow,
		MaxStreamReceiveWindow:         maxStreamWindow,
		InitialConnectionReceiveWindow: wideConnectionWindow,
		MaxConnectionReceiveWindow:     maxConnectionWindow,
		AllowConnectionWindowIncrease:  windows.allow,
		MaxIncomingUniStreams:          3 + maxStreams, // HTTP/3 has three
		MaxIncomingStreams:             16,
		MaxIdleTimeout:                 idleTimeout,
	}
}

// maxStreams bounds the streams for super-packets: each can make its receiver
// hold a buffer.
const maxStreams = 16
