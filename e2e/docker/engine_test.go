package docker

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// reaches waits until a container reaches the internet.
func (h *host) reaches(container string) {
	h.w.t.Helper()
	h.waitFor(container+" reaches the internet", 20*time.Second, func() error {
		_, err := h.try("exec " + container + " /toolbox get http://" + netlab.ServerAddr4.String() + "/")
		return err
	})
}

// The engine stops and starts; then it is killed. Containers with a restart
// policy come back, and nothing is left of the others.
func TestEngineStopped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn -o mtu=1300 --ipv6 --subnet 172.30.0.0/24 --subnet fd00:30::/64 net")
	h.must("run -d --name always --restart always --network net -p 8080:80 IMAGE serve")
	h.must("run -d --name never --network net IMAGE serve")
	before := h.inside("always")
	for i, end := range []func(){h.Stop, h.Kill} {
		end()
		h.StartAgain()
		h.reaches("always")
		if diff := cmp.Diff(before, h.inside("always")); diff != "" {
			t.Errorf("after end %d of the engine:\n%s", i, diff)
		}
		h.waitState("one container", func(s state) bool { return s.endpoints() == 1 && len(s.Devices) == 0 && s.Queues > 0 })
		if _, err := w.Uplink.Get(w.ctx, "http://"+h.uplink.Addresses()[0].Addr().String()+":8080/"); err != nil {
			t.Errorf("the published port after end %d of the engine: %v", i, err)
		}
		h.must("start never")
		h.reaches("never")
	}
	h.must("rm -f always never")
	h.waitEmpty()
}

// With live-restore containers and their connections outlive the engine.
func TestLiveRestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{LiveRestore: true})
	echo := w.echoTCP()
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	h.must("run -d --name near --network net IMAGE serve")
	h.must("run -d --name user --network net IMAGE sleep")
	sandbox := h.must("inspect --format {{.NetworkSettings.SandboxKey}} user")
	for _, end := range []func(){h.Stop, h.Kill} {
		// Through the engine the command would end with it.
		c := &chat{h, h.Start(w.ctx, "nsenter", "--net="+sandbox, dockerlab.Toolbox(t), "chat", echo, "5s")}
		if err := c.cmd.WaitLog(w.ctx, "connected"); err != nil {
			t.Fatalf("%v: %s", err, c.cmd.Log())
		}
		end()
		h.StartAgain()
		if stall := c.end(); stall > 3*time.Second {
			t.Errorf("a pause of %v", stall)
		}
		h.must("exec user /toolbox get http://near/")
	}
	// The driver beside it, too.
	h.Kill()
	h.driver.Kill()
	h.startDriver()
	h.StartAgain()
	h.must("exec user /toolbox get http://near/")
	h.reaches("user")
	h.must("rm -f near user")
	h.waitEmpty()
}

// After a reboot the driver may be there before the engine, or come while the
// engine waits for it, or be missing.
func TestReboot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	h.must("run -d --name always --restart always --network net IMAGE serve")
	running := func() bool { return h.must("inspect --format {{.State.Running}} always") == "true" }

	h.PowerOff()
	h.PowerOn()
	h.startDriver()
	if s := h.state(); s.endpoints() != 0 || s.Queues != 0 {
		t.Errorf("a boot later the driver starts with %+v", s)
	}
	h.StartAgain()
	h.waitFor("the container runs", 20*time.Second, func() error {
		if !running() {
			return fmt.Errorf("it does not")
		}
		return nil
	})
	h.reaches("always")

	// The engine waits 15 seconds for the driver.
	h.PowerOff()
	h.PowerOn()
	var wg sync.WaitGroup
	wg.Go(func() {
		time.Sleep(5 * time.Second) // the engine is waiting by then
		h.startDriver()
	})
	h.StartAgain()
	wg.Wait()
	h.reaches("always")

	// Without it the container does not run: nothing leaks. Later it can.
	h.Reboot()
	if running() {
		t.Error("a container runs without its network's driver")
	}
	h.startDriver()
	h.must("start always")
	h.reaches("always")
}

// Twelve containers start at once, over and over: addresses, devices and the
// record stay whole.
func TestParallelStarts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	const many = 12
	all := func(line string) {
		var wg sync.WaitGroup
		for i := range many {
			wg.Go(func() {
				if _, err := h.try(fmt.Sprintf(line, i)); err != nil {
					t.Errorf(line+": %v", i, err)
				}
			})
		}
		wg.Wait()
	}
	all("run -d --name c%d --network net IMAGE serve")
	all("exec c%d /toolbox get http://" + netlab.ServerAddr4.String() + "/")
	all("restart -t 0 c%d")
	all("exec c%d /toolbox get http://c0/")
	if s := h.state(); s.endpoints() != many || len(s.Devices) != 0 {
		t.Errorf("with %d containers: %+v", many, s)
	}
	all("rm -f c%d")
	h.waitEmpty()
}

// A socket of the engine that takes connections and never answers holds up
// nothing: the driver does not ask the engine while the engine asks it.
func TestEngineThatNeverAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	h.driver.Kill()
	l, err := net.Listen("unix", h.Path("/run/silent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	h.startDriver("--docker-socket", "/run/silent.sock")
	ended := make(chan error, 1)
	go func() {
		_, err := h.try("run --rm --network net IMAGE get http://" + netlab.ServerAddr4.String() + "/")
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("a container does not start")
	}
	h.must("network rm net")
}

// The engine repeats a call that was cut off, without its parameters.
func TestDriverKilledInACall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	use := "run --rm --network net " + h.ScratchImage(w.ctx) + " get http://" + netlab.ServerAddr4.String() + "/"
	for _, call := range []string{"CreateEndpoint", "Join"} {
		h.driver.Kill()
		socket := h.Path("/run/docker/plugins/quicvpn.sock")
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
		h.startDriver("--plugin-dir", "/run/behind")
		cut := cutOff(t, socket, h.Path("/run/behind/quicvpn.sock"), "/NetworkDriver."+call)
		ended := make(chan error, 1)
		go func() {
			_, err := h.try(use)
			ended <- err
		}()
		<-cut
		h.driver.Kill()
		h.startDriver()
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "try again") {
			t.Errorf("killed in %s: error %v, want one that says to try again", call, err)
		}
		h.must(use)
	}
	h.waitEmpty()
}

// cutOff stands between the engine and a driver. It passes calls on until the
// first of a kind, which reaches the driver, and whose answer is lost; then it
// is gone, and the returned channel closed.
func cutOff(t *testing.T, front, behind, call string) <-chan struct{} {
	t.Helper()
	l, err := net.Listen("unix", front)
	if err != nil {
		t.Fatal(err)
	}
	cut := make(chan struct{})
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: "driver"}) },
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", behind)
		}},
		ModifyResponse: func(r *http.Response) error {
			if r.Request.URL.Path != call {
				return nil
			}
			l.Close()
			close(cut)
			panic(http.ErrAbortHandler)
		},
	}
	server := &http.Server{Handler: proxy}
	go server.Serve(l) // ends with the listener
	t.Cleanup(func() { server.Close() })
	return cut
}
