// Package identity keeps the Ed25519 key that a gateway or a client is known
// by: one file in PKCS #8 PEM, readable by its owner only.
package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/durable"
)

const (
	pemType = "PRIVATE KEY"
	// maxSize is far above what a key takes.
	maxSize = 16 << 10
)

// Load reads a key. A file that others could read is made private first, and
// refused where that is not possible. The error is fs.ErrNotExist where there
// is no file; no error repeats what a file holds.
func Load(path string) (ed25519.PrivateKey, error) {
	// O_NONBLOCK: a FIFO must not hang the start.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("load key: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, fmt.Errorf("load key: %w", err)
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("load key: %s is not a regular file: give the path of a key file", path)
	}
	if err := durable.Private(path); err != nil {
		return nil, fmt.Errorf("load key: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxSize))
	if err != nil {
		return nil, fmt.Errorf("load key: %w", err)
	}
	key, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("load key: %s %w: restore it from a backup", path, err)
	}
	return key, nil
}

// LoadOrCreate reads a key, or makes one where there is no file, with the
// directories that it needs (mode 0700). A file that is there but damaged is an
// error: a new key would be another identity.
func LoadOrCreate(path string) (key ed25519.PrivateKey, created bool, err error) {
	key, err = Load(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, false, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, false, fmt.Errorf("create key: %w", err)
	}
	key, err = Create(path)
	if errors.Is(err, fs.ErrExist) { // another process was faster
		key, err = Load(path)
		return key, false, err
	}
	return key, err == nil, err
}

// Create makes a key and stores it durably. The error is fs.ErrExist where
// there is a file already.
func Create(path string) (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("create key: %w", err)
	}
	if err := durable.Create(path, pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der})); err != nil {
		return nil, fmt.Errorf("create key: %w", err)
	}
	return key, nil
}

// parse does not wrap the errors of x509, which may speak of the contents.
func parse(text []byte) (ed25519.PrivateKey, error) {
	block, _ := pem.Decode(text)
	if block == nil || block.Type != pemType {
		return nil, errors.New("holds no private key in PEM, or only part of one")
	}
	any, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("holds a damaged private key")
	}
	key, ok := any.(ed25519.PrivateKey)
	if !ok {
		return nil, errors.New("holds a private key that is not Ed25519")
	}
	return key, nil
}
