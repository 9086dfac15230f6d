package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/quicvpn/quicvpn/driver"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// dockerDemo is one run on the machine's Docker Engine. It follows this order:
//
//  1. find the engine, and that nobody's driver is in the way
//  2. make an image without a registry
//  3. on a bridge network: a server, the gateway, a join token
//  4. from now on watch the bridge; start the driver
//  5. a network of the driver, two containers; look inside one of them
//  6. Docker's DNS; a page by way of the gateway; measure
//  7. judge what crossed the bridge
//  8. remove everything
//
// All that it makes has one prefix in its name.
type dockerDemo struct {
	*stage
	engine          *engine
	ctx             context.Context // done when the user interrupts
	binary, toolbox string
	prefix          string
	driver          *netlab.Cmd
	server, gateway netip.Addr
}

// least are options of docker run for the gateway: what it needs, and no more.
const least = "--cap-drop ALL --cap-add NET_ADMIN --device /dev/net/tun --read-only --security-opt no-new-privileges"

func (d *dockerDemo) run(ctx context.Context) {
	start := time.Now()
	d.ctx = ctx
	host := netlab.New(d.tb).Host()
	var err error
	if d.engine, err = findEngine(host); err != nil {
		d.tb.Fatalf("%v", err)
	}
	var random [3]byte
	rand.Read(random[:])
	d.prefix = "qvdemo-" + hex.EncodeToString(random[:])
	d.say("", "containers --- driver === QUIC over a bridge === gateway --- server")
	d.say("", "on Docker Engine %s; all that the demo makes there is named %s…", d.engine.version, d.prefix)
	clean := sync.OnceValue(d.clean)
	d.tb.Cleanup(func() { _ = clean() }) // after a failure that says more

	d.makeImage()
	capture := d.startGateway()
	d.startDriver()
	user := d.runContainers()
	d.fetch()
	d.measure(user)

	traffic := capture.Traffic()
	d.say("10 proof", "the bridge: %d packets of the tunnel; to the server in clear, the gateway's own aside: %d",
		traffic.Tunnel, traffic.Clear)
	d.check("the capture of the bridge", judge(traffic))
	d.check("clean up", clean())
	d.say("", "OK, in %.1f s", time.Since(start).Seconds())
}

// judge says what is wrong with what the bridge carried.
func judge(t netlab.Traffic) error {
	switch {
	case t.Clear > 0:
		return fmt.Errorf("%d packets to the server in clear: %s", t.Clear, strings.Join(t.Samples, ", "))
	case t.Lost > 0:
		return fmt.Errorf("%d packets were lost that may have been clear", t.Lost)
	case t.Tunnel == 0:
		return errors.New("no packet of the tunnel was seen")
	}
	return nil
}

// docker shows a command line of Docker's and runs it. NAME- and IMAGE in it are
// the demo's. It returns standard output.
func (d *dockerDemo) docker(step, line string) string {
	d.show(step, "docker "+d.named(line))
	return d.ask(line)
}

// ask is docker for what is not worth showing.
func (d *dockerDemo) ask(line string) string {
	out, err := d.engine.run(strings.Fields(d.named(line))...)
	if err == nil {
		err = d.ctx.Err()
	}
	if err != nil {
		d.tb.Fatalf("%v", err)
	}
	return out
}

// show shows a command line, in pieces that a terminal has room for.
func (d *dockerDemo) show(step, command string) {
	const width = 100
	text := "$"
	column := len(text)
	for _, word := range strings.Fields(command) {
		if column += 1 + len(word); column > width {
			text += fmt.Sprintf(" \\\n%-18s", "")
			column = len(word)
		}
		text += " " + word
	}
	d.say(step, "%s", text)
}

func (d *dockerDemo) named(line string) string {
	return strings.NewReplacer("NAME-", d.prefix+"-", "IMAGE", d.prefix).Replace(line)
}

func (d *dockerDemo) makeImage() {
	const entry = `ENTRYPOINT ["/quicvpn"]`
	d.show("1 image", "tar -c quicvpn toolbox | docker import --change '"+entry+"' - "+d.prefix)
	programs, err := archive(map[string]string{"quicvpn": d.binary, "toolbox": d.toolbox})
	d.check("pack the image", err)
	_, err = d.engine.runWith(programs, "import", "--change", entry, "-", d.prefix)
	d.check("make the image", err)
}

