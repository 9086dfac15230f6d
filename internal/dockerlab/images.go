package dockerlab

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// cacheDir keeps what takes long to make, for all later runs on the machine.
const cacheDir = "/var/cache/quicvpn-test"

// scratchName is how engines know the smallest image.
const scratchName = "quicvpn-test/scratch"

// ScratchImage returns the name of an image with one program, the toolbox, which
// is its entry point: `docker run IMAGE serve`, `docker exec CONTAINER /toolbox
// get http://…`. Its commands are listed in toolbox/main.go.
func (e *Engine) ScratchImage(ctx context.Context) string {
	e.tb.Helper()
	return e.imported(ctx, scratchName, func() ([]byte, error) { return scratch(Toolbox(e.tb)) },
		`ENTRYPOINT ["/toolbox"]`)
}

// images are those that an engine has.
type images struct {
	mu   sync.Mutex
	have map[string]bool
}

// imported imports an image where the engine does not have it.
func (e *Engine) imported(ctx context.Context, name string, archive func() ([]byte, error), change string) string {
	e.tb.Helper()
	e.images.mu.Lock()
	defer e.images.mu.Unlock()
	if e.images.have[name] {
		return name
	}
	content, err := archive()
	e.check(err)
	c := e.Command(ctx, dockerCLI, "import", "--change", change, "-", name)
	c.Stdin = bytes.NewReader(content)
	_, err = output(ctx, c)
	e.check(err)
	if e.images.have == nil {
		e.images.have = map[string]bool{}
	}
	e.images.have[name] = true
	return name
}

// scratch returns the archive of an image with the toolbox alone.
func scratch(toolbox string) ([]byte, error) {
	program, err := os.ReadFile(toolbox)
	if err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "toolbox", Mode: 0o755, Size: int64(len(program))}); err != nil {
		return nil, err
	}
	if _, err := w.Write(program); err != nil {
		return nil, err
	}
	return archive.Bytes(), w.Close()
}

var toolbox = sync.OnceValues(func() (string, error) {
	path := filepath.Join(cacheDir, "toolbox")
	return path, buildInto(path, "", "github.com/quicvpn/quicvpn/internal/dockerlab/toolbox")
})

// Toolbox returns the path of the toolbox, which it builds once in a process.
func Toolbox(tb netlab.TB) string {
	tb.Helper()
	path, err := toolbox()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return path
}

// buildInto builds a static program of the module in dir; empty means that of
// the working directory. The one that stood there may still run.
func buildInto(path, dir, pkg string) error {
	if err := os.MkdirAll(cacheDir, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(cacheDir, "build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	fresh := filepath.Join(work, "program")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", fresh, pkg)
	build.Dir = dir
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return os.Rename(fresh, path)
}
