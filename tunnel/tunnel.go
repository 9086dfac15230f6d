// Package tunnel carries IP packets over QUIC: MASQUE CONNECT-IP (RFC 9484)
// over HTTP/3, the framing of super-packets, the UDP socket. It is the only
// importer of quic-go.
//
// It does not know TUN devices, address pools or tokens: the two roles hand it
// packets and a Sink, and decide who may join.
package tunnel

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"net/netip"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Sink takes packets: those that come out of the tunnel, or the ICMP errors
// that answer those that went in.
//
// WritePackets is called from several goroutines at once. Packets of one flow
// come with one queue number and in order; a sink with fewer queues takes the
// number modulo its own. It borrows the packets until it returns.
type Sink interface {
	WritePackets(queue int, pkts []packet.Packet)
}

// A Fingerprint names a key: the SHA-256 of its DER SubjectPublicKeyInfo.
type Fingerprint [sha256.Size]byte

// KeyFingerprint returns the fingerprint of an Ed25519 public key.
func KeyFingerprint(pub ed25519.PublicKey) Fingerprint {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		panic(err) // an ed25519.PublicKey always marshals
	}
	return sha256.Sum256(der)
}

// String returns the fingerprint in unpadded base64url.
func (f Fingerprint) String() string { return base64.RawURLEncoding.EncodeToString(f[:]) }

// A Names says which queries of a client for names (port 53) a gateway answers itself,
// in the place of the name server that is asked.
type Names string

const (
	// NamesPrivate are those to private name servers, which are not reached through a
	// tunnel, and to the gateway itself.
	NamesPrivate Names = ""
	// NamesAll are those to any name server.
	NamesAll Names = "all"
	// NamesOff are none.
	NamesOff Names = "off"
)

// A Grant is what a gateway gives to a client that it accepts.
type Grant struct {
	// Network is the name of the network that the client belongs to.
	Network string
	// Addresses are the client's own, one for each IP version that it may use.
	Addresses []netip.Addr
	// Block are prefixes of the client's own that it asked for, at most one for
	// each IP version.
	Block []netip.Prefix
	// Announced are those of the prefixes that the client announced through
	// which the network's other clients reach it.
	Announced []netip.Prefix
	// AnnounceRefused says why prefixes are not among Announced, and what to do;
	// empty if all are.
	AnnounceRefused string
	// Routes are the destinations that the client may send to the tunnel.
	Routes []netip.Prefix
	// Gateway are the gateway's own addresses in the network, the sources of
	// its ICMP errors.
	Gateway []netip.Addr
	// Names is what the client asked for; a client does not hear of it.
	Names Names
	// Peers are the prefixes in which the other clients of the network live, and
	// those that they have announced. Session.Peers knows how they change.
	Peers []netip.Prefix
}

// A RefusedError is a gateway's no to a join. A server's Authorize returns it;
// a client's Dial returns it as the gateway sent it.
type RefusedError struct {
	// Status is the HTTP status: 401 where the client is not known, 403 where it
	// is known and may not, 503 where it should come again later.
	Status int
	// Code says why in a word, for programs: "token-unknown", "token-revoked",
	// "token-expired", "token-used-up", "enrolment-rate", "pool-exhausted",
	// "unavailable".
	Code string
	// Text says what to do, for people.
	Text string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the gateway refused the join (%s): %s", e.Code, e.Text)
}