// startGateway makes the bridge network that stands for the internet, with a
// server and the gateway, and watches it.
func (d *dockerDemo) startGateway() *netlab.Capture {
	subnet := d.freeSubnet()
	id := d.docker("2 internet", "network create --subnet "+subnet.String()+" NAME-internet")
	bridge := "br-" + id[:min(len(id), 12)] // so the engine names it
	if _, err := d.engine.host.Netlink().LinkByName(bridge); err != nil {
		d.tb.Fatalf("find the engine's bridge %s: %v: the driver has to run where the engine does; one without root, "+
			"in a virtual machine as Docker Desktop's, or outside of this container cannot be used", bridge, err)
	}
	d.server = subnet.Addr().Next().Next() // the first is the bridge's own
	d.gateway = d.server.Next()
	d.docker("", fmt.Sprintf("run -d --name NAME-server --network NAME-internet --ip %v --entrypoint /toolbox IMAGE serve", d.server))

	end := netip.AddrPortFrom(d.gateway, 443)
	d.docker("3 gateway", "run --rm --network none -v NAME-state:/var/lib/quicvpn IMAGE gateway init --address "+end.String())
	d.docker("", fmt.Sprintf("run -d --name NAME-gateway --network NAME-internet --ip %v %s -v NAME-state:/var/lib/quicvpn IMAGE gateway run", d.gateway, least))
	return d.engine.host.Iface(bridge).CaptureClear(func(src, dst netip.Addr) bool {
		return dst == d.server && src != d.gateway
	}, end)
}

// freeSubnet returns the subnet that the engine would choose: only where it is
// told one, it lets containers choose their addresses.
func (d *dockerDemo) freeSubnet() (subnet netip.Prefix) {
	d.ask("network create NAME-internet")
	out := d.ask("network inspect --format {{range.IPAM.Config}}{{.Subnet}},{{end}} NAME-internet")
	d.ask("network rm NAME-internet")
	for _, s := range strings.Split(out, ",") {
		if p, err := netip.ParsePrefix(s); err == nil && p.Addr().Is4() {
			return p.Masked()
		}
	}
	d.tb.Fatalf("the engine gives no IPv4 subnet to a bridge network, but %q", out)
	return subnet
}

// startDriver starts the driver on the host, with a token that opens the server
// alone: a gateway keeps clients away from private addresses.
func (d *dockerDemo) startDriver() {
	dir := d.tb.TempDir()
	token, state := filepath.Join(dir, "token"), filepath.Join(dir, "state")
	create := fmt.Sprintf("exec NAME-gateway /quicvpn token create --allow %v/32", d.server)
	d.show("4 driver", "docker "+d.named(create)+" >token")
	d.check("keep the join token", os.WriteFile(token, []byte(d.ask(create)), 0o600))
	d.show("", "quicvpn driver --token-file token")
	// It outlives an interrupt, so that the engine can remove what is the driver's.
	d.driver = d.engine.host.Start(context.Background(), d.binary, "driver", "--token-file", token, "--state-dir", state, "--docker-socket", d.engine.socket)
	ctx, cancel := context.WithTimeout(d.ctx, 10*time.Second)
	defer cancel()
	d.check("start the driver", d.driver.WaitLog(ctx, "the driver is up"))
}

// runContainers makes a network of the driver's and two containers on it, and
// returns the second of them.
func (d *dockerDemo) runContainers() *netlab.NS {
	d.docker("5 network", "network create -d "+driver.Name+" NAME-net")
	d.docker("6 containers", "run -d --name NAME-web --network NAME-net --entrypoint /toolbox IMAGE serve")
	d.docker("", "run -d --name NAME-user --network NAME-net --entrypoint /toolbox IMAGE sleep")
	user := d.join("user")
	d.say("7 inside user", "%s", d.look(user))
	return user
}

// join enters the namespaces of a container.
func (d *dockerDemo) join(container string) *netlab.NS {
	pid, err := strconv.Atoi(d.ask("inspect --format {{.State.Pid}} NAME-" + container))
	if err == nil && pid == 0 {
		err = errors.New("it has ended")
	}
	d.check("look for the process of "+container, err)
	ns, _, err := d.engine.host.Join(container, pid)
	d.check("look inside a container", err)
	return ns
}

