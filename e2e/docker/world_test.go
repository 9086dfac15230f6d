// Package docker runs the driver as a user would: beside a real Docker Engine on
// a Docker host of its own, whose uplink is watched from before anything starts.
package docker

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// program is the command as users have it; with the race detector if the tests
// themselves have it.
var program string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "quicvpn-e2e-docker-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "make a directory for the binary:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "quicvpn")
	build := exec.Command("go", "build", "-o", program, "../..")
	if raceEnabled {
		build = exec.Command("go", "build", "-race", "-o", program, "../..")
	} else {
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the binary: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

var gatewayEnd = netip.AddrPortFrom(netlab.GatewayAddr4, 443)

// A world is a topology with a gateway, and Docker hosts where clients are.
type world struct {
	*netlab.Topology
	t       *testing.T
	ctx     context.Context
	dir     string
	token   string // the file with the first join token
	gateway *netlab.Cmd
	hosts   []*host
}

// newWorld makes a world whose gateway runs; the internet has pages on 80 and
// 443, and echoes UDP on 7.
func newWorld(t *testing.T) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	w := &world{Topology: netlab.NewTopology(t, netlab.LinkConfig{}), t: t, ctx: ctx, dir: t.TempDir()}
	w.Internet.ServeHTTP(80)
	w.Internet.ServeHTTPS(443)
	w.Internet.ServeEcho(7)
	w.token = w.save("token", w.run(w.Gateway, "gateway", "init", "--state-dir", w.gatewayDir(), "--address", gatewayEnd.String()))
	t.Cleanup(w.check)
	w.startGateway()
	return w
}

func (w *world) gatewayDir() string { return filepath.Join(w.dir, "gateway") }

// startGateway runs the gateway, whose name server is the internet's server: see
// serveNames.
func (w *world) startGateway() {
	w.t.Helper()
	w.gateway = w.Gateway.Start(w.ctx, program, "gateway", "run", "--state-dir", w.gatewayDir(), "--dns", netlab.ServerAddr4.String())
}

// check looks for what no test wants to see. The lab is still there.
func (w *world) check() {
	for _, h := range w.hosts {
		if leak := h.capture.Traffic().Leak(); leak != "" {
			w.t.Errorf("the uplink of %s showed %s", h.name, leak)
		}
		w.checkLog(h.driver)
	}
	w.checkLog(w.gateway)
}

func (w *world) checkLog(c *netlab.Cmd) {
	if c == nil {
		return
	}
	for _, bad := range []string{"panic: ", "DATA RACE", "fatal error: "} {
		if strings.Contains(c.Log(), bad) {
			w.t.Errorf("%q in what %s printed:\n%s", bad, c.Args[1], c.Log())
		}
	}
	if w.t.Failed() {
		w.t.Logf("%s printed:\n%s", c.Args[1], c.Log())
	}
}

// save writes a file that only root reads and returns its name.
func (w *world) save(name, content string) string {
	w.t.Helper()
	path := filepath.Join(w.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// run runs a command of quicvpn that must succeed and returns what it printed
// on standard output.
func (w *world) run(ns *netlab.NS, args ...string) string {
	w.t.Helper()
	c := ns.Command(w.ctx, program, args...)
	out, err := c.Output()
	if err != nil {
		w.t.Fatalf("quicvpn %s: %v: %s", strings.Join(args, " "), err, c.Log())
	}
	return string(out)
}

// newToken creates a join token and returns its file.
func (w *world) newToken(name string, args ...string) string {
	w.t.Helper()
	return w.save("token-"+name, w.run(w.Gateway, append([]string{
		"token", "create", "--state-dir", w.gatewayDir(), "--name", name}, args...)...))
}

// A host is a Docker host with the driver.
type host struct {
	*dockerlab.Engine
	w       *world
	name    string
	uplink  *netlab.Iface
	capture *netlab.Capture
	driver  *netlab.Cmd
}

// newHost makes the first client a Docker host, whose driver runs.
func (w *world) newHost(cfg dockerlab.Config) *host {
	w.t.Helper()
	return w.hostAt(w.ClientIf, cfg)
}

// addHost adds another one.
func (w *world) addHost(name string, cfg dockerlab.Config) *host {
	w.t.Helper()
	uplink, _ := w.AddClient(name, netlab.LinkConfig{})
	return w.hostAt(uplink, cfg)
}

func (w *world) hostAt(uplink *netlab.Iface, cfg dockerlab.Config) *host {
	w.t.Helper()
	h := &host{w: w, name: uplink.NS.Name, uplink: uplink, capture: uplink.Capture(gatewayEnd)}
	h.Engine = dockerlab.Start(w.t, uplink.NS, cfg)
	w.hosts = append(w.hosts, h)
	h.startDriver()
	return h
}

func (h *host) stateDir() string { return filepath.Join(h.w.dir, "driver-"+h.name) }

// startDriver starts the driver and returns when the engine can call it.
func (h *host) startDriver(args ...string) {
	h.w.t.Helper()
	args = append([]string{"driver", "--state-dir", h.stateDir()}, args...)
	if h.w.token != "" {
		args = append(args, "--token-file", h.w.token)
	}
	h.driver = h.Start(h.w.ctx, program, args...)
	if err := h.driver.WaitLog(h.w.ctx, "the driver is up"); err != nil {
		h.w.t.Fatalf("start the driver: %v; it printed:\n%s", err, h.driver.Log())
	}
}

// must runs the Docker client, which must succeed.
func (h *host) must(line string) string {
	h.w.t.Helper()
	return h.Docker(h.w.ctx, h.args(line)...)
}

// try runs the Docker client.
func (h *host) try(line string) (string, error) { return h.TryDocker(h.w.ctx, h.args(line)...) }

// args are the words of a line, in which IMAGE stands for the toolbox's.
func (h *host) args(line string) []string {
	args := strings.Fields(line)
	for i, a := range args {
		if a == "IMAGE" {
			args[i] = h.ScratchImage(h.w.ctx)
		}
	}
	return args
}

// refused runs the Docker client, which must fail with a text.
func (h *host) refused(line, text string) {
	h.w.t.Helper()
	out, err := h.try(line)
	if err == nil || !strings.Contains(err.Error(), text) {
		h.w.t.Errorf("docker %s: %q, error %v, want %q", line, out, err, text)
	}
}
