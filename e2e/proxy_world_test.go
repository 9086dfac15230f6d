package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/proxy"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// socksAt is where the tests' proxies listen.
const socksAt = "127.0.0.1:1080"

// nobody is an ordinary user: no capability, and no way to one.
var nobody = []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"}

// A proxyWorld is a world whose client has a proxy and, without more, no TUN device.
type proxyWorld struct {
	*world
	*client
	dir string // the client's own
}

// newProxyWorld has a gateway that knows names under example.
func newProxyWorld(t *testing.T) *proxyWorld {
	t.Helper()
	w := newWorld(t, options{})
	serveNames(t, w.Internet, netip.AddrPortFrom(netlab.ServerAddr4, 53))
	w.Gateway.Replace("/etc/resolv.conf", "nameserver 203.0.113.10\n")
	w.startGateway()
	return &proxyWorld{world: w, client: w.client0(), dir: t.TempDir()}
}

// startProxy runs a sidecar with a proxy as root.
func (p *proxyWorld) startProxy(args ...string) {
	p.t.Helper()
	p.start(p.token, append([]string{"--tun=off", "--socks5", socksAt}, args...)...)
	p.waitProxy()
}

func (p *proxyWorld) waitProxy() {
	p.t.Helper()
	for {
		line, err := p.healthcheck()
		if err == nil {
			return
		}
		if p.ctx.Err() != nil {
			p.t.Fatalf("the proxy is not healthy: %s\n%s", line, p.sidecar.Log())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// users writes a file with the proxy's users.
func (p *proxyWorld) users(text string) string {
	p.t.Helper()
	path := filepath.Join(p.dir, "users")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
	return path
}

// runIn runs a program in a namespace and returns what it printed, and its exit code.
func (p *proxyWorld) runIn(ns *netlab.NS, env []string, args ...string) (output string, code int) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, 45*time.Second)
	defer cancel()
	c := ns.Command(ctx, args[0], args[1:]...)
	c.Env = append([]string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + p.dir}, env...)
	out, err := c.CombinedOutput()
	if c.ProcessState == nil {
		p.t.Fatalf("%v: %v", args, err)
	}
	return anyGateway(string(out)), c.ProcessState.ExitCode()
}

// anyGateway makes of a page whose server saw the gateway's IPv6 address one of IPv4:
// for a name either will do.
func anyGateway(page string) string {
	return strings.ReplaceAll(page, netlab.EgressAddr6.String(), netlab.EgressAddr4.String())
}

func (p *proxyWorld) curl(line string) (output string, code int) {
	p.t.Helper()
	return p.runIn(p.ns, nil, append([]string{"curl", "-sSk", "--max-time", "40"}, strings.Fields(line)...)...)
}

// asGateway is a page of the internet whose server saw the gateway.
var asGateway = netlab.Page + netlab.EgressAddr4.String() + "\n"

// inside dials from the client's namespace.
type inside struct{ p *proxyWorld }

func (d inside) Dial(network, address string) (net.Conn, error) {
	return d.p.ns.DialContext(d.p.ctx, network, address)
}

// dial connects through the proxy.
func (p *proxyWorld) dial(to string, auth *proxy.Auth) (net.Conn, error) {
	d, err := proxy.SOCKS5("tcp", socksAt, auth, inside{p})
	if err != nil {
		return nil, err
	}
	c, err := d.Dial("tcp", to)
	if err == nil {
		err = c.SetDeadline(time.Now().Add(40 * time.Second))
	}
	return c, err
}

// serveTCPEcho sends back what comes to port 7 of the internet's server.
func (p *proxyWorld) serveTCPEcho() {
	p.t.Helper()
	l, err := p.Internet.Listen("tcp", netip.AddrPortFrom(netlab.ServerAddr4, 7).String())
	if err != nil {
		p.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	p.t.Cleanup(func() {
		l.Close()
		<-done
	})
}

// echoed opens a connection to the echo, and sees that it carries.
func (p *proxyWorld) echoed() (net.Conn, error) {
	c, err := p.dial("203.0.113.10:7", nil)
	if err != nil {
		return nil, err
	}
	b := []byte("hello")
	if _, err = c.Write(b); err == nil {
		_, err = io.ReadFull(c, b)
	}
	if err == nil && string(b) != "hello" {
		err = fmt.Errorf("%q came back", b)
	}
	if err != nil {
		c.Close()
	}
	return c, err
}

func (p *proxyWorld) write(path, text string) {
	p.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
}
