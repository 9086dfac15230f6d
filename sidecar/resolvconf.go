package sidecar

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/quicvpn/quicvpn/internal/durable"
)

// A namesFile has /etc/resolv.conf name the gateway, which resolves, and nobody
// else. The file is written in place: in a container it is a mount, and what
// stands there cannot be replaced. What stood in it is kept in the state
// directory, from before it is touched until it is back there, so that a start
// after a SIGKILL finds it.
type namesFile struct {
	path, kept      string
	log             *slog.Logger
	original, wrote []byte // nil while the file is as it was
}

// keptName is the file in the state directory.
const keptName = "resolv.conf"

func newNamesFile(stateDir string, log *slog.Logger) *namesFile {
	return &namesFile{path: resolvConf, kept: filepath.Join(stateDir, keptName), log: log}
}

// confMark begins what is ours.
const confMark = "# quicvpn sidecar wrote this"

// check fails where the file cannot be written.
func (r *namesFile) check() error {
	f, err := os.OpenFile(r.path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("--resolv-conf: %w: leave the flag out, or let this process write the file", err)
	}
	return f.Close()
}

// want has the file name these servers. Without any it stays as it is.
func (r *namesFile) want(servers []netip.Addr) error {
	if len(servers) == 0 {
		return nil
	}
	if r.original == nil {
		original, err := os.ReadFile(r.path)
		if err != nil {
			return fmt.Errorf("read the name servers: %w", err)
		}
		if err := durable.Replace(r.kept, original); err != nil {
			return fmt.Errorf("keep %s: %w: make the state directory writable", r.path, err)
		}
		r.original = original
	}
	text := r.text(servers)
	if bytes.Equal(text, r.wrote) {
		return nil
	}
	if err := writeInPlace(r.path, text); err != nil {
		return fmt.Errorf("write the name servers: %w", err)
	}
	r.wrote = text
	r.log.Info("names are resolved by the gateway", "file", r.path, "nameservers", servers)
	return nil
}

// text keeps what the file said beside the name servers: where names are searched,
// and options.
func (r *namesFile) text(servers []netip.Addr) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s; it ends with the sidecar, and what was here is in %s\n", confMark, r.kept)
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %v\n", s)
	}
	for line := range strings.Lines(string(r.original)) {
		if f := strings.Fields(line); len(f) > 0 && (f[0] == "search" || f[0] == "domain" || f[0] == "options") {
			fmt.Fprintln(&b, strings.Join(f, " "))
		}
	}
	return b.Bytes()
}

// restore brings back what this run, or an earlier one that was killed, has kept.
// A file that somebody else has written since stays theirs.
func (r *namesFile) restore() error {
	original, err := os.ReadFile(r.kept)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read what %s was: %w", r.path, err)
	}
	now, err := os.ReadFile(r.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("read the name servers: %w", err)
	case !ours(now, original):
		r.log.Warn("something else has changed the name servers: they stay so", "file", r.path)
	default:
		if err := writeInPlace(r.path, original); err != nil {
			return fmt.Errorf("restore the name servers: %w: %s has them", err, r.kept)
		}
		r.log.Info("the name servers are as they were", "file", r.path)
	}
	r.original, r.wrote = nil, nil
	if err := os.Remove(r.kept); err != nil {
		return fmt.Errorf("forget what %s was: %w", r.path, err)
	}
	return nil
}

// ours reports whether the file is one that this package has written, or was cut
// off while it wrote.
func ours(now, original []byte) bool {
	return bytes.HasPrefix(now, []byte(confMark)) || bytes.HasPrefix([]byte(confMark), now) || bytes.HasPrefix(original, now)
}

// writeInPlace writes a file that is there. Wherever it is killed, the file is as
// ours knows it: the old text, its beginning, or the new text.
func writeInPlace(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && info.Size() > int64(len(text)) {
		err = f.Truncate(int64(len(text)))
	}
	if err == nil {
		_, err = f.Write(text)
	}
	return errors.Join(err, f.Close())
}
