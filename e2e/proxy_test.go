package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/proxy"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// TestProxyUnprivileged is the proxy of an ordinary user, who changes nothing of the
// machine's network, and what curl gets by it.
func TestProxyUnprivileged(t *testing.T) {
	t.Parallel()
	p := newProxyWorld(t)
	home, err := os.MkdirTemp("", "quicvpn-home-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	token, err := os.ReadFile(p.token)
	if err != nil {
		t.Fatal(err)
	}
	file, state := filepath.Join(home, "token"), filepath.Join(home, "state")
	if err := errors.Join(os.WriteFile(file, token, 0o600), os.Chown(file, 65534, 65534), os.Chown(home, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	before := p.ns.Snapshot()
	args := slices.Concat(nobody, []string{program, "sidecar", "--tun=off", "--socks5", socksAt, "--token-file", file})
	out, code := p.runIn(p.ns, nil, args...)
	if code != 1 || !strings.Contains(out, "permission denied: give --state-dir a directory that this user may write") {
		t.Errorf("without a state directory: exit code %d, %s", code, out)
	}
	p.sidecar = p.ns.Start(p.ctx, args[0], append(args[1:], "--state-dir", state)...)
	healthcheck := slices.Concat(nobody, []string{program, "healthcheck", "--state-dir", state})
	for {
		out, code := p.runIn(p.ns, nil, healthcheck...)
		if code == 0 && strings.HasPrefix(out, "the gateway answers the proxies: after ") && strings.Contains(out, "; network default, connected since ") {
			break
		}
		if p.ctx.Err() != nil {
			t.Fatalf("not healthy: %s\n%s", out, p.sidecar.Log())
		}
		time.Sleep(50 * time.Millisecond)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.sidecar.Process.Pid))
	if err != nil || !strings.Contains(string(status), "CapPrm:\t0000000000000000\n") || !strings.Contains(string(status), "Uid:\t65534\t65534\t65534\t65534\n") {
		t.Errorf("it runs with (%v)\n%s", err, status)
	}
	if diff := before.Diff(p.ns.Snapshot()); diff != "" {
		t.Errorf("it changed the namespace:\n%s", diff)
	}

	for _, line := range []string{
		"--socks5 " + socksAt + " http://203.0.113.10/",
		"--socks5-hostname " + socksAt + " http://www.example/",
		"--proxy socks5h://" + socksAt + " https://www.example/",
		"--proxy http://" + socksAt + " http://www.example/",
		"--proxy http://" + socksAt + " https://www.example/",
		"--proxy http://" + socksAt + " --proxytunnel http://203.0.113.10/",
	} {
		if out, code := p.curl(line); code != 0 || out != asGateway {
			t.Errorf("curl %s: exit code %d, %q", line, code, out)
		}
	}
	if out, code := p.curl("--proxy socks5h://" + socksAt + " http://[2001:db8:3::10]/"); code != 0 || out != asGateway {
		t.Errorf("IPv6: exit code %d, %q", code, out)
	}
	for variable, url := range map[string]string{
		"ALL_PROXY=socks5h://" + socksAt: "https://www.example/", "HTTPS_PROXY=http://" + socksAt: "https://www.example/", "http_proxy=http://" + socksAt: "http://www.example/",
	} {
		if out, code := p.runIn(p.ns, []string{variable}, "curl", "-sSk", "--max-time", "40", url); code != 0 || out != asGateway {
			t.Errorf("curl with %s: exit code %d, %q", variable, code, out)
		}
	}
	p.checkTunnel()
	p.stopRole(p.sidecar)
	if diff := before.Diff(p.ns.Snapshot()); diff != "" {
		t.Errorf("the namespace is not as it was:\n%s", diff)
	}
	if out, code := p.runIn(p.ns, nil, healthcheck...); code != 1 || !strings.Contains(out, "no sidecar runs with this state directory") {
		t.Errorf("healthcheck after the end: exit code %d, %s", code, out)
	}
}

// TestProxyReplies has real targets fail in every way.
func TestProxyReplies(t *testing.T) {
	t.Parallel()
	p := newProxyWorld(t)
	p.Internet.Nft("table inet t { chain c { type filter hook input priority 0; tcp dport 81 drop; tcp dport 82 reject with icmpx host-unreachable; }; }")
	p.startProxy("--tcp-open", "strict")
	for _, tt := range []struct {
		url         string
		reply, http int
	}{
		{"http://203.0.113.10:1/", 5, 502},   // nobody listens
		{"http://203.0.113.10:82/", 4, 502},  // an ICMP error
		{"http://203.0.113.10:81/", 6, 504},  // silence
		{"http://nowhere.example/", 4, 502},  // no such name
		{"http://10.0.0.1/", 2, 403},         // private
		{"http://127.0.0.1/", 2, 403},        // the gateway's own
		{"http://203.0.113.2/", 2, 403},      // the gateway's own
		{"http://[::ffff:7f00:1]/", 2, 403},  // the same in disguise
		{"http://169.254.169.254/", 2, 403},  // metadata
		{"http://[2001:db8:3::2]/", 2, 403},  // the gateway's own
		{"http://198.51.100.2:443/", 2, 403}, // the gateway itself
	} {
		before := time.Now()
		if out, code := p.curl("--proxy socks5h://" + socksAt + " " + tt.url); code != 97 || !strings.Contains(out, fmt.Sprintf("(%d)", tt.reply)) {
			t.Errorf("SOCKS5, %s: exit code %d, %s, want reply %d", tt.url, code, out, tt.reply)
		}
		if took := time.Since(before); took > 35*time.Second {
			t.Errorf("SOCKS5, %s: after %v", tt.url, took)
		}
		out, _ := p.curl("-o /dev/null -D - --proxy http://" + socksAt + " " + tt.url)
		if !strings.HasPrefix(out, fmt.Sprintf("HTTP/1.1 %d ", tt.http)) || !strings.Contains(out, "Proxy-Status: quicvpn; error=") {
			t.Errorf("HTTP, %s: %s, want status %d", tt.url, out, tt.http)
		}
	}
	// What fails there does not harm others.
	if out, code := p.curl("--proxy socks5h://" + socksAt + " http://www.example/"); code != 0 || out != asGateway {
		t.Errorf("exit code %d, %q", code, out)
	}
	p.checkTunnel()
}

// TestProxyPrograms has independent clients with credentials, TCP and UDP.
func TestProxyPrograms(t *testing.T) {
	t.Parallel()
	p := newProxyWorld(t)
	p.startProxy("--proxy-credentials-file", p.users("other:one\nuser:secret\n"))
	for _, tt := range []struct {
		line, want string
		code       int
	}{
		{"--proxy socks5h://user:secret@" + socksAt + " https://www.example/", asGateway, 0},
		{"--proxy socks5h://other:one@" + socksAt + " https://www.example/", asGateway, 0},
		{"--proxy http://user:secret@" + socksAt + " https://www.example/", asGateway, 0},
		{"--proxy http://user:secret@" + socksAt + " http://www.example/", asGateway, 0},
		{"--proxy socks5h://user:one@" + socksAt + " https://www.example/", "rejected by the SOCKS5 server", 97},
		{"--proxy socks5h://" + socksAt + " https://www.example/", "No authentication method", 97},
		{"--proxy http://" + socksAt + " https://www.example/", "407", 56},
		{"-f --proxy http://user:one@" + socksAt + " http://www.example/", "407", 22},
	} {
		if out, code := p.curl(tt.line); code != tt.code || !strings.Contains(out, tt.want) {
			t.Errorf("curl %s: exit code %d, %q", tt.line, code, out)
		}
	}

	conf := filepath.Join(p.dir, "proxychains.conf")
	for _, kind := range []string{"socks5", "http"} {
		p.write(conf, "strict_chain\nproxy_dns\n[ProxyList]\n"+kind+" 127.0.0.1 1080 user secret\n")
		if out, code := p.runIn(p.ns, nil, "proxychains4", "-q", "-f", conf, "curl", "-sSk", "--max-time", "40", "https://www.example/"); code != 0 || out != asGateway {
			t.Errorf("proxychains4 by %s: exit code %d, %q", kind, code, out)
		}
	}

	conf = filepath.Join(p.dir, "socks.conf")
	p.write(conf, `resolveprotocol: fake
route {
	from: 0.0.0.0/0 to: 0.0.0.0/0 via: 127.0.0.1 port = 1080
	protocol: tcp udp
	proxyprotocol: socks_v5
	method: username
}
`)
	env := []string{"SOCKS_CONF=" + conf, "SOCKS_USERNAME=user", "SOCKS_PASSWORD=secret"}
	if out, code := p.runIn(p.ns, env, "socksify", "curl", "-sSk", "--max-time", "40", "https://www.example/"); code != 0 || out != asGateway {
		t.Errorf("socksify: exit code %d, %q", code, out)
	}
	const datagrams = `
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(10)
for size in 1, 1200, 9000:
    s.sendto(b"x" * size, ("203.0.113.10", 7))
    print(len(s.recvfrom(65536)[0]), end=" ")
`
	if out, code := p.runIn(p.ns, env, "socksify", "/usr/bin/python3", "-c", datagrams); code != 0 || out != "1 1200 9000 " {
		t.Errorf("socksify and UDP: exit code %d, %q", code, out)
	}

	const script = `
import socket, socks
def proxied(kind, way):
    s = socks.socksocket(socket.AF_INET, kind)
    s.set_proxy(way, "127.0.0.1", 1080, True, "user", "secret")
    s.settimeout(20)
    return s
for way in socks.SOCKS5, socks.HTTP:
    s = proxied(socket.SOCK_STREAM, way)
    s.connect(("www.example", 80))
    s.sendall(b"GET / HTTP/1.0\r\n\r\n")
    print(s.makefile("rb").read().splitlines()[-1].decode())
    s.close()
s = proxied(socket.SOCK_DGRAM, socks.SOCKS5)
for size in 1, 2, 512, 1200, 1300, 1400, 1452, 1472, 1473, 4000, 9000, 32768, 65000, 65507 - 10:
    s.sendto(b"x" * size, ("203.0.113.10", 7))
    got, sender = s.recvfrom(65536)
    print(len(got), sender[0], sender[1])
for name in "www.example", "203.0.113.10":
    s.sendto(b"named", (name, 7))
    print(s.recvfrom(100)[0].decode())
s.close()
`
	out, code := p.runIn(p.ns, nil, "/usr/bin/python3", "-c", script)
	want := strings.Repeat(asGateway, 2)
	for _, size := range []int{1, 2, 512, 1200, 1300, 1400, 1452, 1472, 1473, 4000, 9000, 32768, 65000, 65507 - 10} {
		want += fmt.Sprintf("%d 203.0.113.10 7\n", size)
	}
	if want += "named\nnamed\n"; code != 0 || out != want {
		t.Errorf("python3-socks: exit code %d, printed\n%s\nwant\n%s", code, out, want)
	}

	for password, ok := range map[string]bool{"secret": true, "one": false} {
		c, err := p.dial("www.example:80", &proxy.Auth{User: "user", Password: password})
		if (err == nil) != ok {
			t.Errorf("golang.org/x/net/proxy with %s: %v", password, err)
		}
		if err == nil {
			c.Close()
		}
	}
	// The clients have gone, and with them their datagrams' ways.
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		left, code := p.runIn(p.Gateway, nil, "ss", "--no-header", "--numeric", "--udp", "dport", "=", "7")
		if code == 0 && left == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the gateway still has (exit code %d)\n%s", code, left)
		}
	}
	p.checkTunnel()
}

