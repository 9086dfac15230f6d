package dockerlab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"golang.org/x/sys/unix"
)

const (
	// cacheDir keeps what takes long to make, for all later runs on the machine.
	cacheDir = "/var/cache/quicvpn-test"
	module   = "github.com/quicvpn/quicvpn"
	// makeLimit is when the making of something has hung.
	makeLimit = 8 * time.Minute
)

// cached returns the path of the file that was made by a recipe, and makes it
// where there is none. The name comes before what stands for the recipe; what
// older recipes made is removed.
func cached(name string, recipe []byte, make func(ctx context.Context, path string) error) (string, error) {
	path := filepath.Join(cacheDir, fmt.Sprintf("%s-%.8x", name, sha256.Sum256(recipe)))
	err := locked(name, func() error {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		old, err := filepath.Glob(filepath.Join(cacheDir, name+"-*"))
		if err != nil {
			return err
		}
		for _, o := range old {
			if err := os.RemoveAll(o); err != nil {
				return err
			}
		}
		return fresh(path, make)
	})
	return path, err
}

// locked runs f while no other process does so for the same name.
func locked(name string, f func() error) error {
	if err := os.MkdirAll(cacheDir, 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(cacheDir, name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close() // and with it the lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	return f()
}

// fresh has a file made beside its place and moves it there once it is whole:
// what stood there may be a program that runs. The caller holds the lock.
func fresh(path string, make func(ctx context.Context, path string) error) error {
	work := path + ".making"
	// What is there is of a run that was killed.
	if err := errors.Join(os.RemoveAll(work), os.Mkdir(work, 0o755)); err != nil {
		return err
	}
	defer os.RemoveAll(work)
	ctx, cancel := context.WithTimeout(context.Background(), makeLimit)
	defer cancel()
	whole := filepath.Join(work, filepath.Base(path))
	if err := make(ctx, whole); err != nil {
		return err
	}
	return os.Rename(whole, path)
}

// execute runs a command in a directory; empty means the working directory. It
// returns what it printed on standard output.
func execute(ctx context.Context, dir, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", c, err, stderr.Bytes())
	}
	return strings.TrimSpace(string(out)), err
}

func goBuild(ctx context.Context, dir, pkg, path string) error {
	_, err := execute(ctx, dir, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, pkg)
	return err
}

var toolbox = sync.OnceValues(func() (string, error) {
	path := filepath.Join(cacheDir, "toolbox")
	err := locked("toolbox", func() error {
		return fresh(path, func(ctx context.Context, path string) error {
			return goBuild(ctx, "", module+"/internal/dockerlab/toolbox", path)
		})
	})
	return path, err
})

// Toolbox returns the path of the toolbox, which it builds once in a process.
func Toolbox(tb netlab.TB) string {
	tb.Helper()
	return must(tb, toolbox)
}

var compose = sync.OnceValues(func() (string, error) {
	root, err := execute(context.Background(), "", "go", "list", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, "internal/tools/compose")
	recipe, err := os.ReadFile(filepath.Join(dir, "go.sum"))
	if err != nil {
		return "", err
	}
	return cached("docker-compose", recipe, func(ctx context.Context, path string) error {
		return goBuild(ctx, dir, "github.com/docker/compose/v2/cmd", path)
	})
})

// Compose returns the path of Docker Compose, version 2, which no Debian package
// has. The first on a machine takes one to two minutes to build.
func Compose(tb netlab.TB) string {
	tb.Helper()
	return must(tb, compose)
}

func must(tb netlab.TB, f func() (string, error)) string {
	tb.Helper()
	path, err := f()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return path
}

// debianArgs are those of mmdebstrap but for the last, the file. What is left
// out is most of the size and nothing that tests need: documents, and
// PostgreSQL's compiler of queries with what only that uses.
var debianArgs = []string{
	"--variant=minbase",
	"--include=ca-certificates,curl,iperf3,iproute2,iputils-ping,postgresql",
	"--dpkgopt=force-unsafe-io",
	"--dpkgopt=path-exclude=/usr/share/doc/*",
	"--dpkgopt=path-exclude=/usr/share/locale/*",
	"--dpkgopt=path-exclude=/usr/share/man/*",
	"--dpkgopt=path-exclude=/usr/lib/postgresql/*/lib/bitcode/*",
	"--dpkgopt=path-exclude=/usr/lib/postgresql/*/lib/llvmjit*",
	"--dpkgopt=path-exclude=/usr/lib/*/libLLVM*",
	"--dpkgopt=path-exclude=/usr/lib/*/libz3*",
	`--customize-hook=cd "$1"/etc/postgresql/*/main && echo "listen_addresses = '*'" >conf.d/all.conf && echo host all all all trust >>pg_hba.conf`,
	"--format=tar",
	"bookworm",
}

// debian returns the archive of a Debian system.
func debian() (string, error) {
	return cached("debian", []byte(strings.Join(debianArgs, "\n")), func(ctx context.Context, path string) error {
		// The tree that it makes first goes beside the archive, not to /tmp.
		_, err := execute(ctx, "", "env", append([]string{"TMPDIR=" + filepath.Dir(path), "mmdebstrap"}, append(debianArgs, path)...)...)
		return err
	})
}
