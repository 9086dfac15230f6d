package gateway

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/internal/token"
)

// The files of a state directory. Each is replaced whole. tokens.json is
// written by the CLI's verbs alone (one at a time, under tokens.lock), and
// clients.json by the running gateway alone (which holds gateway.lock).
const (
	identityFile = "identity.pem"
	settingsFile = "settings.json"
	tokensFile   = "tokens.json"
	clientsFile  = "clients.json"
	gatewayLock  = "gateway.lock"
	tokensLock   = "tokens.lock"
)

// version is the version of the files' form.
const version = 1

type settings struct {
	Version int          `json:"version"`
	Address string       `json:"address"`
	Pool4   netip.Prefix `json:"pool4"`
	Pool6   netip.Prefix `json:"pool6"`
}

func (s *settings) check() error {
	if token.CheckAddress(s.Address) != nil {
		return errors.New("the address in it is not valid")
	}
	if checkPool4(s.Pool4) != nil || checkPool6(s.Pool6) != nil {
		return errors.New("a pool in it is not valid")
	}
	return nil
}

type tokens struct {
	Version int           `json:"version"`
	Tokens  []tokenRecord `json:"tokens"`
	// Removed are clients that `quicvpn client remove` removed, and the gateway
	// forgets when it sees that.
	Removed []removedRecord `json:"removed,omitempty"`
}

// A removedRecord names an enrolment: a key may be enrolled anew.
type removedRecord struct {
	Key   digest    `json:"key"`
	Since time.Time `json:"since"`
}

// A tokenRecord never changes, but for Revoked.
type tokenRecord struct {
	ID      string         `json:"id"`
	Name    string         `json:"name"`
	Network string         `json:"network"`
	SHA256  digest         `json:"sha256"` // of the secret
	Allow   []netip.Prefix `json:"allow,omitempty"`
	Created time.Time      `json:"created"`
	Expires time.Time      `json:"expires,omitzero"`
	Uses    int            `json:"uses,omitempty"`
	Revoked time.Time      `json:"revoked,omitzero"`
}

func (t *tokens) check() error {
	ids, sums := make(map[string]bool), make(map[digest]bool)
	for i, r := range t.Tokens {
		if !tokenID.MatchString(r.ID) || checkName(r.Name) != nil || checkNetwork(r.Network) != nil ||
			checkAllow(r.Allow) != nil || r.Uses < 0 || r.Created.IsZero() {
			return fmt.Errorf("token number %d is not valid", i+1)
		}
		if ids[r.ID] || sums[r.SHA256] {
			return fmt.Errorf("token number %d is there twice", i+1)
		}
		ids[r.ID], sums[r.SHA256] = true, true
	}
	removed := make(map[digest]bool)
	for i, r := range t.Removed {
		if r.Since.IsZero() || removed[r.Key] {
			return fmt.Errorf("removed client number %d is not valid", i+1)
		}
		removed[r.Key] = true
	}
	return nil
}

type clients struct {
	Version int            `json:"version"`
	Clients []clientRecord `json:"clients"`
	// Enrolled counts the clients that a token ever enrolled.
	Enrolled map[string]int `json:"enrolled,omitempty"`
}

type clientRecord struct {
	Key   digest     `json:"key"` // fingerprint
	Token string     `json:"token"`
	Addr4 netip.Addr `json:"addr4"`
	Addr6 netip.Addr `json:"addr6"`
	Since time.Time  `json:"since"`
	// Block4 and Block6 are the client's block, if it has one.
	Block4 netip.Prefix `json:"block4,omitzero"`
	Block6 netip.Prefix `json:"block6,omitzero"`
}

func (c *clients) check() error {
	keys, now := make(map[digest]bool, len(c.Clients)), make(map[string]int)
	for i, r := range c.Clients {
		if !tokenID.MatchString(r.Token) || !r.Addr4.Is4() || !r.Addr6.Is6() || r.Since.IsZero() {
			return fmt.Errorf("client number %d is not valid", i+1)
		}
		if keys[r.Key] {
			return fmt.Errorf("client number %d is there twice", i+1)
		}
		keys[r.Key] = true
		now[r.Token]++
	}
	for id, n := range now {
		if c.Enrolled[id] < n {
			return errors.New("it counts fewer enrolments than it has clients")
		}
	}
	for id := range c.Enrolled {
		if !tokenID.MatchString(id) {
			return errors.New("it counts enrolments of what is no token")
		}
	}
	return nil
}

