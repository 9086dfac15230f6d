package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// pluginVar is what the managed plugin has as /var/lib.
func (h *host) pluginVar() string { return filepath.Join(h.w.dir, "plugin-"+h.name) }

// createPlugin makes the managed plugin and gives it a state directory that
// stateDir names too.
func (h *host) createPlugin() {
	h.w.t.Helper()
	h.make("plugin")
	h.setPlugin()
}

func (h *host) setPlugin() {
	h.w.t.Helper()
	state := filepath.Join(h.pluginVar(), "quicvpn/driver")
	err := os.MkdirAll(state, 0o700)
	if err == nil && !isLink(h.stateDir()) {
		err = os.Symlink(state, h.stateDir())
	}
	token, readErr := os.ReadFile(h.w.token)
	if err == nil && readErr == nil {
		err = os.WriteFile(filepath.Join(h.pluginVar(), "token"), token, 0o600)
	}
	if err != nil || readErr != nil {
		h.w.t.Fatal(err, readErr)
	}
	h.must("plugin set quicvpn state.source=" + h.pluginVar() + " QUICVPN_TOKEN_FILE=/var/lib/token")
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&os.ModeSymlink != 0
}

// driverPID returns the process of the driver, plugin of its own or managed.
func (h *host) driverPID() int {
	if h.driver != nil {
		return h.driver.Process.Pid
	}
	return h.pluginPID()
}

// pluginPID returns the process of the managed plugin, as this process sees it;
// zero if there is none.
func (h *host) pluginPID() int {
	h.w.t.Helper()
	namespace, err := os.Readlink(h.Path("/proc/1/ns/net"))
	if err != nil {
		h.w.t.Fatal(err)
	}
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		h.w.t.Fatal(err)
	}
	for _, name := range found {
		b, err := os.ReadFile(name)
		if err != nil || !bytes.HasPrefix(b, []byte("/quicvpn\x00driver\x00")) {
			continue // it has ended meanwhile, or is another program
		}
		if ns, err := os.Readlink(filepath.Join(filepath.Dir(name), "ns/net")); err != nil || ns != namespace {
			continue // on another host
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			h.w.t.Fatal(err)
		}
		return pid
	}
	return 0
}

// The managed plugin comes and goes, dies and is made anew: networks stay, and
// so do containers with their addresses and routes.
func TestManagedPlugin(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	h.createPlugin()
	h.must("plugin enable quicvpn")
	h.must("network create -d quicvpn:latest -o mtu=1300 --ipv6 --subnet 172.30.0.0/24 --subnet fd00:30::/64 net")
	h.must("run -d --name always --restart always --network net -p 8080:80 IMAGE serve")
	before := h.look("always")
	well := func(after string) {
		t.Helper()
		h.reaches("always")
		if diff := cmp.Diff(before, h.look("always")); diff != "" {
			t.Errorf("after %s:\n%s", after, diff)
		}
		if _, err := w.Uplink.Get(w.ctx, "http://"+h.uplink.Addresses()[0].Addr().String()+":8080/"); err != nil {
			t.Errorf("the published port after %s: %v", after, err)
		}
	}
	well("the start")

	h.refused("plugin disable quicvpn", "in use")
	h.must("plugin disable -f quicvpn")
	h.refused("exec always /toolbox get http://"+netlab.ServerAddr4.String()+"/", "")
	h.must("plugin enable quicvpn")
	well("disable and enable")

	upload := h.chat("always", w.echoTCP(), 20*time.Second)
	h.must("plugin rm -f quicvpn")
	h.createPlugin()
	h.must("plugin enable quicvpn")
	if stall := upload.end(); stall > 15*time.Second {
		t.Errorf("a pause of %v by rm and create", stall)
	}
	well("rm and create")

	pid := h.pluginPID()
	if pid == 0 { // for kill(2), this process and more
		t.Fatal("the plugin has no process")
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.waitFor("the engine starts the plugin again", 20*time.Second, func() error {
		if now := h.pluginPID(); now == 0 || now == pid {
			return fmt.Errorf("its process is %d", now)
		}
		return nil
	})
	well("a kill")

	h.Reboot()
	well("a reboot")

	h.must("rm -f always")
	h.waitEmpty()
	h.must("network rm net")
	if s := h.state(); len(s.Networks) != 0 {
		t.Errorf("a network was removed, and is in %v", s.Networks)
	}
	h.must("plugin disable quicvpn")
	h.must("plugin rm quicvpn")
}

// A managed plugin has 30 seconds for each call. Where Join takes longer the
// engine deletes the endpoint: before the driver has heard of Join, or after it
// has joined. The container does not run, and nothing is left of it.
func TestPluginSlowJoin(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	late := h.slowPlugin(32 * time.Second)
	h.must("plugin enable quicvpn")
	h.must("network create -d quicvpn:latest --subnet 172.30.0.0/24 net")
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if _, err := h.try("run --network net IMAGE serve"); err == nil || !strings.Contains(err.Error(), "NetworkDriver.Join") {
				t.Errorf("a container whose Join takes too long: error %v, want one of Join", err)
			}
		})
	}
	wg.Wait()
	for range 2 {
		select {
		case <-late:
		case <-w.ctx.Done():
			t.Fatal("the driver does not answer")
		}
	}
	h.waitEmpty()
	h.must("run -d --name web --network net IMAGE serve")
	h.reaches("web")
}

