// Package durable writes small files so that after a crash or a loss of power
// each is there whole, old or new, and never in part. One writer of a file at a
// time is the caller's business, for which there is Lock.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Replace writes a file of mode 0600, in place of one that may exist. When it
// returns nil the contents survive a loss of power.
func Replace(path string, data []byte) error {
	// One fixed name, so that crashes do not pile up leftovers.
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	if err := fill(f, data); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, path); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return SyncDir(filepath.Dir(path))
}

// Create writes a file of mode 0600 that must not exist: if it does, the error
// is fs.ErrExist and the file is as it was, also when two processes race.
func Create(path string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".tmp*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(f.Name())) }()
	if err := fill(f, data); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// ErrLocked says that another process has the lock.
var ErrLocked = errors.New("locked")

// Lock locks an open file, or a directory, for as long as it is open. Where another
// process has the lock the error is ErrLocked.
func Lock(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrLocked
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

// fill writes, syncs and closes f.
func fill(f *os.File, data []byte) error {
	_, err := f.Write(data)
	if err == nil {
		err = f.Chmod(0o600) // it may be an older crash's, or the umask odd
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// SyncDir makes the entries of a directory survive a loss of power.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, unix.EINVAL) {
		err = nil // a file system without directory syncs
	}
	return errors.Join(err, d.Close())
}

// Private takes away what group and others may do with a file or directory.
// Where that is not possible its error says what to do.
func Private(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	mode := info.Mode().Perm()
	if mode&0o077 == 0 {
		return nil
	}
	err = os.Chmod(path, mode&^0o077)
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return fmt.Errorf("%s can be read by others (mode %04o) and that cannot be changed from here (%w): run `chmod go= %s` as its owner",
			path, mode, pe.Err, path)
	}
	return err
}