// A digest is a SHA-256 in JSON: unpadded base64url.
type digest [32]byte

var digestText = base64.RawURLEncoding.Strict()

func (d digest) MarshalText() ([]byte, error) { return digestText.AppendEncode(nil, d[:]), nil }

func (d *digest) UnmarshalText(text []byte) error {
	b, err := digestText.AppendDecode(nil, text)
	if err != nil || len(b) != len(d) {
		return errors.New("not a SHA-256")
	}
	*d = digest(b)
	return nil
}

type checker interface{ check() error }

// readFile reads one of the JSON files into v. Its errors name the file and say
// nothing of what it holds.
func readFile(dir, name string, v checker) error {
	path := filepath.Join(dir, name)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is missing: restore it from a backup", path)
	}
	if err != nil {
		return fmt.Errorf("read gateway state: %w", err)
	}
	if err := durable.Private(path); err != nil {
		return fmt.Errorf("read gateway state: %w", err)
	}
	if err := decode(data, v); err != nil {
		return fmt.Errorf("%s is damaged (%w): restore it from a backup", path, err)
	}
	return nil
}

// decode does not wrap the errors of encoding/json, which repeat the contents.
func decode(data []byte, v checker) error {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return at(err, len(data))
	}
	if head.Version > version {
		return errors.New("it was written by a newer quicvpn, which this one cannot read")
	}
	if head.Version != version {
		return errors.New("it says no version")
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return at(err, len(data))
	}
	return v.check()
}

func at(err error, size int) error {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case size == 0:
		return errors.New("it is empty")
	case errors.As(err, &syntax):
		return fmt.Errorf("at byte %d of %d", syntax.Offset, size)
	case errors.As(err, &kind):
		return fmt.Errorf("at byte %d of %d", kind.Offset, size)
	}
	return errors.New("a field in it is not valid")
}

// encode writes the files that a person may want to read in lines, and
// clients.json, which every enrolment writes anew, as short as it can be.
func encode(v any) ([]byte, error) {
	if _, ok := v.(*clients); ok {
		return json.Marshal(v)
	}
	data, err := json.MarshalIndent(v, "", "  ")
	return append(data, '\n'), err
}

func writeFile(dir, name string, v checker) error {
	data, err := encode(v)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := durable.Replace(filepath.Join(dir, name), data); err != nil {
		return fmt.Errorf("write gateway state: %w", err)
	}
	return nil
}

var (
	tokenID     = regexp.MustCompile(`^[0-9a-f]{8}$`)
	networkName = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)
)

func checkNetwork(name string) error {
	if !networkName.MatchString(name) {
		return fmt.Errorf("the network name %q is not 1 to 63 of the characters a-z, 0-9 and -", clip(name))
	}
	return nil
}

const maxName = 64

func checkName(name string) error {
	ok := name != "" && utf8.ValidString(name) && utf8.RuneCountInString(name) <= maxName &&
		name[0] != ' ' && name[len(name)-1] != ' '
	for _, r := range name {
		ok = ok && unicode.IsPrint(r)
	}
	if !ok {
		return fmt.Errorf("the token name %q is not 1 to %d printable characters without space around them", clip(name), maxName)
	}
	return nil
}

// clip bounds what an error repeats.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "…"
	}
	return s
}

const maxAllow = 256

func checkAllow(allow []netip.Prefix) error {
	if len(allow) > maxAllow {
		return fmt.Errorf("%d allowed prefixes are more than %d: use broader ones", len(allow), maxAllow)
	}
	for _, p := range allow {
		if !p.IsValid() || p.Addr().Is4In6() {
			return fmt.Errorf("the allowed prefix %s is not one of IPv4 or IPv6, as in 10.0.0.0/8", p)
		}
		if p != p.Masked() {
			return fmt.Errorf("the allowed prefix %s has bits set beyond its length: did you mean %s?", p, p.Masked())
		}
	}
	return nil
}
