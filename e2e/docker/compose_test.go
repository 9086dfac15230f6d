package docker

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A project is a Compose file of the repository that is run on a host.
type project struct {
	h     *host
	files []string
	env   []string
}

// project prepares a file. What it has from a registry an override has from
// elsewhere; in that IMAGE stands for the toolbox's image and DEBIAN for Debian's.
func (h *host) project(file, override string, env ...string) *project {
	h.w.t.Helper()
	path, err := filepath.Abs(filepath.Join("../..", file))
	if err != nil {
		h.w.t.Fatal(err)
	}
	override = strings.ReplaceAll(override, "IMAGE", h.ScratchImage(h.w.ctx))
	if strings.Contains(override, "DEBIAN") {
		override = strings.ReplaceAll(override, "DEBIAN", h.DebianImage(h.w.ctx))
	}
	p := &project{h: h, files: []string{path, h.w.save(filepath.Base(file), override)}, env: env}
	h.w.t.Cleanup(func() {
		if h.w.t.Failed() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // the test's has ended
			defer cancel()
			out, err := p.run(ctx, "logs --no-color --timestamps")
			h.w.t.Logf("docker compose logs of %s (%v):\n%s", file, err, out)
		}
	})
	return p
}

// must runs a command of Compose, which must succeed, and returns what it printed on
// standard output.
func (p *project) must(line string) string {
	p.h.w.t.Helper()
	out, err := p.try(line)
	if err != nil {
		p.h.w.t.Fatal(err)
	}
	return out
}

func (p *project) try(line string) (string, error) { return p.run(p.h.w.ctx, line) }

func (p *project) run(ctx context.Context, line string) (string, error) {
	args := []string{"--ansi=never"}
	for _, f := range p.files {
		args = append(args, "--file", f)
	}
	c := p.h.Command(ctx, dockerlab.Compose(p.h.w.t), append(args, strings.Fields(line)...)...)
	c.Env = append(c.Env, p.env...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		err = fmt.Errorf("docker compose %s: %w\n%s", line, err, stderr.Bytes())
	}
	return strings.TrimSpace(string(out)), err
}

// down ends the project, of which nothing may be left.
func (p *project) down() {
	p.h.w.t.Helper()
	p.must("down --volumes")
	for _, list := range []string{"ps --all --quiet", "network ls --quiet --filter type=custom", "volume ls --quiet"} {
		if left := p.h.must(list); left != "" {
			p.h.w.t.Errorf("after down, docker %s shows %s", list, left)
		}
	}
}

// started tells when a service's container was started last.
func (p *project) started(service string) string {
	p.h.w.t.Helper()
	return p.h.must("inspect --format {{.State.StartedAt}} " + p.must("ps --all --quiet "+service))
}

// seenAs checks what the internet sees a page's reader as.
func (p *project) seenAs(service string, want map[string]string) {
	p.h.w.t.Helper()
	for url, addr := range want {
		page, err := p.try("exec -T " + service + " /toolbox get " + url)
		if err != nil || page != netlab.Page+addr {
			p.h.w.t.Errorf("%s gets %s: %q, %v; want to be seen as %s", service, url, page, err, addr)
		}
	}
}

// both are the pages of the internet, and what a gateway's clients are seen as there.
var both = map[string]string{
	"http://" + netlab.ServerAddr4.String() + "/":   netlab.EgressAddr4.String(),
	"http://[" + netlab.ServerAddr6.String() + "]/": netlab.EgressAddr6.String(),
}
