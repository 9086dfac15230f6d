package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReplaceAndCreate(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	// What a crash may have left, open to others.
	if err := os.WriteFile(path+".tmp", []byte("a longer leftover"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, contents := range []string{"one", "two"} {
		if err := Replace(path, []byte(contents)); err != nil {
			t.Fatal(err)
		}
		check(t, path, contents)
	}
	if err := Create(path, []byte("three")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("create over a file: %v", err)
	}
	check(t, path, "two")
	other := filepath.Join(dir, "g")
	if err := Create(other, []byte("four")); err != nil {
		t.Fatal(err)
	}
	check(t, other, "four")
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("leftovers: %v, %v", entries, err)
	}
}

func check(t *testing.T, path, want string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || string(got) != want {
		t.Errorf("%s: %q, %v; want %q", path, got, err, want)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("%s: mode %v, %v", path, info.Mode(), err)
	}
}

func TestErrorsLeaveNothing(t *testing.T) {
	dir := t.TempDir()
	if err := Replace(filepath.Join(dir, "no", "f"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	sub := filepath.Join(dir, "sub")
	if err := os.MkdirAll(filepath.Join(sub, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(sub, []byte("x")); err == nil {
		t.Error("replaced a directory")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("leftovers: %v, %v", entries, err)
	}
	// A planted link is not followed.
	victim := filepath.Join(dir, "victim")
	if err := os.Symlink(victim, filepath.Join(dir, "f.tmp")); err != nil {
		t.Fatal(err)
	}
	if err := Replace(filepath.Join(dir, "f"), []byte("x")); err == nil {
		t.Error("followed a symbolic link")
	}
	if _, err := os.Lstat(victim); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the link's target: %v", err)
	}
}

func TestPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for before, after := range map[os.FileMode]os.FileMode{0o644: 0o600, 0o770: 0o700, 0o400: 0o400, 0o444: 0o400} {
		if err := os.Chmod(path, before); err != nil {
			t.Fatal(err)
		}
		if err := Private(path); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != after {
			t.Errorf("%v became %v, want %v (%v)", before, info.Mode(), after, err)
		}
	}
	// A file whose mode nobody can change, not even root.
	err := Private("/proc/self/status")
	if err == nil || !strings.Contains(err.Error(), "run `chmod go= /proc/self/status`") {
		t.Errorf("an unchangeable file: %v", err)
	}
}

func TestLock(t *testing.T) {
	dir := t.TempDir()
	open := func() *os.File {
		t.Helper()
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	first, second := open(), open()
	if err := Lock(first); err != nil {
		t.Fatal(err)
	}
	if err := Lock(second); !errors.Is(err, ErrLocked) {
		t.Errorf("a second lock: %v, want ErrLocked", err)
	}
	first.Close()
	if err := Lock(second); err != nil {
		t.Errorf("after the first was closed: %v", err)
	}
	second.Close()
	if err := Lock(second); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("a closed file: %v", err)
	}
}
