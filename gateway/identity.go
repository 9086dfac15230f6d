package gateway

import (
	"cmp"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/internal/identity"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// InitOptions say what a new gateway is like.
type InitOptions struct {
	// Dir is the state directory; it is made where it does not exist. Required.
	Dir string
	// Address is the "host:port" that clients dial. Required.
	Address string
	// Pool4 is where clients get their IPv4 addresses; zero means 10.91.0.0/16.
	Pool4 netip.Prefix
	// Pool6 is the same for IPv6; zero means a random unique local /64 (RFC 4193).
	Pool6 netip.Prefix
	// Now is the clock; nil is time.Now.
	Now func() time.Time
}

// Init makes the state directory of a new gateway: its identity, its settings
// and a first join token, named "first", which enrols any number of clients in
// the network "default". A directory that has an identity is left as it is, and
// an Init that fails leaves nothing.
func Init(o InitOptions) (_ token.Token, err error) {
	cfg, err := o.settings()
	if err != nil {
		return token.Token{}, fmt.Errorf("init gateway: %w", err)
	}
	now := time.Now
	if o.Now != nil {
		now = o.Now
	}
	first, err := token.New(cfg.Address, [32]byte{}) // the key comes last
	if err != nil {
		return token.Token{}, fmt.Errorf("init gateway: %w", err)
	}
	record, err := newRecord(TokenOptions{Name: "first"}, first.Secret, now())
	if err != nil {
		return token.Token{}, fmt.Errorf("init gateway: %w", err)
	}

	var made undo
	var lock *os.File
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("init gateway: %w", err), made.run())
		}
		if lock != nil {
			lock.Close() // not before all is undone
		}
	}()
	if err := made.mkdirAll(o.Dir); err != nil {
		return token.Token{}, err
	}
	if err := cmp.Or(checkNew(o.Dir), checkOwn(o.Dir)); err != nil {
		return token.Token{}, err
	}
	made.mayRemove(filepath.Join(o.Dir, gatewayLock))
	lock, err = lockFile(o.Dir, gatewayLock)
	if errors.Is(err, durable.ErrLocked) {
		made = undo{} // all of it is the other one's
		return token.Token{}, fmt.Errorf("another quicvpn process is using %s: end it first", o.Dir)
	}
	if err != nil {
		return token.Token{}, err
	}
	// Now that nobody else can be at it.
	if err := cmp.Or(checkNew(o.Dir), checkLeft(o.Dir)); err != nil {
		return token.Token{}, err
	}
	if err := durable.Private(o.Dir); err != nil {
		return token.Token{}, err
	}
	for _, f := range []struct {
		name     string
		contents checker
	}{
		{settingsFile, &cfg},
		{tokensFile, &tokens{Version: version, Tokens: []tokenRecord{record}}},
		{clientsFile, &clients{Version: version, Clients: []clientRecord{}}},
	} {
		made.mayRemove(filepath.Join(o.Dir, f.name))
		if err := writeFile(o.Dir, f.name, f.contents); err != nil {
			return token.Token{}, err
		}
	}
	// The identity is last: where it is, all of the rest is.
	path := filepath.Join(o.Dir, identityFile)
	made.mayRemove(path)
	key, err := identity.Create(path)
	if err != nil {
		return token.Token{}, err
	}
	first.Pin = pin(key)
	return first, nil
}

func (o *InitOptions) settings() (settings, error) {
	cfg := settings{Version: version, Address: o.Address, Pool4: o.Pool4, Pool6: o.Pool6}
	if o.Dir == "" {
		return cfg, errors.New("no state directory is named")
	}
	if err := token.CheckAddress(cfg.Address); err != nil {
		return cfg, err
	}
	if cfg.Pool4 == (netip.Prefix{}) {
		cfg.Pool4 = defaultPool4
	}
	if cfg.Pool6 == (netip.Prefix{}) {
		cfg.Pool6 = randomULA()
	}
	if err := checkPool4(cfg.Pool4); err != nil {
		return cfg, err
	}
	if err := checkPool6(cfg.Pool6); err != nil {
		return cfg, err
	}
	if host, _, err := net.SplitHostPort(cfg.Address); err == nil {
		ip, err := netip.ParseAddr(host)
		if err == nil && (cfg.Pool4.Contains(ip.Unmap()) || cfg.Pool6.Contains(ip)) {
			return cfg, fmt.Errorf("the gateway's address %s lies in a pool of client addresses: choose another pool", cfg.Address)
		}
	}
	return cfg, checkOverlap("", cfg.Pool4, cfg.Pool6)
}

// randomULA returns a unique local prefix: fd00::/8, a global ID of 40 random
// bits, subnet 0 (RFC 4193, section 3.2).
func randomULA() netip.Prefix {
	b := [16]byte{0xfd}
	rand.Read(b[1:6]) // never fails (crypto/rand)
	return netip.PrefixFrom(netip.AddrFrom16(b), 64)
}

// checkNew refuses a directory that has an identity.
func checkNew(dir string) error {
	_, err := os.Lstat(filepath.Join(dir, identityFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%s already holds a gateway's identity: make another join token with `quicvpn token create`, or choose another directory", dir)
}

// checkLeft refuses a directory that has all but an identity: its clients may
// be wanted again.
func checkLeft(dir string) error {
	var left []string
	for _, name := range []string{settingsFile, tokensFile, clientsFile} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			left = append(left, name)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("%s holds a gateway's %s but no %s: restore that from a backup, or remove what is left there to start anew",
		dir, strings.Join(left, ", "), identityFile)
}

// checkOwn keeps Init from closing a directory that others use, such as /tmp.
func checkOwn(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory", dir)
	}
	if info.Mode().Perm()&0o077 == 0 {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch e.Name() {
		case gatewayLock, "lost+found": // as a fresh volume has it
		default:
			return fmt.Errorf("%s is open to others and not empty: choose a directory of the gateway's own", dir)
		}
	}
	return nil
}

func pin(key ed25519.PrivateKey) [32]byte {
	return tunnel.KeyFingerprint(key.Public().(ed25519.PublicKey))
}

// loadKey loads a gateway's identity; where there is none it never makes one.
func loadKey(dir string) (ed25519.PrivateKey, error) {
	key, err := identity.Load(filepath.Join(dir, identityFile))
	if errors.Is(err, fs.ErrNotExist) {
		if left := checkLeft(dir); left != nil {
			return nil, left
		}
		return nil, fmt.Errorf("%s holds no gateway identity: run `quicvpn gateway init` once, or name the directory where it was run (a container needs a volume for it)", dir)
	}
	return key, err
}

// undo removes what was made, newest first.
type undo []string

// mayRemove notes a path, unless it is there already.
func (u *undo) mayRemove(path string) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		*u = append(*u, path)
	}
}

func (u *undo) mkdirAll(dir string) error {
	var missing []string
	for d := filepath.Clean(dir); ; d = filepath.Dir(d) {
		if _, err := os.Stat(d); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		missing = append(missing, d)
	}
	for i := len(missing) - 1; i >= 0; i-- {
		u.mayRemove(missing[i])
	}
	return os.MkdirAll(dir, 0o700)
}

func (u undo) run() error {
	var errs []error
	for i := len(u) - 1; i >= 0; i-- {
		if err := os.Remove(u[i]); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
