package docker

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What `make install` puts into place is a program and a unit that systemd takes
// without a complaint; `make uninstall` takes all of it away.
func TestInstall(t *testing.T) {
	t.Parallel()
	prefix := t.TempDir()
	run := func(name string, args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", name, args, err, out)
		}
		return string(out)
	}
	// Empty, SYSTEMD says that systemd does not run here.
	makes.Lock()
	defer makes.Unlock()
	run("make", makeArgs(t, "install", "PREFIX="+prefix, "SYSTEMD=")...)
	unit := "lib/systemd/system/quicvpn-driver.service"
	if diff := cmp.Diff([]string{"bin/quicvpn", unit}, filesBelow(t, prefix)); diff != "" {
		t.Errorf("files:\n%s", diff)
	}
	run(filepath.Join(prefix, "bin/quicvpn"), "version")
	if complaint := run("systemd-analyze", "verify", filepath.Join(prefix, unit)); complaint != "" {
		t.Error(complaint)
	}
	run("make", makeArgs(t, "uninstall", "PREFIX="+prefix, "SYSTEMD=")...)
	if left := filesBelow(t, prefix); len(left) != 0 {
		t.Errorf("%q are left", left)
	}

	// Makers of packages install to elsewhere.
	root := t.TempDir()
	run("make", makeArgs(t, "install", "DESTDIR="+root, "PREFIX=/usr")...)
	if diff := cmp.Diff([]string{"usr/bin/quicvpn", "usr/" + unit}, filesBelow(t, root)); diff != "" {
		t.Errorf("files of a package:\n%s", diff)
	}
	run("grep", "^ExecStart=/usr/bin/quicvpn driver$", filepath.Join(root, "usr", unit))
}

// The capabilities that the unit leaves the driver are enough, for a published
// port below 1024 and for a container of an earlier run, too.
func TestCapabilitiesOfUnit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	start := func() {
		t.Helper()
		h.driver = h.Start(w.ctx, "setpriv", "--no-new-privs", "--bounding-set", "-all,"+unitCapabilities(t),
			program, "driver", "--token-file", w.token, "--state-dir", h.stateDir())
		if err := h.driver.WaitLog(w.ctx, "the driver is up"); err != nil {
			t.Fatalf("start the driver: %v; it printed:\n%s", err, h.driver.Log())
		}
	}
	start()
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	h.must("run -d --name web --network net -p 80:80 IMAGE serve")
	h.driver.Kill()
	start()
	h.reaches("web")
	if _, err := w.Uplink.Get(w.ctx, "http://"+h.uplink.Addresses()[0].Addr().String()+"/"); err != nil {
		t.Error(err)
	}
	h.must("rm -f web")
	h.must("network rm net")
}

// unitCapabilities returns the unit's capabilities as setpriv adds them.
func unitCapabilities(t *testing.T) string {
	t.Helper()
	unit, err := os.ReadFile("../../packaging/quicvpn-driver.service")
	if err != nil {
		t.Fatal(err)
	}
	_, list, ok := strings.Cut(string(unit), "\nCapabilityBoundingSet=CAP_")
	if !ok {
		t.Fatal("the unit leaves the driver all capabilities")
	}
	list, _, _ = strings.Cut(list, "\n")
	return "+" + strings.ToLower(strings.ReplaceAll(list, " CAP_", ",+"))
}

// filesBelow lists the files below a directory, by their names from there.
func filesBelow(t *testing.T, dir string) (names []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
