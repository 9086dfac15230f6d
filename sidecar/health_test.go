package sidecar

import (
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// health runs CheckHealth in the client's namespace, as the process that a
// container's health check is.
func (l *lab) health(timeout time.Duration, wrapper ...string) (line string, err error) {
	l.t.Helper()
	out, err := l.command(childSettings{Health: timeout}, wrapper...).CombinedOutput()
	line = strings.TrimSpace(string(out))
	if strings.Contains(line, "\n") {
		l.t.Errorf("more than one line: %s", line)
	}
	return line, err
}

// TestHealth: what lives and carries nothing is not healthy.
func TestHealth(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	check := func(what, want string, wrapper ...string) {
		t.Helper()
		good := strings.HasPrefix(want, "the gateway answers")
		line, err := l.health(3*time.Second, wrapper...)
		if (err == nil) != good || !strings.Contains(line, want) {
			t.Errorf("%s: got %q (%v), want %q", what, line, err, want)
		}
	}
	check("before the start", "FAILED: there is no "+filepath.Join(l.dir, "status.json")+": no sidecar runs with this state directory")

	l.gw.set(func() { l.gw.dead = true })
	cmd := l.command(childSettings{})
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.WaitLog(l.ctx, "seems blocked"); err != nil {
		t.Fatal(err)
	}
	l.eventually(func() error {
		if line, _ := l.health(time.Second); !strings.Contains(line, "UDP to it seems blocked") {
			return fmt.Errorf("the healthcheck does not say why: %s", line)
		}
		return nil
	})
	l.gw.set(func() { l.gw.dead = false })
	if err := cmd.WaitLog(l.ctx, "msg=connected"); err != nil {
		t.Fatal(err)
	}
	l.ping(toyRemote4, toyRemote6)
	const good = "the gateway answers through quicvpn0: "
	check("connected", good)

	// Without the right to open raw sockets, as where it was dropped.
	deny := []string{"setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw"}
	check("no rights", "FAILED: to ping, the capability NET_RAW is missing", deny...)
	l.Client.Sysctl("net.ipv4.ping_group_range", "0 2147483647")
	check("ping sockets", good, deny...)
	if line, err := l.health(3*time.Second, "setpriv", "--reuid=65534", "--clear-groups", "--bounding-set=-all"); err == nil || !strings.Contains(line, "cannot be read by this user") {
		t.Errorf("another user, who may not enter the directory: %s", line)
	}
	check("ping sockets", good)

	// The session lives, and the data path does not.
	l.gw.set(func() { l.gw.lose = math.MaxInt })
	before := time.Now()
	line, err := l.health(700 * time.Millisecond)
	if took := time.Since(before); err == nil || took < 700*time.Millisecond || took > 3*time.Second {
		t.Errorf("a healthcheck of 700 ms took %v (%v)", took, err)
	}
	if !strings.Contains(line, "the tunnel is dead: no answer from 10.88.0.1 fd88::1 through quicvpn0 within 700ms, although the session stands since ") {
		t.Errorf("a dead data path: %s", line)
	}
	// A lost packet does not matter, and one IP version is enough.
	l.gw.set(func() { l.gw.lose = 2 })
	check("two are lost", good)
	l.Client.Nft("table inet lost { chain c { type filter hook output priority -300; icmpv6 type echo-request drop; }; }")
	check("IPv6 is broken", good+"10.88.0.1")
	l.Client.Nft("table inet lost { chain c { icmp type echo-request drop; }; }")
	check("the namespace lets no ping out", "operation not permitted: see the sidecar's log")
	l.Client.Nft("delete table inet lost")

	// Without a session; the file of a killed sidecar says that there is one.
	l.gw.set(func() { l.gw.dead = true })
	if err := cmd.WaitLog(l.ctx, "does not answer"); err != nil {
		t.Fatal(err)
	}
	check("silent", "and the sidecar tries to connect again: the gateway does not answer")
	l.gw.set(func() { l.gw.dead = false })
	l.ping(toyRemote4)
	cmd.Kill()
	check("killed", "FAILED: there is no interface quicvpn0 here: the sidecar was killed")
	cmd = l.start(childSettings{})
	check("again", good)
	l.stop(cmd)
	check("stopped", "no sidecar runs with this state directory")
	files, err := filepath.Glob(filepath.Join(l.dir, "*"))
	if err != nil || len(files) != 1 || filepath.Base(files[0]) != "client.key" {
		t.Errorf("the state directory holds %v (%v), want the key alone", files, err)
	}
}

// TestStatusFile is about what the file says, and that a sidecar does without it.
func TestStatusFile(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{})
	l.ping(toyRemote4)
	path := filepath.Join(l.dir, statusName)
	var s status
	l.eventually(func() (err error) {
		if s, err = readStatus(l.dir); err == nil && !s.Connected {
			err = fmt.Errorf("it says %+v", s)
		}
		return err
	})
	if s.Interface != "quicvpn0" || s.Network != "default" || s.Trouble != "" || time.Since(s.Since) > time.Minute ||
		fmt.Sprint(s.Addresses) != "[10.88.0.5 fd88::5]" || fmt.Sprint(s.Gateway) != "[10.88.0.1 fd88::1]" {
		t.Errorf("it says %+v", s)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("mode %v (%v), want 0644", info.Mode(), err)
	}
	// What may be asked is what the namespace has an address for.
	l.Client.Sysctl("net.ipv6.conf.quicvpn0.disable_ipv6", "1")
	l.eventually(func() error {
		if s, err := readStatus(l.dir); err != nil || fmt.Sprint(s.Gateway) != "[10.88.0.1]" {
			return fmt.Errorf("it says %+v (%v)", s, err)
		}
		return nil
	})
	l.stop(cmd)

	l.Client.ReadOnly(l.dir)
	cmd = l.start(childSettings{})
	l.ping(toyRemote4)
	if err := cmd.WaitLog(l.ctx, "cannot write the status file"); err != nil {
		t.Error(err)
	}
	l.stop(cmd)
}

func TestReadStatus(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, statusName)
	good, err := json.Marshal(status{Interface: "tun7", Connected: true, Gateway: []netip.Addr{netlab.GatewayAddr4}})
	if err != nil {
		t.Fatal(err)
	}
	umask := unix.Umask(0o77)
	defer unix.Umask(umask)
	for _, tt := range []struct{ text, want string }{
		{string(good), ""},
		{"", "is not what a sidecar writes"},
		{"{}", "is not what a sidecar writes"},
		{`{"interface": 7}`, "is not what a sidecar writes"},
		{`{"interface": "tun7", "gateway": ["nobody"]}`, "is not what a sidecar writes"},
	} {
		if err := writeStatus(path, []byte(tt.text)); err != nil {
			t.Fatal(err)
		}
		s, err := readStatus(dir)
		if tt.want == "" {
			if err != nil || s.Interface != "tun7" || !s.Connected {
				t.Errorf("%s: %+v, %v", tt.text, s, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.text, err, tt.want)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("mode %v (%v), want 0644", info.Mode(), err)
	}
	if err := writeStatus(filepath.Join(dir, "nowhere", statusName), nil); err == nil {
		t.Error("written into a directory that is not there")
	}
}
