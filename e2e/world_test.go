// Package e2e runs the quicvpn binary as a user would, in networks of network
// namespaces, and looks at what arrives, what leaks and what is left behind.
package e2e

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

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// program is the command as users have it; with the race detector if the tests
// themselves have it.
var program string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "quicvpn-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "make a directory for the binary:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // other users run it too
		fmt.Fprintln(os.Stderr, "open the binary's directory:", err)
		return 1
	}
	program = filepath.Join(dir, "quicvpn")
	build := exec.Command("go", "build", "-o", program, "..")
	if raceEnabled {
		build = exec.Command("go", "build", "-race", "-o", program, "..")
	} else {
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the binary: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// patience is how long tests wait for what must happen; machines may be busy.
const patience = 30 * time.Second

var (
	gatewayEnd4 = netip.AddrPortFrom(netlab.GatewayAddr4, 443)
	gatewayEnd6 = netip.AddrPortFrom(netlab.GatewayAddr6, 443)
	servers     = []netip.Addr{netlab.ServerAddr4, netlab.ServerAddr6}
)

// A world is a topology with a gateway that was set up, and that may run. The
// uplink of every client is watched from before anything of ours starts, and
// must show nothing in clear when the test ends.
type world struct {
	*netlab.Topology
	t     *testing.T
	ctx   context.Context
	dir   string
	token string           // the file with the first join token
	ends  []netip.AddrPort // where tunnel packets go

	gateway *netlab.Cmd
	clients []*client
}

// options are how a world differs from the usual.
type options struct {
	link netlab.LinkConfig
	// address is what clients dial; empty means gatewayEnd4.
	address string
	// init are more arguments of gateway init.
	init []string
}

// newWorld makes a world; the internet has pages on 80 and 443, and echoes UDP
// on 7.
func newWorld(t *testing.T, o options) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	t.Cleanup(cancel)
	w := &world{Topology: netlab.NewTopology(t, o.link), t: t, ctx: ctx, dir: t.TempDir(),
		ends: []netip.AddrPort{gatewayEnd4, gatewayEnd6}}
	w.Internet.ServeHTTP(80)
	w.Internet.ServeHTTPS(443)
	w.Internet.ServeEcho(7)
	if o.address == "" {
		o.address = gatewayEnd4.String()
	}
	if end, err := netip.ParseAddrPort(o.address); err == nil {
		w.ends = append(w.ends, end)
	}
	w.token = w.save("token", w.run(w.Gateway, append([]string{
		"gateway", "init", "--state-dir", w.gatewayDir(), "--address", o.address}, o.init...)...))
	t.Cleanup(w.check)
	w.watch(w.ClientIf)
	return w
}

