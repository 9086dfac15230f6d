package docker

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// echoTCP has the internet echo what comes to TCP port 7.
func (w *world) echoTCP() string {
	w.t.Helper()
	l, err := w.Internet.Listen("tcp", ":7")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			context.AfterFunc(w.ctx, func() { c.Close() })
			go func() { defer c.Close(); io.Copy(c, c) }() // until the client ends it
		}
	}()
	return net.JoinHostPort(netlab.ServerAddr4.String(), "7")
}

// A chat is a TCP connection that a container keeps busy.
type chat struct {
	h   *host
	cmd *netlab.Cmd
}

func (h *host) chat(container, address string, during time.Duration) *chat {
	h.w.t.Helper()
	c := &chat{h, h.Start(h.w.ctx, "/usr/bin/docker", "exec", container, "/toolbox", "chat", address, during.String())}
	if err := c.cmd.WaitLog(h.w.ctx, "connected"); err != nil {
		h.w.t.Fatalf("%s to %s: %v: %s", container, address, err, c.cmd.Log())
	}
	return c
}

// end returns how long the connection's longest pause was, once it is over.
func (c *chat) end() time.Duration {
	c.h.w.t.Helper()
	err := c.cmd.Wait()
	var result struct {
		Lines int
		Stall time.Duration
	}
	_, text, _ := strings.Cut(c.cmd.Log(), "connected")
	if err == nil {
		err = json.Unmarshal([]byte(text), &result)
	}
	if err != nil || result.Lines == 0 {
		c.h.w.t.Fatalf("a connection did not last: %v: %s", err, c.cmd.Log())
	}
	return result.Stall
}

// The driver is killed under traffic, and started again.
func TestDriverKilled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	echo := w.echoTCP()
	h.must("network create -d quicvpn -o mtu=1300 --ipv6 --subnet 172.30.0.0/24 --subnet fd00:30::/64 net")
	h.must("run -d --name near --network net -p 8080:80 IMAGE serve")
	h.must("run -d --name user --network net IMAGE sleep")
	before, stateBefore := h.inside("near"), h.state()
	out, near := h.chat("user", echo, 6*time.Second), h.chat("user", "near:7", 6*time.Second)

	h.driver.Kill()
	if diff := cmp.Diff(before, h.inside("near"), ignoreCarrier); diff != "" {
		t.Errorf("without a driver:\n%s", diff)
	}
	h.startDriver()

	for what, c := range map[string]*chat{"to the internet": out, "to a container": near} {
		if stall := c.end(); stall > 5*time.Second {
			t.Errorf("%s: a pause of %v", what, stall)
		}
	}
	if diff := cmp.Diff(before, h.inside("near"), ignoreCarrier); diff != "" {
		t.Errorf("with the next driver:\n%s", diff)
	}
	if diff := cmp.Diff(stateBefore, h.state()); diff != "" {
		t.Errorf("the next driver holds:\n%s", diff)
	}
	if page := h.must("exec user /toolbox get http://near/"); !strings.Contains(page, "172.30.0.3") {
		t.Errorf("by Docker's name: %q", page)
	}
	if page, err := w.Uplink.Get(w.ctx, "http://"+h.uplink.Addresses()[0].Addr().String()+":8080/"); err != nil {
		t.Errorf("the published port: %q, %v", page, err)
	}
	h.must("rm -f near user")
	h.waitEmpty()
	h.must("network rm net")
	h.waitState("no network", func(s state) bool { return len(s.Networks) == 0 })
}

// ignoreCarrier leaves out what a device shows while nobody has it open.
var ignoreCarrier = cmp.Transformer("carrier", func(line string) string {
	for _, word := range []string{"NO-CARRIER,", ",LOWER_UP", " linkdown", " state DOWN", " state UNKNOWN", " state UP"} {
		line = strings.ReplaceAll(line, word, "")
	}
	return line
})

