package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

var shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")

// docLines returns the shell lines of a document's section, without comments.
func docLines(t *testing.T, document, section string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", document))
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(text), "\n## "+section+"\n")
	if !ok {
		t.Fatalf("%s has no section %q", document, section)
	}
	body, _, _ := strings.Cut(after, "\n## ")
	for _, m := range shellBlock.FindAllStringSubmatch(body, -1) {
		for line := range strings.Lines(m[1]) {
			line, _, _ = strings.Cut(line, " #")
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// TestDocsOfProxy runs the lines of the README and docs/proxy.md in the order in
// which they stand, by the names that they have: ifconfig.co is the lab's internet.
func TestDocsOfProxy(t *testing.T) {
	t.Parallel()
	p := newProxyWorld(t)
	p.serveGit()
	p.write(filepath.Join(p.dir, "token"), read(t, p.token))
	here := strings.NewReplacer(
		"https://ifconfig.co/quicvpn.git", "http://www.example:8080/quicvpn.git",
		"http://ifconfig.co", "http://www.example", "https://ifconfig.co", "--insecure https://www.example",
		"quicvpn ", program+" ")
	shell := func(line string) *netlab.Cmd {
		c := p.ns.Command(p.ctx, "sh", "-ec", here.Replace(line))
		c.Dir = p.dir
		c.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + p.dir}
		return c
	}
	run := func(lines []string) {
		for _, line := range lines {
			if strings.HasPrefix(line, "quicvpn sidecar ") {
				if p.sidecar != nil {
					p.stopRole(p.sidecar)
				}
				p.sidecar = shell("exec " + line)
				if err := p.sidecar.Start(); err != nil {
					t.Fatal(err)
				}
				for shell("quicvpn healthcheck --state-dir ~/.quicvpn").Run() != nil {
					if p.ctx.Err() != nil {
						t.Fatalf("%s is not healthy: %s", line, p.sidecar.Log())
					}
					time.Sleep(50 * time.Millisecond)
				}
				continue
			}
			out, err := shell(line).CombinedOutput()
			want := ""
			switch {
			case strings.Contains(line, "ls-remote"):
				want = "refs/heads/main"
			case strings.Contains(line, "healthcheck"):
				want = "the gateway answers the proxies"
			case strings.Contains(line, "download-file"):
				out = []byte(read(t, filepath.Join(p.dir, "page")))
				fallthrough
			case strings.Contains(line, "ifconfig.co"):
				want = asGateway
			}
			if err != nil || !strings.Contains(anyGateway(string(out)), want) {
				t.Errorf("%s: %v\n%s", line, err, out)
			}
		}
	}
	readme := docLines(t, "README.md", "A proxy")
	run(readme)
	programs, listens := docLines(t, "docs/proxy.md", "Programs"), docLines(t, "docs/proxy.md", "Where it listens")
	run(programs)
	run(listens)
	if len(readme) != 3 || len(programs) != 6 || len(listens) != 4 {
		t.Errorf("the documents have the lines %q, %q, %q", readme, programs, listens)
	}
	p.checkTunnel()
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

// serveGit serves a repository with one branch on port 8080, as any web server may.
func (p *proxyWorld) serveGit() {
	p.t.Helper()
	l, err := p.Internet.Listen("tcp", netlab.ServerAddr4.String()+":8080")
	if err != nil {
		p.t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/quicvpn.git/info/refs" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(strings.Repeat("0123456789", 4) + "\trefs/heads/main\n")) // who asks may be gone
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // always ErrServerClosed, by the Close below
	}()
	p.t.Cleanup(func() {
		s.Close()
		<-done
	})
}