// check looks for what no test wants to see. The lab is still there.
func (w *world) check() {
	for _, c := range w.clients {
		if leak := c.capture.Traffic().Leak(); leak != "" {
			w.t.Errorf("the uplink of %s showed %s", c.ns.Name, leak)
		}
		w.checkLog(c.sidecar)
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
}

func (w *world) gatewayDir() string { return filepath.Join(w.dir, "gateway") }

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

// startGateway runs the gateway.
func (w *world) startGateway(args ...string) {
	w.t.Helper()
	w.gateway = w.Gateway.Start(w.ctx, program, append([]string{"gateway", "run", "--state-dir", w.gatewayDir()}, args...)...)
}

// A client is a namespace with, or without, a sidecar.
type client struct {
	w       *world
	ns      *netlab.NS
	uplink  *netlab.Iface
	capture *netlab.Capture
	sidecar *netlab.Cmd
}

// client0 is the client that every world has.
func (w *world) client0() *client { return w.clients[0] }

// watch makes a client of a namespace by its uplink.
func (w *world) watch(uplink *netlab.Iface) *client {
	c := &client{w: w, ns: uplink.NS, uplink: uplink, capture: uplink.Capture(w.ends...)}
	w.clients = append(w.clients, c)
	return c
}

// addClient adds a client with an uplink of its own.
func (w *world) addClient(name string) *client {
	w.t.Helper()
	uplink, _ := w.AddClient(name, netlab.LinkConfig{})
	return w.watch(uplink)
}

func (c *client) stateDir() string { return filepath.Join(c.w.dir, c.ns.Name) }

// args are the arguments of a sidecar.
func (c *client) args(token string, more ...string) []string {
	return append([]string{"sidecar", "--token-file", token, "--state-dir", c.stateDir()}, more...)
}

// start runs the sidecar.
func (c *client) start(token string, args ...string) {
	c.w.t.Helper()
	c.sidecar = c.ns.Start(c.w.ctx, program, c.args(token, args...)...)
}

// join runs the sidecar and waits until the tunnel carries IPv4 and IPv6.
func (c *client) join(token string, args ...string) {
	c.w.t.Helper()
	c.start(token, args...)
	c.waitUp()
}

// waitUp waits until the internet answers through the tunnel by both versions.
func (c *client) waitUp() {
	c.w.t.Helper()
	c.waitFor(servers...)
}

// waitFor waits until the servers answer through the tunnel. Nothing is sent
// before the route is there: it would be in clear.
func (c *client) waitFor(servers ...netip.Addr) {
	c.w.t.Helper()
	ctx, cancel := context.WithTimeout(c.w.ctx, patience)
	defer cancel()
	for _, server := range servers {
		err := c.ns.WaitRoute(ctx, server, "quicvpn0")
		if err == nil {
			err = c.ns.WaitPing(ctx, server)
		}
		if err != nil {
			c.w.t.Fatalf("%s does not reach %s by the tunnel after %v: %v", c.ns.Name, server, patience, err)
		}
	}
}

// page fetches a page from the internet's server by its address, and returns
// whom the server saw.
func (c *client) page(scheme string, server netip.Addr) (string, error) {
	ctx, cancel := context.WithTimeout(c.w.ctx, 10*time.Second)
	defer cancel()
	page, err := c.ns.Get(ctx, pageURL(scheme, server))
	return strings.TrimSpace(strings.TrimPrefix(page, netlab.Page)), err
}

func pageURL(scheme string, server netip.Addr) string {
	host := server.String()
	if server.Is6() {
		host = "[" + host + "]"
	}
	return scheme + "://" + host + "/"
}

// checkPages fetches pages by both versions, which must come from the gateway's
// address.
func (c *client) checkPages() {
	c.w.t.Helper()
	for _, scheme := range []string{"http", "https"} {
		for i, server := range servers {
			want := []netip.Addr{netlab.EgressAddr4, netlab.EgressAddr6}[i]
			if seen, err := c.page(scheme, server); err != nil || seen != want.String() {
				c.w.t.Errorf("%s of %s from %s: seen as %q (%v), want %s", scheme, server, c.ns.Name, seen, err, want)
			}
		}
	}
}

// stopRole stops a role gracefully.
func (w *world) stopRole(c *netlab.Cmd) {
	w.t.Helper()
	if err := c.Stop(30 * time.Second); err != nil {
		w.t.Errorf("stop %s: %v; it printed:\n%s", c.Args[1], err, c.Log())
	}
}

// stop stops the sidecar, once no TCP connection is under way that would go on
// in clear afterwards. The capture must show nothing of the stop.
func (c *client) stop() {
	c.w.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		busy := c.connections()
		if len(busy) == 0 {
			break
		}
		if time.Now().After(deadline) {
			c.w.t.Fatalf("connections of %s do not end: %s", c.ns.Name, busy)
		}
	}
	c.w.stopRole(c.sidecar)
}

// connections returns the namespace's TCP sockets that may still send.
func (c *client) connections() (busy []string) {
	c.w.t.Helper()
	const timeWait, listen = "06", "0A" // of the kernel's tcp_states.h
	err := c.ns.Do(func() error {
		for _, file := range []string{"tcp", "tcp6"} {
			table, err := os.ReadFile("/proc/thread-self/net/" + file)
			if err != nil {
				return err
			}
			for _, line := range strings.Split(strings.TrimSpace(string(table)), "\n")[1:] {
				if f := strings.Fields(line); f[3] != timeWait && f[3] != listen {
					busy = append(busy, strings.Join(f[1:4], " "))
				}
			}
		}
		return nil
	})
	if err != nil {
		c.w.t.Fatal(err)
	}
	return busy
}

// checkTunnel fails unless the uplink showed a tunnel and nothing in clear.
func (c *client) checkTunnel() {
	c.w.t.Helper()
	if problem := c.capture.Traffic().Problem(); problem != "" {
		c.w.t.Errorf("the uplink of %s: %s", c.ns.Name, problem)
	}
}
