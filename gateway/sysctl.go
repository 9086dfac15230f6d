package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/durable"
)

// sysctls changes kernel settings and puts them back. What it is about to change
// stands in a journal first, so that the next start knows the values from before
// a start that was killed. Its methods are called inside the gateway's network
// namespace.
type sysctls struct {
	journal string // a file
	now     journal
	unsaved bool // the file is older than now
}

// A change is of one setting. Where Before and Set are equal another change
// moves this one along, and it has only to be put back.
type change struct {
	Key    string `json:"key"` // net/ipv4/conf/eth0/forwarding
	Before string `json:"before"`
	Set    string `json:"set"`
}

// An owner is the network namespace whose settings a journal is about. The
// settings of another boot or of another container are none of its business.
type owner struct {
	Boot      string `json:"boot"`
	Namespace uint64 `json:"namespace"`
}

// A journal is what there is to undo.
type journal struct {
	Owner owner `json:"owner"`
	// Table is the firewall's. It may have had another name than that of the
	// start that follows.
	Table   string   `json:"table"`
	Changes []change `json:"changes"` // in the order in which they are made
}

// openSysctls reads the journal that may be left in a state directory.
func openSysctls(dir string) (*sysctls, error) {
	s := &sysctls{journal: filepath.Join(dir, "host.json")}
	var err error
	if s.now.Owner, err = currentOwner(); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(s.journal)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read what an earlier run changed: %w", err)
	}
	var left journal
	if err := json.Unmarshal(text, &left); err != nil {
		return nil, fmt.Errorf("read what an earlier run changed: %s is damaged (%w): "+
			"check the forwarding sysctls of this host, then remove the file", s.journal, err)
	}
	if left.Owner == s.now.Owner {
		s.now = left
	}
	return s, nil
}

// currentOwner identifies the namespace by its cookie, which is never used
// again, or by its inode where the kernel is older than 5.14.
func currentOwner() (o owner, err error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return o, fmt.Errorf("identify this boot: %w", err)
	}
	o.Boot = string(bytes.TrimSpace(boot))
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return o, fmt.Errorf("identify the network namespace: %w", err)
	}
	defer unix.Close(fd)
	if o.Namespace, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err == nil {
		return o, nil
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return o, fmt.Errorf("identify the network namespace: %w", err)
	}
	o.Namespace = st.Ino
	return o, nil
}

// want notes that a setting is to have a value. One that has it already, and was
// not noted before, is left alone. Where it cannot be set, the error advises to
// set something else that has the same effect.
func (s *sysctls) want(key, value, advice string) error {
	now, err := readSysctl(key)
	if err != nil || now == value || s.noted(key) {
		return err
	}
	if err := canWrite(key, value, advice); err != nil {
		return err
	}
	s.note(change{Key: key, Before: now, Set: value})
	return nil
}

// hold notes that a setting is to be put back, because another change moves it.
func (s *sysctls) hold(key string) error {
	now, err := readSysctl(key)
	if err != nil {
		return err
	}
	s.note(change{Key: key, Before: now, Set: now})
	return nil
}

// note keeps the first value from before: a later one may be our own.
func (s *sysctls) note(c change) {
	if !s.noted(c.Key) {
		s.now.Changes = append(s.now.Changes, c)
		s.unsaved = true
	}
}

func (s *sysctls) noted(key string) bool {
	return slices.ContainsFunc(s.now.Changes, func(c change) bool { return c.Key == key })
}

// setTable notes the name of the firewall's table and returns the one before.
func (s *sysctls) setTable(name string) (before string) {
	before = s.now.Table
	s.now.Table, s.unsaved = name, s.unsaved || name != before
	return before
}

// save writes the journal.
func (s *sysctls) save() error {
	if !s.unsaved {
		return nil
	}
	text, err := json.Marshal(s.now)
	if err == nil {
		err = durable.Replace(s.journal, text)
	}
	if err != nil {
		return fmt.Errorf("note what to put back: %w", err)
	}
	s.unsaved = false
	return nil
}

// apply makes the changes that were noted. An interface that is gone takes its
// settings along.
func (s *sysctls) apply() error {
	for _, c := range s.now.Changes {
		if c.Before == c.Set {
			continue
		}
		if now, err := readSysctl(c.Key); err != nil || now == c.Set {
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			continue
		}
		if err := writeSysctl(c.Key, c.Set); err != nil {
			return err
		}
	}
	return nil
}

// restore puts all settings back, last change first. What has another value than
// the gateway's is somebody else's by now and stays.
func (s *sysctls) restore() error {
	var errs []error
	all4 := sysctlIs(forwarding4("all"), "1") // by somebody else: the gateway never sets it
	for _, c := range slices.Backward(s.now.Changes) {
		now, err := readSysctl(c.Key)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
		case now == c.Before, now != c.Set && c.Before != c.Set:
		case all4 && strings.HasPrefix(c.Key, "net/ipv4/"):
		default:
			errs = append(errs, writeSysctl(c.Key, c.Before))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("put sysctls back: %w", err)
	}
	s.now.Changes = nil
	return nil
}

// end removes the journal, when there is nothing to undo.
func (s *sysctls) end() error {
	if err := os.Remove(s.journal); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("end the journal: %w", err)
	}
	return nil
}

func readSysctl(key string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys", key))
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", sysctlName(key), err)
	}
	return string(bytes.TrimSpace(b)), nil
}

// sysctlIs reports whether a setting exists and has a value.
func sysctlIs(key, value string) bool {
	now, err := readSysctl(key)
	return err == nil && now == value
}

func writeSysctl(key, value string) error {
	err := os.WriteFile(filepath.Join("/proc/sys", key), []byte(value), 0)
	return sysctlError(key, value, sysctlName(key)+"="+value, err)
}

// canWrite returns the error that writeSysctl would meet.
func canWrite(key, value, advice string) error {
	f, err := os.OpenFile(filepath.Join("/proc/sys", key), os.O_WRONLY, 0)
	if err == nil {
		err = f.Close()
	}
	return sysctlError(key, value, advice, err)
}

func sysctlError(key, value, advice string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EROFS), errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("set sysctl %s=%s: %w: set %[4]s on this host, or start the gateway's container with --sysctl %[4]s",
			sysctlName(key), value, err, advice)
	}
	return fmt.Errorf("set sysctl %s=%s: %w", sysctlName(key), value, err)
}

// sysctlName is a key as people and sysctl(8) write it: a dot in an interface's
// name is a slash there.
func sysctlName(key string) string { return strings.NewReplacer("/", ".", ".", "/").Replace(key) }
