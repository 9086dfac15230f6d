package identity

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestLoadOrCreate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "client", "key.pem")
	if _, err := Load(path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("load before creation: %v", err)
	}
	key, created, err := LoadOrCreate(path)
	if err != nil || !created {
		t.Fatalf("created %v, %v", created, err)
	}
	again, created, err := LoadOrCreate(path)
	if err != nil || created || !again.Equal(key) {
		t.Fatalf("second start: created %v, same %v, %v", created, again.Equal(key), err)
	}
	for p, want := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): 0o700 | os.ModeDir} {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s: mode %v, want %v", p, info.Mode(), want)
		}
	}
	if _, err := Create(path); !errors.Is(err, fs.ErrExist) {
		t.Errorf("create over a key: %v", err)
	}
	onlyFile(t, path)
}

func TestTightens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key.pem")
	if _, err := Create(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// TestRace starts many processes' worth of creators: all must end with one key.
func TestRace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key.pem")
	keys := make([]ed25519.PrivateKey, 16)
	made := make([]bool, len(keys))
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			var err error
			if keys[i], made[i], err = LoadOrCreate(path); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	n := 0
	for i, k := range keys {
		if !k.Equal(keys[0]) {
			t.Fatalf("key %d differs", i)
		}
		if made[i] {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d creators, want 1", n)
	}
	onlyFile(t, path)
}

func onlyFile(t *testing.T, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Errorf("leftovers: %v", entries)
	}
}

func TestTruncatedAtEveryLength(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key.pem")
	key, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(whole) - 1 { // without its last newline it is whole
		if err := os.WriteFile(path, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		got, created, err := LoadOrCreate(path)
		if err == nil || created || got != nil {
			t.Fatalf("%d bytes: key %v, created %v", n, got.Equal(key), created)
		}
		checkError(t, err, path, string(whole))
	}
}

func TestNotAKey(t *testing.T) {
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(ec)
	if err != nil {
		t.Fatal(err)
	}
	for name, contents := range map[string]string{
		"another kind": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
		"another type": string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})),
		"text":         "hunter2 is my password",
		"damaged":      string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der[:40]})),
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "key.pem")
			if err := os.WriteFile(path, []byte(contents), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Load(path)
			if err == nil {
				t.Fatal("loaded")
			}
			checkError(t, err, path, contents)
		})
	}
	dir := t.TempDir()
	if _, _, err := LoadOrCreate(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a directory: %v", err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(fifo); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a FIFO: %v", err)
	}
}

// checkError wants the file's name and none of its contents.
func checkError(t *testing.T, err error, path, contents string) {
	t.Helper()
	msg := err.Error()
	if !strings.Contains(msg, path) {
		t.Errorf("the error does not name the file: %s", msg)
	}
	for line := range strings.Lines(contents) {
		for word := range strings.FieldsSeq(line) {
			if len(word) > 7 && !strings.Contains(word, "-----") && strings.Contains(msg, word) {
				t.Errorf("the error repeats %q: %s", word, msg)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n-----END PRIVATE KEY-----\n"))
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		key, err := parse(text)
		if (err == nil) != (len(key) == ed25519.PrivateKeySize) {
			t.Fatalf("a key of %d bytes with error %v", len(key), err)
		}
	})
}
