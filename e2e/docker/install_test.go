package docker

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
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
