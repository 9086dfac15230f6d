package docker

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

var shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")

// docLines returns the shell lines of a section of docs/docker.md, without
// comments.
func docLines(t *testing.T, section string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/docker.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(text), "\n## "+section+"\n")
	if !ok {
		t.Fatalf("docs/docker.md has no section %q", section)
	}
	body, _, _ := strings.Cut(after, "\n## ")
	for _, m := range shellBlock.FindAllStringSubmatch(body, -1) {
		for line := range strings.Lines(m[1]) {
			line, _, _ = strings.Cut(line, "#")
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// here has a line of the documentation do in a lab what it does on the internet.
func (h *host) here(line string) string {
	image := h.ScratchImage(h.w.ctx)
	return strings.NewReplacer(
		"curlimages/curl https://ifconfig.co", image+" get http://"+netlab.ServerAddr4.String()+"/",
		" nginx", " "+image+" serve",
		"docker service create", "docker service create -d --no-resolve-image",
	).Replace(line)
}

// sh runs a line of the documentation in the directory where the token is, and
// returns what it printed.
func (h *host) sh(line string) string {
	h.w.t.Helper()
	c := h.Command(h.w.ctx, "sh", "-ec", line)
	c.Dir = h.w.dir
	out, err := c.Output()
	if err != nil {
		h.w.t.Fatalf("%s: %v: %s", line, err, c.Log())
	}
	return string(out)
}

// ownDirectory gives the host a directory of its own in the place of one that
// hosts share.
func (h *host) ownDirectory(name string) {
	h.w.t.Helper()
	own := h.w.t.TempDir()
	err := os.MkdirAll(name, 0o755)
	if err == nil {
		err = h.NS().Do(func() error { return unix.Mount(own, name, "", unix.MS_BIND, "") })
	}
	if err != nil {
		h.w.t.Fatal(err)
	}
}

// What docs/docker.md says of the managed plugin, an upgrade and a swarm, line by
// line.
func TestDocsOfPlugin(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	h.ownDirectory("/etc/quicvpn")
	state := t.TempDir()
	run := func(lines []string) {
		t.Helper()
		for _, line := range lines {
			if line == "make plugin" {
				h.make("plugin")
				h.must("plugin set quicvpn state.source=" + state)
				continue
			}
			h.sh(h.here(line))
		}
	}
	plugin := docLines(t, "The driver as a managed plugin")
	if len(plugin) != 7 {
		t.Fatalf("the section has the lines %q, want four to begin with and three for an upgrade", plugin)
	}
	run(plugin[:4])
	run([]string{"docker run -d --name web --network vpn nginx"})
	run(plugin[4:])
	h.reaches("web")
	h.must("rm -f web")
	h.must("network rm vpn")

	h.must("swarm init --advertise-addr 127.0.0.1")
	run(docLines(t, "Swarm"))
	h.waitFor("the service's three replicas", 30*time.Second, func() error {
		if got := h.must("service ls --format {{.Replicas}}"); got != "3/3" {
			return fmt.Errorf("there are %s", got)
		}
		return nil
	})
	h.sh(h.here("docker run --rm --network vpn curlimages/curl https://ifconfig.co"))
}