// look describes a container's one interface. Those of the kernel's own, such as
// tunl0, are down.
func (d *dockerDemo) look(container *netlab.NS) string {
	links, err := container.Netlink().LinkList()
	d.check("list interfaces", err)
	links = slices.DeleteFunc(links, func(l netlink.Link) bool {
		return l.Attrs().Flags&net.FlagUp == 0 || l.Attrs().Flags&net.FlagLoopback != 0
	})
	if len(links) != 1 {
		d.tb.Fatalf("the container %s has %d interfaces, not one", container.Name, len(links))
	}
	link := links[0]
	text := fmt.Sprintf("one interface, %s: %s, MTU %d", link.Attrs().Name, link.Type(), link.Attrs().MTU)
	for _, a := range container.Iface(link.Attrs().Name).Addresses() {
		text += ", " + a.String()
	}
	routes, err := container.Netlink().RouteList(link, netlink.FAMILY_V4)
	d.check("list routes", err)
	for _, r := range routes {
		to := "default"
		if r.Dst != nil && !r.Dst.IP.IsUnspecified() {
			to = r.Dst.String()
		}
		if r.Gw != nil {
			to += " via " + r.Gw.String()
		}
		text += "; route " + to
	}
	return text
}

// fetch has a container resolve another one's name, and get pages from it and,
// by way of the gateway, from the server.
func (d *dockerDemo) fetch() {
	const get = "exec NAME-user /toolbox get http://"
	address := func(container string) string {
		return d.ask("inspect --format {{range.NetworkSettings.Networks}}{{.IPAddress}}{{end}} NAME-" + container)
	}
	for _, s := range []struct{ step, line, want, says string }{
		{"8 Docker's DNS", "exec NAME-user /toolbox resolve NAME-web", address("web"), "%s"},
		{"", get + "NAME-web/", address("user"), "seen as %s: the container itself"},
		{"9 fetch", get + d.server.String() + "/", d.gateway.String(), "seen as %s: the gateway"},
	} {
		got := d.docker(s.step, s.line)
		if got != s.want {
			d.tb.Fatalf("docker %s: got %q, want %q", d.named(s.line), got, s.want)
		}
		d.say("", s.says, got)
	}
}

// measure compares the way through the tunnel with Docker's bridge.
func (d *dockerDemo) measure(user *netlab.NS) {
	bridge, tunnel := d.download(d.join("gateway")), d.download(user)
	d.say("", "1 TCP flow from the server: %.2f Gbit/s to the container, %.2f without the tunnel", tunnel, bridge)
}

// download returns the Gbit/s that a container gets from the server.
func (d *dockerDemo) download(to *netlab.NS) float64 {
	const long, large = 2 * time.Second, 1 << 40
	ctx, cancel := context.WithTimeout(d.ctx, long)
	defer cancel()
	start := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%v/bytes/%d", d.server, large), nil)
	d.check("measure", err)
	resp, err := to.HTTPClient().Do(req)
	d.check("measure", err)
	defer resp.Body.Close()
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, resp.Body, make([]byte, 256<<10))
	if !errors.Is(err, context.DeadlineExceeded) {
		d.tb.Fatalf("measure: the download ended after %d bytes: %v", n, err)
	}
	return float64(n) * 8 / time.Since(start).Seconds() / 1e9
}

// clean removes all that the demo has made. The driver is the last: the engine
// asks it about its containers and network.
func (d *dockerDemo) clean() error {
	if d.tb.Failed() {
		d.engine.logs(d.prefix, d.tb.Logf)
	}
	step := "11 clean-up"
	d.left = d.engine.remove(d.prefix, func(command string) {
		d.show(step, command)
		step = ""
	})
	if d.driver == nil {
		return d.left
	}
	stopped := d.driver.Stop(10 * time.Second)
	if _, err := os.Lstat(pluginSocket); err == nil {
		d.left = errors.Join(d.left, errors.New("the driver's "+pluginSocket))
	}
	return errors.Join(d.left, stopped)
}
