package dockerlab

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"sync"
)

// How engines know the images.
const (
	scratchName = "quicvpn-test/scratch"
	debianName  = "quicvpn-test/debian"
)

// ScratchImage returns the name of an image with one program, the toolbox, which
// is its entry point: `docker run IMAGE serve`, `docker exec CONTAINER /toolbox
// get http://…`. Its commands are listed in toolbox/main.go.
func (e *Engine) ScratchImage(ctx context.Context) string {
	e.tb.Helper()
	return e.imported(ctx, scratchName, func() (io.ReadCloser, error) { return scratch(Toolbox(e.tb)) },
		`ENTRYPOINT ["/toolbox"]`)
}

// DebianImage returns the name of an image of Debian with curl, iperf3, ip, ping,
// certificates and a PostgreSQL server that trusts everybody, with an empty
// cluster; `pg_ctlcluster --foreground 15 main start` runs it. The first on a machine takes
// half a minute to make, and each engine some seconds to import.
func (e *Engine) DebianImage(ctx context.Context) string {
	e.tb.Helper()
	return e.imported(ctx, debianName, func() (io.ReadCloser, error) {
		path, err := debian()
		if err != nil {
			return nil, err
		}
		return os.Open(path)
	}, `CMD ["bash"]`)
}

// images are those that an engine has.
type images struct {
	mu   sync.Mutex // held while one is imported
	have map[string]bool
}

// imported imports an image where the engine does not have it yet.
func (e *Engine) imported(ctx context.Context, name string, archive func() (io.ReadCloser, error), changes ...string) string {
	e.tb.Helper()
	e.images.mu.Lock()
	defer e.images.mu.Unlock()
	if e.images.have[name] {
		return name
	}
	content, err := archive()
	e.check(err)
	defer content.Close()
	args := []string{"import"}
	for _, change := range changes {
		args = append(args, "--change", change)
	}
	c := e.Command(ctx, dockerCLI, append(args, "-", name)...)
	c.Stdin = content
	_, err = output(ctx, c)
	e.check(err)
	if e.images.have == nil {
		e.images.have = map[string]bool{}
	}
	e.images.have[name] = true
	return name
}

// scratch returns the archive of an image with the toolbox alone.
func scratch(toolbox string) (io.ReadCloser, error) {
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
	return io.NopCloser(&archive), w.Close()
}