// Twenty times in a row, under load.
func TestDriverKilledOverAndOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	echo := w.echoTCP()
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	h.must("run -d --name near --network net IMAGE serve")
	h.must("run -d --name user --network net IMAGE sleep")
	out, near := h.chat("user", echo, time.Hour), h.chat("user", "near:7", time.Hour)
	for i := range 20 {
		h.driver.Kill()
		h.startDriver()
		for _, url := range []string{"http://near/", "http://" + netlab.ServerAddr4.String() + "/bytes/1000000"} {
			h.waitFor(fmt.Sprintf("%s after restart %d", url, i), 10*time.Second, func() error {
				_, err := h.try("exec user /toolbox get " + url)
				return err
			})
		}
	}
	for what, c := range map[string]*chat{"to the internet": out, "to a container": near} {
		select {
		case <-c.cmd.Done():
			t.Errorf("%s: the connection ended: %s", what, c.cmd.Log())
		default:
		}
	}
	if s := h.state(); s.endpoints() != 2 || len(s.Devices) != 0 {
		t.Errorf("at last: %+v", s)
	}
}

// Containers end, and networks are removed, while there is no driver.
func TestDriverAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 gone")
	for _, name := range []string{"stopped", "removed", "stays"} {
		h.must("run -d --name " + name + " --network net -p 80 IMAGE serve")
	}

	h.driver.Kill()
	// The engine tries each of its calls for 15 seconds.
	var wg sync.WaitGroup
	for _, line := range []string{"stop -t 1 stopped", "rm -f removed", "network rm gone"} {
		wg.Go(func() {
			if _, err := h.try(line); err != nil {
				t.Errorf("%s: %v", line, err)
			}
		})
	}
	wg.Wait()
	started := make(chan error, 1)
	go func() {
		_, err := h.try("start stopped") // the engine tries again for 15 seconds
		started <- err
	}()
	time.Sleep(2 * time.Second) // the engine is in the middle of its attempts
	h.startDriver()
	if err := <-started; err != nil {
		t.Errorf("a container that was started while there was no driver: %v", err)
	}
	h.waitState("two containers, one network", func(s state) bool {
		return s.endpoints() == 2 && len(s.Devices) == 0 && len(s.Networks) == 1
	})
	h.waitFor("the gateway has one client", 20*time.Second, func() error {
		if list := w.run(w.Gateway, "client", "list", "--state-dir", w.gatewayDir()); strings.Count(list, "\n") != 2 {
			return fmt.Errorf("it lists\n%s", list)
		}
		return nil
	})
	for _, name := range []string{"stopped", "stays"} {
		h.must("exec " + name + " /toolbox get http://" + netlab.ServerAddr4.String() + "/")
	}
	h.must("rm -f stopped stays")
	h.waitEmpty()
}

// Without its state the driver knows no network, and says so.
func TestStateRemoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 damaged")
	h.must("create --name near --network net IMAGE serve")
	h.must("create --name user --network damaged IMAGE serve")
	damaged := strings.TrimSpace(h.must("network inspect --format {{.Id}} damaged"))

	h.driver.Kill()
	networks := filepath.Join(h.stateDir(), "networks")
	if err := os.RemoveAll(filepath.Join(networks, strings.TrimSpace(h.must("network inspect --format {{.Id}} net")))); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(networks, damaged, "network.json")
	whole, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(file, whole[:len(whole)/2], 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	h.startDriver()
	h.refused("start near", "the driver does not know network")
	h.refused("start user", "the state file "+file+" is damaged")
	h.must("rm near user")
	h.must("network rm net")
	if b, err := os.ReadFile(file); err != nil || len(b) != len(whole)/2 {
		t.Errorf("the damaged file was touched: %d bytes, %v", len(b), err)
	}
}

// A second driver is refused, and the first goes on.
func TestSecondDriver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	for _, tt := range []struct{ dir, want string }{
		{h.stateDir(), "another driver runs with the state directory"},
		{t.TempDir(), "another driver answers on /run/docker/plugins/quicvpn.sock"},
	} {
		c := h.Command(w.ctx, program, "driver", "--token-file", w.token, "--state-dir", tt.dir)
		if err := c.Run(); err == nil || !strings.Contains(c.Log(), tt.want) {
			t.Errorf("a second driver: %v, %q, want %q", err, c.Log(), tt.want)
		}
	}
	h.must("network create -d quicvpn --subnet 172.30.0.0/24 net")
}
