package gateway

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/internal/token"
)

// TokenOptions say what a new join token allows.
type TokenOptions struct {
	// Name is for people; it is 1 to 64 printable characters and need not be
	// unique. Empty means the token's ID.
	Name string
	// Network is the network that clients join: 1 to 63 of a-z, 0-9 and -.
	// Empty means "default".
	Network string
	// Allow limits the destinations outside of the network; empty does not.
	Allow []netip.Prefix
	// Expires is how long the token enrols clients; zero means for ever. A
	// client that enrolled in time stays when the token has expired.
	Expires time.Duration
	// Uses is how many keys the token may enrol; zero means any number.
	Uses int
}

// DefaultNetwork is the network of tokens that name none.
const DefaultNetwork = "default"

// TokenInfo is what may be shown of a token.
type TokenInfo struct {
	ID, Name, Network string
	Allow             []netip.Prefix
	Created           time.Time
	Expires           time.Time // zero: never
	Uses              int       // zero: no limit
	Used              int       // keys that it enrolled
	Revoked           time.Time // zero: it is not
}

// CreateToken makes another join token for the gateway of a state directory. A
// running gateway takes it up at once.
func CreateToken(dir string, o TokenOptions, now time.Time) (token.Token, error) {
	t, err := createToken(dir, o, now)
	if err != nil {
		return token.Token{}, fmt.Errorf("create token: %w", err)
	}
	return t, nil
}

func createToken(dir string, o TokenOptions, now time.Time) (token.Token, error) {
	key, cfg, err := loadFixed(dir)
	if err != nil {
		return token.Token{}, err
	}
	t, err := token.New(cfg.Address, pin(key))
	if err != nil {
		return token.Token{}, err
	}
	record, err := newRecord(o, t.Secret, now)
	if err != nil {
		return token.Token{}, err
	}
	err = changeTokens(dir, func(all *tokens) error {
		for all.find(record.ID) != nil {
			record.reID(o.Name)
		}
		all.Tokens = append(all.Tokens, record)
		return nil
	})
	return t, err
}

// newRecord checks the options.
func newRecord(o TokenOptions, secret token.Secret, now time.Time) (tokenRecord, error) {
	r := tokenRecord{
		Network: o.Network,
		Allow:   slices.Clone(o.Allow),
		SHA256:  sha256.Sum256(secret[:]),
		Created: now.UTC().Round(0),
		Uses:    o.Uses,
	}
	r.reID(o.Name)
	if r.Network == "" {
		r.Network = DefaultNetwork
	}
	if o.Expires != 0 {
		r.Expires = r.Created.Add(o.Expires)
	}
	if o.Expires < 0 {
		return r, fmt.Errorf("the token's life of %s is negative: give a positive one, or zero for no end", o.Expires)
	}
	if o.Uses < 0 {
		return r, fmt.Errorf("the number of uses %d is negative: give a positive one, or zero for no limit", o.Uses)
	}
	return r, errors.Join(checkName(r.Name), checkNetwork(r.Network), checkAllow(r.Allow))
}

func (r *tokenRecord) reID(name string) {
	var b [4]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	r.ID = hex.EncodeToString(b[:])
	r.Name = name
	if name == "" {
		r.Name = r.ID
	}
}

// ListTokens returns the tokens of a state directory, oldest first, revoked
// ones included.
func ListTokens(dir string) ([]TokenInfo, error) {
	all, used, err := listTokens(dir)
	if err != nil {
		return nil, fmt.Errorf("list tokens: %w", err)
	}
	infos := make([]TokenInfo, len(all.Tokens))
	for i, r := range all.Tokens {
		infos[i] = r.info(used)
	}
	return infos, nil
}

func listTokens(dir string) (all tokens, used map[string]int, err error) {
	if _, _, err := loadFixed(dir); err != nil {
		return all, nil, err
	}
	var c clients
	err = errors.Join(readFile(dir, tokensFile, &all), readFile(dir, clientsFile, &c))
	return all, c.Enrolled, err
}

func (r *tokenRecord) info(used map[string]int) TokenInfo {
	return TokenInfo{
		ID: r.ID, Name: r.Name, Network: r.Network, Allow: r.Allow,
		Created: r.Created, Expires: r.Expires, Uses: r.Uses, Used: used[r.ID], Revoked: r.Revoked,
	}
}

// RevokeToken ends a token and the membership of every client that it enrolled;
// a running gateway ends their sessions within half a second. A token is named
// by its ID or, where no other that is in force has the same one, by its name.
// To revoke again changes nothing.
func RevokeToken(dir, idOrName string, now time.Time) (TokenInfo, error) {
	info, err := revokeToken(dir, idOrName, now)
	if err != nil {
		return TokenInfo{}, fmt.Errorf("revoke token: %w", err)
	}
	return info, nil
}

func revokeToken(dir, idOrName string, now time.Time) (info TokenInfo, err error) {
	_, used, err := listTokens(dir)
	if err != nil {
		return info, err
	}
	err = changeTokens(dir, func(all *tokens) error {
		r, err := all.pick(idOrName)
		if err != nil {
			return err
		}
		if r.Revoked.IsZero() {
			r.Revoked = now.UTC().Round(0)
		}
		info = r.info(used)
		return nil
	})
	return info, err
}

func (t *tokens) find(id string) *tokenRecord {
	for i := range t.Tokens {
		if t.Tokens[i].ID == id {
			return &t.Tokens[i]
		}
	}
	return nil
}

func (t *tokens) pick(idOrName string) (*tokenRecord, error) {
	if r := t.find(idOrName); r != nil {
		return r, nil
	}
	var live, dead []*tokenRecord
	for i := range t.Tokens {
		switch r := &t.Tokens[i]; {
		case r.Name != idOrName:
		case r.Revoked.IsZero():
			live = append(live, r)
		default:
			dead = append(dead, r)
		}
	}
	if len(live) == 0 {
		live = dead
	}
	switch len(live) {
	case 0:
		return nil, errors.New("there is no such token: `quicvpn token list` shows those that are")
	case 1:
		return live[0], nil
	}
	var ids []string
	for _, r := range live {
		ids = append(ids, r.ID)
	}
	return nil, fmt.Errorf("%d tokens are named %q: name one by its ID, which is one of %s",
		len(ids), clip(idOrName), strings.Join(ids, ", "))
}

// changeTokens rewrites tokens.json, while no other process does.
func changeTokens(dir string, change func(*tokens) error) error {
	lock, err := lockTokens(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	var all tokens
	if err := readFile(dir, tokensFile, &all); err != nil {
		return err
	}
	if err := change(&all); err != nil {
		return err
	}
	return writeFile(dir, tokensFile, &all)
}

// loadFixed loads what Init made and nothing changes.
func loadFixed(dir string) (key ed25519.PrivateKey, cfg settings, err error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, cfg, fmt.Errorf("%w: run `quicvpn gateway init`, or name the directory where it was run", err)
	}
	if err := durable.Private(dir); err != nil {
		return nil, cfg, err
	}
	if key, err = loadKey(dir); err != nil {
		return nil, cfg, err
	}
	err = readFile(dir, settingsFile, &cfg)
	return key, cfg, err
}
