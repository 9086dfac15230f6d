// Package token owns the join token: the one line by which a client finds a
// gateway, recognises it and may enrol there. It keeps no list of tokens and
// knows nothing of who may use one.
//
// The text form is "qv1_" and, in unpadded base64url, the concatenation of
//
//	address length   1 byte
//	address          "host:port"
//	pin             32 bytes, SHA-256 of the gateway's SubjectPublicKeyInfo
//	secret          24 bytes
//	checksum         4 bytes, CRC-32 (IEEE, big endian) of all before
package token

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

const (
	prefix = "qv1_"
	// fixed is what a token holds beside its address.
	fixed = 1 + 32 + 24 + crc32.Size
	// maxAddress is what the length byte can say.
	maxAddress = 255
)

// text is strict so that a token has one spelling only.
var text = base64.RawURLEncoding.Strict()

// A Secret is the part of a token that must not be shown. Every verb of fmt,
// slog and encoding/json prints a placeholder; an unexported field that holds
// one is beyond its reach (fmt calls no methods there).
type Secret [24]byte

const redacted = "[secret]"

// Format hides the secret from every verb.
func (Secret) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) }

// LogValue hides the secret from slog.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText hides the secret from encoders.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// ParseSecret reads what SecretText wrote.
func ParseSecret(s string) (Secret, error) {
	b, err := text.DecodeString(s)
	if err != nil || len(b) != len(Secret{}) || strings.ContainsAny(s, "\r\n") {
		return Secret{}, errors.New("the secret is not one of a join token")
	}
	return Secret(b), nil
}

// A Token is a join token.
type Token struct {
	// Address is where the gateway is dialled: "host:port", the host being a
	// DNS name or an IP address (IPv6 in brackets).
	Address string
	// Pin is the fingerprint of the gateway's key.
	Pin [32]byte
	// Secret is what lets a client enrol.
	Secret Secret
}

// New makes a token with a fresh secret.
func New(address string, pin [32]byte) (Token, error) {
	if err := CheckAddress(address); err != nil {
		return Token{}, err
	}
	t := Token{Address: address, Pin: pin}
	rand.Read(t.Secret[:]) // never fails (crypto/rand)
	return t, nil
}

// Parse reads a token. White space in and around it, as copying from a terminal
// or a file leaves it, does not matter. Its errors do not repeat the token.
func Parse(s string) (Token, error) {
	s = strings.Join(strings.Fields(s), "")
	if s == "" {
		return Token{}, errors.New("the join token is empty: make one on the gateway with `quicvpn token create`")
	}
	rest, ok := strings.CutPrefix(s, prefix)
	if !ok {
		if otherVersion.MatchString(s) {
			return Token{}, errors.New("the join token is of a version that this quicvpn does not know: update quicvpn here, or make a token with the same version")
		}
		return Token{}, fmt.Errorf("the join token does not start with %s: copy all of the line that `quicvpn token create` printed", prefix)
	}
	if len(rest) > text.EncodedLen(fixed+maxAddress) {
		return Token{}, errors.New("the join token is too long to be one: give a single token and nothing else")
	}
	raw, err := text.DecodeString(rest)
	if err != nil {
		return Token{}, errDamaged
	}
	if len(raw) < fixed || len(raw) != fixed+int(raw[0]) {
		return Token{}, errDamaged
	}
	body, sum := raw[:len(raw)-crc32.Size], raw[len(raw)-crc32.Size:]
	if binary.BigEndian.Uint32(sum) != crc32.ChecksumIEEE(body) {
		return Token{}, errDamaged
	}
	r := bytes.NewBuffer(body[1:])
	t := Token{Address: string(r.Next(int(body[0])))}
	copy(t.Pin[:], r.Next(len(t.Pin)))
	copy(t.Secret[:], r.Next(len(t.Secret)))
	if err := CheckAddress(t.Address); err != nil {
		return Token{}, errors.New("the join token names no valid gateway address: make another one on the gateway")
	}
	return t, nil
}

var (
	errDamaged   = errors.New("the join token is damaged or incomplete: copy it again")
	otherVersion = regexp.MustCompile(`^qv[0-9]+_`)
	label        = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?$`)
)

// Encode returns the token as text, secret included. Its address must be one
// that CheckAddress accepts.
func (t Token) Encode() string {
	if len(t.Address) > maxAddress {
		panic("token: Encode with an address that CheckAddress refuses")
	}
	b := append([]byte{byte(len(t.Address))}, t.Address...)
	b = append(b, t.Pin[:]...)
	b = append(b, t.Secret[:]...)
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return prefix + text.EncodeToString(b)
}

// SecretText returns the secret in the form in which it travels to the gateway:
// unpadded base64url.
func (t Token) SecretText() string { return text.EncodeToString(t.Secret[:]) }

// LogValue shows the address and the pin.
func (t Token) LogValue() slog.Value {
	return slog.GroupValue(
		slog.String("gateway", t.Address),
		slog.String("pin", text.EncodeToString(t.Pin[:])))
}

// Format shows the address and the pin, whatever the verb.
func (t Token) Format(f fmt.State, _ rune) {
	fmt.Fprintf(f, "token(%s pin %s)", t.Address, text.EncodeToString(t.Pin[:]))
}

// CheckAddress says what is wrong with an address for clients to dial; nil if
// nothing is.
func CheckAddress(address string) error {
	if len(address) > maxAddress {
		return fmt.Errorf("the gateway's address is longer than %d characters", maxAddress)
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("the gateway's address %q is not host:port, as in vpn.example.net:443 or [2001:db8::1]:443", address)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
		return fmt.Errorf("the gateway's address %q needs a port from 1 to 65535", address)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.Zone() != "" || ip.IsUnspecified() || ip.IsMulticast() {
			return fmt.Errorf("the gateway's address %q is not one that clients elsewhere can dial", address)
		}
		return nil
	}
	if !isHostname(host) {
		return fmt.Errorf("the gateway's address %q has neither a DNS name nor an IP address before its port", address)
	}
	return nil
}

// isHostname takes DNS names in ASCII (RFC 1123, underscores tolerated). A name
// whose last label is a number would be a mistyped IPv4 address.
func isHostname(host string) bool {
	host = strings.TrimSuffix(host, ".")
	if len(host) > 253 {
		return false
	}
	last := ""
	for l := range strings.SplitSeq(host, ".") {
		if !label.MatchString(l) {
			return false
		}
		last = l
	}
	_, err := strconv.ParseUint(last, 10, 64)
	return err != nil
}
