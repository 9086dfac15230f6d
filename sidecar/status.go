package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/quicvpn/quicvpn/tunnel"
)

// statusName is the file in the state directory that says how the sidecar is. It
// is there while the sidecar runs, and after it was killed.
const statusName = "status.json"

// A status is what the file says: no secret, and nothing to rely on, because the
// tunnel may be dead when the session is not. CheckHealth asks the gateway.
type status struct {
	// Interface is the TUN device; where there is none, Probe is the socket that
	// answers when the gateway does.
	Interface string `json:"interface,omitempty"`
	Probe     string `json:"probe,omitempty"`
	// Connected says whether there is a session, Since since when that is so.
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since"`
	// Trouble is why there is no session, or that it has fallen silent.
	Trouble string `json:"trouble,omitempty"`
	// Congestion is what decides how fast the latest session sends.
	Congestion tunnel.Congestion `json:"congestion,omitempty"`
	// Network, Addresses and Gateway are those of the latest session: the
	// network's name, the addresses of the interface, and the gateway's own in the
	// network that can be asked from those.
	Network   string       `json:"network,omitempty"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Gateway   []netip.Addr `json:"gateway,omitempty"`
}

func newStatus(l LinkStatus) status {
	s := status{Connected: l.Gateway.IsValid(), Since: l.Since.Round(time.Second), Congestion: l.Congestion}
	if l.Err != nil {
		s.Trouble = l.Err.Error()
	}
	return s
}

// status returns how the sidecar is.
func (n *network) status(l LinkStatus) status {
	s := newStatus(l)
	s.Interface = n.cfg.Interface
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.want.grant == nil {
		return s
	}
	v4, v6 := n.grantedLocked()
	s.Network, s.Addresses, s.Gateway = n.want.grant.Network, slices.Concat(v4, v6), n.askableLocked(v4, v6)
	return s
}

// keepStatus writes the status file when it would say something else, until ctx
// ends, and removes it. A state directory that cannot be written is no reason to
// end: the key may have been put there beforehand.
func (s *Sidecar) keepStatus(ctx context.Context, link *Link, status func(LinkStatus) status) {
	path := filepath.Join(s.cfg.StateDir, statusName)
	var written []byte
	var trouble repeated
	for {
		now, err := json.MarshalIndent(status(link.Status()), "", "\t")
		if err == nil && !bytes.Equal(now, written) {
			if err = writeStatus(path, append(now, '\n')); err == nil {
				written = now
			}
		}
		if err != nil {
			if times, say := trouble.say(err.Error(), time.Now()); say {
				s.cfg.Log.Warn("cannot write the status file: `quicvpn healthcheck` has nothing to go by; make the state directory writable", "error", err, "times", times)
			}
		}
		select {
		case <-ctx.Done():
			if written != nil {
				if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
					s.cfg.Log.Warn("the status file stays", "error", err)
				}
			}
			return
		case <-link.news:
		case <-time.After(anyway):
		}
	}
}

// writeStatus writes the file whole, for everybody who may enter its directory.
func writeStatus(path string, data []byte) error {
	tmp := path + ".tmp"
	err := os.WriteFile(tmp, data, 0o644)
	if err == nil {
		err = os.Chmod(tmp, 0o644) // whatever the umask is
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp) // where it exists at all
	}
	return err
}

// readStatus reads the file that the sidecar of a state directory writes.
func readStatus(dir string) (s status, err error) {
	path := filepath.Join(dir, statusName)
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s, fmt.Errorf("there is no %s: no sidecar runs with this state directory: start it, or name its directory with --state-dir", path)
	case errors.Is(err, fs.ErrPermission):
		return s, fmt.Errorf("%s cannot be read by this user: run the healthcheck as the user that the sidecar runs as", path)
	case err != nil:
		return s, fmt.Errorf("read how the sidecar is: %w", err)
	}
	if err := json.Unmarshal(data, &s); err != nil || s.Interface == "" && s.Probe == "" {
		return s, fmt.Errorf("%s is not what a sidecar writes: stop the sidecar, remove the file, and start it again", path)
	}
	return s, nil
}