// slowPlugin creates a managed plugin whose first two Joins take as long as
// said: the call of the one, and the answer of the other. It returns what hears
// when each is over.
func (h *host) slowPlugin(delay time.Duration) (late <-chan struct{}) {
	t := h.w.t
	t.Helper()
	var config map[string]any
	b, err := os.ReadFile("../../packaging/plugin.json")
	if err == nil {
		err = json.Unmarshal(b, &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	// The engine calls this process, and that the driver.
	config["entrypoint"] = []string{"/quicvpn", "driver", "--plugin-dir", "/var/lib"}
	if b, err = json.Marshal(config); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	err = errors.Join(os.MkdirAll(dir+"/rootfs/var", 0o755), os.Symlink("../run", dir+"/rootfs/var/run"))
	if err != nil {
		t.Fatal(err)
	}
	// Nothing else is there, so it must be static, as program is without the race
	// detector only.
	build := exec.CommandContext(h.w.ctx, "go", "build", "-o", dir+"/rootfs/quicvpn", "../..")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the plugin's binary: %v\n%s", err, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	h.must("plugin create quicvpn " + dir)
	h.setPlugin()
	socket := filepath.Join("/run/docker/plugins", h.must("plugin inspect --format {{.Id}} quicvpn"), "quicvpn.sock")
	return h.slowDown(socket, filepath.Join(h.pluginVar(), "quicvpn.sock"), delay)
}

// slowDown answers at one socket by what another says, and has the first two
// Joins take longer.
func (h *host) slowDown(front, back string, delay time.Duration) (late <-chan struct{}) {
	t := h.w.t
	t.Helper()
	over := make(chan struct{}, 2)
	var joins atomic.Int32
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", "driver"
			// Unlike the engine, it waits for the end.
			*r.Out = *r.Out.WithContext(h.w.ctx)
		},
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", back)
		}},
	}
	wait := func() {
		select {
		case <-time.After(delay):
		case <-h.w.ctx.Done():
		}
	}
	server := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		number := int32(0)
		if r.URL.Path == "/NetworkDriver.Join" {
			number = joins.Add(1)
		}
		if number == 1 {
			wait()
		}
		answer := httptest.NewRecorder()
		proxy.ServeHTTP(answer, r)
		if number == 2 {
			wait()
		}
		rw.WriteHeader(answer.Code)
		rw.Write(answer.Body.Bytes()) // to an engine that may have gone
		if number == 1 || number == 2 {
			over <- struct{}{}
		}
	})}
	if err := os.MkdirAll(h.Path(filepath.Dir(front)), 0o700); err != nil {
		t.Fatal(err)
	}
	// Under its own name it is too long for an address.
	place, err := os.Open(h.Path(filepath.Dir(front)))
	if err != nil {
		t.Fatal(err)
	}
	defer place.Close()
	l, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", place.Fd(), filepath.Base(front)))
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	go server.Serve(l) // ends with the server
	t.Cleanup(func() { server.Close() })
	return over
}