// TestProxyOutage stops and kills gateways under open connections.
func TestProxyOutage(t *testing.T) {
	t.Parallel()
	p := newProxyWorld(t)
	p.serveTCPEcho()
	p.startProxy()
	// reset wants the end of a connection within a second.
	reset := func(what string, c net.Conn) {
		t.Helper()
		began := time.Now()
		_, err := c.Read(make([]byte, 1))
		if took := time.Since(began); !errors.Is(err, syscall.ECONNRESET) || took > time.Second {
			t.Errorf("%s: %v after %v, want a reset within a second", what, err, took)
		}
		c.Close()
	}
	open := func() net.Conn {
		t.Helper()
		c, err := p.echoed()
		if err != nil {
			t.Fatalf("%v\n%s", err, p.sidecar.Log())
		}
		return c
	}
	c := open()
	if err := p.gateway.Stop(30 * time.Second); err != nil {
		t.Error(err)
	}
	reset("the gateway stopped", c)
	// While it is away everybody hears so in bounded time.
	began := time.Now()
	out, code := p.curl("--proxy socks5h://" + socksAt + " http://www.example/")
	if took := time.Since(began); code != 97 || !strings.Contains(out, "(3)") || took > 12*time.Second {
		t.Errorf("without a gateway: exit code %d after %v, %s", code, took, out)
	}
	if line, err := p.healthcheck(); err == nil {
		t.Errorf("healthy without a gateway: %s", line)
	}
	p.startGateway()
	p.waitProxy()

	c = open()
	p.gateway.Kill()
	p.startGateway()
	p.waitProxy()
	reset("the gateway was killed and is back", c)

	// A short outage loses nothing.
	c = open()
	defer c.Close()
	p.uplink.Down()
	time.Sleep(time.Second)
	p.uplink.Up()
	p.ns.DefaultRoute(netip.MustParseAddr("192.0.2.1"))
	if _, err := io.WriteString(c, "after"); err != nil {
		t.Error(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "after" {
		t.Errorf("after an outage of a second: %q, %v", b, err)
	}
	// The sidecar's own end.
	c2 := open()
	p.stopRole(p.sidecar)
	reset("the sidecar stopped", c2)
	p.checkTunnel()
}

// TestProxyMany holds a thousand connections at a time, of which nothing is left.
func TestProxyMany(t *testing.T) {
	t.Parallel()
	p := newProxyWorld(t)
	p.serveTCPEcho()
	p.startProxy()
	c, err := p.echoed()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	pid := p.sidecar.Process.Pid
	descriptors := func() int {
		fds, err := netlab.Descriptors(pid)
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	time.Sleep(100 * time.Millisecond)
	before := descriptors()
	const n = 1000
	conns, errs := make(chan net.Conn, n), make(chan error, n)
	slots := make(chan struct{}, 50)
	for range n {
		go func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			c, err := p.echoed()
			if err != nil {
				errs <- err
				return
			}
			conns <- c
		}()
	}
	var open []net.Conn
	for range n {
		select {
		case c := <-conns:
			open = append(open, c)
		case err := <-errs:
			t.Error(err)
		}
	}
	t.Logf("%d connections at a time; %d descriptors", len(open), descriptors())
	if got := descriptors(); got < before+len(open) {
		t.Errorf("%d descriptors with %d connections", got, len(open))
	}
	for _, c := range open {
		c.Close()
	}
	for deadline := time.Now().Add(patience); descriptors() > before; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors, before %d", descriptors(), before)
		}
	}
	// The dump of a Go program that is told to quit shows its goroutines.
	if err := p.sidecar.Process.Signal(syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	<-p.sidecar.Done()
	log := p.sidecar.Log()
	if !strings.Contains(log, "socks5.(*service).accept") {
		t.Errorf("the dump does not show the proxy:\n%s", log)
	}
	for _, left := range []string{"internal/relay.", "socks5.(*service).handle", "socks5.(*service).connect", "tunnel.(*Flow)"} {
		if strings.Contains(log, left) {
			t.Errorf("a goroutine of a connection is left: %s\n%s", left, log)
		}
	}
}

// TestProxyBesideTUN has the proxy in a namespace with the kill switch: on loopback,
// and for others on another link, who need credentials.
func TestProxyBesideTUN(t *testing.T) {
	t.Parallel()
	p := newProxyWorld(t)
	p.join(p.token, "--socks5", socksAt, "--socks5", "192.0.2.2:1081", "--proxy-credentials-file", p.users("user:secret\n"))
	for _, from := range []struct {
		ns *netlab.NS
		at string
	}{{p.ns, socksAt}, {p.ns, "192.0.2.2:1081"}, {p.Uplink, "192.0.2.2:1081"}} {
		for _, scheme := range []string{"socks5h", "http"} {
			out, code := p.runIn(from.ns, nil, "curl", "-sSk", "--max-time", "40", "--proxy", scheme+"://user:secret@"+from.at, "https://www.example/")
			if code != 0 || out != asGateway {
				t.Errorf("from %s by %s at %s: exit code %d, %q", from.ns.Name, scheme, from.at, code, out)
			}
		}
		if out, code := p.runIn(from.ns, nil, "curl", "-sSk", "--max-time", "40", "--proxy", "socks5h://"+from.at, "https://www.example/"); code != 97 {
			t.Errorf("from %s without credentials: exit code %d, %q", from.ns.Name, code, out)
		}
	}
	p.checkPages()

	// Datagrams from elsewhere than the client, which has authenticated, are dropped.
	const script = `
import socket, socks
s = socks.socksocket(socket.AF_INET, socket.SOCK_DGRAM)
s.set_proxy(socks.SOCKS5, "192.0.2.2", 1081, True, "user", "secret")
s.settimeout(10)
s.sendto(b"mine", ("203.0.113.10", 7))
print(s.recvfrom(100)[0].decode())
relay = socket.socket.getpeername(s)
header = b"\0\0\0\1" + socket.inet_aton("203.0.113.10") + b"\0\7"
other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
other.settimeout(1)
other.sendto(header + b"theirs", relay)
try:
    print("a stranger got", other.recvfrom(100))
except socket.timeout:
    print("a stranger got nothing")
s.sendto(b"still mine", ("203.0.113.10", 7))
print(s.recvfrom(100)[0].decode())
`
	out, code := p.runIn(p.Uplink, nil, "/usr/bin/python3", "-c", script)
	if want := "mine\na stranger got nothing\nstill mine\n"; code != 0 || out != want {
		t.Errorf("UDP from the link: exit code %d, %q, want %q", code, out, want)
	}
	p.checkTunnel()
	p.stop()
}
