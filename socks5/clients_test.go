package socks5

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/proxy"
)

// web is a web server with and without TLS that tells what it was asked for.
type web struct {
	plain, tls Addr
	ca         string // a file
}

func newWeb(t *testing.T) web {
	t.Helper()
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %d", r.Method, r.URL.Path, len(b))
	})
	plain, secure := httptest.NewServer(h), httptest.NewTLSServer(h)
	t.Cleanup(plain.Close)
	t.Cleanup(secure.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, ca, secure.Certificate())
	return web{addrFrom(addrPort(plain.Listener.Addr())), addrFrom(addrPort(secure.Listener.Addr())), ca}
}

func writePEM(t *testing.T, path string, c *x509.Certificate) {
	t.Helper()
	writeFile(t, path, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})))
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// run runs a program and returns what it printed, and its exit code. Of this
// process's environment it has nothing, least of all its proxies.
func run(t *testing.T, env []string, name string, args ...string) (output string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env = append([]string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + t.TempDir()}, env...)
	b, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatalf("%v: %v", cmd, err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

func TestCurl(t *testing.T) {
	w := newWorld(t, nil)
	locked := newWorld(t, func(w *world) { w.Authenticate = Credentials("user", "secret") })
	web := newWeb(t)
	plain, tls := fmt.Sprintf("http://app.test:%d/path", web.plain.Port), fmt.Sprintf("https://%v/path", web.tls)
	for _, tt := range []struct {
		args   string
		want   string // in its output
		code   int
		dialed string
	}{
		{args: "--socks5-hostname " + w.addr + " " + plain, want: "GET /path 0", dialed: fmt.Sprintf("app.test:%d", web.plain.Port)},
		{args: fmt.Sprintf("--socks5 %s --resolve app.test:%d:127.0.0.1 %s", w.addr, web.plain.Port, plain), want: "GET /path 0", dialed: web.plain.String()},
		{args: "-x socks5h://" + w.addr + " " + tls, want: "GET /path 0", dialed: web.tls.String()},
		{args: "-x http://" + w.addr + " " + plain + " --next -x http://" + w.addr + " -d body " + plain, want: "GET /path 0POST /path 4"},
		{args: "-x http://" + w.addr + " -T /usr/bin/env -H Expect:100-continue " + plain, want: "PUT /path "},
		{args: "-x http://" + w.addr + " " + tls, want: "GET /path 0", dialed: web.tls.String()},
		{args: "-x http://" + w.addr + " -p " + plain, want: "GET /path 0", dialed: fmt.Sprintf("app.test:%d", web.plain.Port)},
		{args: "-x http://" + w.addr + " --http1.0 " + plain, want: "GET /path 0"},
		{args: "-x socks5h://user:secret@" + locked.addr + " " + tls, want: "GET /path 0"},
		{args: "-x http://user:secret@" + locked.addr + " " + tls, want: "GET /path 0"},
		{args: "-x http://user:secret@" + locked.addr + " " + plain, want: "GET /path 0"},
		{args: "-x http://user:secret@" + locked.addr + " --proxy-anyauth " + tls, want: "GET /path 0"},
		{args: "-x http://user:secret@" + locked.addr + " --proxy-anyauth -d body " + plain, want: "POST /path 4"},
		{args: "-x socks5h://user:wrong@" + locked.addr + " " + tls, want: "User was rejected by the SOCKS5 server", code: 97},
		{args: "-x socks5h://" + locked.addr + " " + tls, want: "No authentication method was acceptable", code: 97},
		{args: "-x http://user:wrong@" + locked.addr + " " + tls, want: "407", code: 56},
		{args: "-f -x http://" + locked.addr + " " + plain, want: "407", code: 22},
		{args: "-x socks5h://" + w.addr + " http://nowhere.invalid/", want: "(4)", code: 97},
		{args: "-x socks5h://" + w.addr + " http://127.0.0.1:1/", want: "(5)", code: 97},
		{args: "-p -x http://" + w.addr + " http://127.0.0.1:1/", want: "502", code: 56},
		{args: "-f -x http://" + w.addr + " http://127.0.0.1:1/", want: "502", code: 22},
		{args: "-x socks4://" + w.addr + " " + tls, want: "SOCKS4", code: 97},
		{args: "-x https://" + w.addr + " " + tls, code: 35},
	} {
		args := append([]string{"-sS", "--max-time", "20", "--cacert", web.ca}, strings.Fields(tt.args)...)
		out, code := run(t, nil, "curl", args...)
		if code != tt.code || !strings.Contains(out, tt.want) {
			t.Errorf("curl %s: exit code %d, want %d; printed %q, want %q", tt.args, code, tt.code, out, tt.want)
		}
		if tt.dialed != "" && w.lastDialed() != tt.dialed {
			t.Errorf("curl %s: dialed %s, want %s", tt.args, w.lastDialed(), tt.dialed)
		}
	}
	// By the environment, as most programs are told.
	for variable, to := range map[string]string{"HTTPS_PROXY": tls, "http_proxy": plain, "ALL_PROXY": tls} {
		scheme := "http://"
		if variable == "ALL_PROXY" {
			scheme = "socks5h://"
		}
		out, code := run(t, []string{variable + "=" + scheme + "user:secret@" + locked.addr}, "curl", "-sS", "--cacert", web.ca, to)
		if code != 0 || out != "GET /path 0" {
			t.Errorf("curl with %s: exit code %d, printed %q", variable, code, out)
		}
	}
}

func TestProxychains(t *testing.T) {
	w := newWorld(t, func(w *world) { w.Authenticate = Credentials("user", "secret") })
	web := newWeb(t)
	host, port, _ := strings.Cut(w.addr, ":")
	for _, kind := range []string{"socks5", "http"} {
		conf := filepath.Join(t.TempDir(), "proxychains.conf")
		writeFile(t, conf, fmt.Sprintf("strict_chain\nproxy_dns\n[ProxyList]\n%s %s %s user secret\n", kind, host, port))
		for url, dialed := range map[string]string{
			fmt.Sprintf("http://app.test:%d/path", web.plain.Port): fmt.Sprintf("app.test:%d", web.plain.Port),
			fmt.Sprintf("https://%v/path", web.tls):                web.tls.String(),
		} {
			out, code := run(t, nil, "proxychains4", "-q", "-f", conf, "curl", "-sS", "--max-time", "20", "--cacert", web.ca, url)
			if code != 0 || out != "GET /path 0" || w.lastDialed() != dialed {
				t.Errorf("%s to %s: exit code %d, printed %q, dialed %s", kind, url, code, out, w.lastDialed())
			}
		}
	}
}

// socksify sends the datagrams of a program, too.
func TestSocksify(t *testing.T) {
	w := newWorld(t, func(w *world) { w.Authenticate = Credentials("user", "secret") })
	web, echo := newWeb(t), udpEcho(t, "127.0.0.1:0")
	host, port, _ := strings.Cut(w.addr, ":")
	conf := filepath.Join(t.TempDir(), "socks.conf")
	writeFile(t, conf, fmt.Sprintf(`resolveprotocol: fake
route {
	from: 0.0.0.0/0 to: 0.0.0.0/0 via: %s port = %s
	protocol: tcp udp
	proxyprotocol: socks_v5
	method: username
}
`, host, port))
	env := []string{"SOCKS_CONF=" + conf, "SOCKS_USERNAME=user", "SOCKS_PASSWORD=secret"}
	out, code := run(t, env, "socksify", "curl", "-sS", "--max-time", "20", fmt.Sprintf("http://app.test:%d/path", web.plain.Port))
	if want := fmt.Sprintf("app.test:%d", web.plain.Port); code != 0 || out != "GET /path 0" || w.lastDialed() != want {
		t.Errorf("exit code %d, printed %q, dialed %s", code, out, w.lastDialed())
	}
	const script = `
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(10)
for size in 1, 1200, 30000:
    s.sendto(b"x" * size, ("127.0.0.1", int(sys.argv[1])))
    data, _ = s.recvfrom(65536)
    print(len(data), end=" ")
`
	out, code = run(t, env, "socksify", "/usr/bin/python3", "-c", script, fmt.Sprint(echo.Port))
	if code != 0 || out != "1 1200 30000 " {
		t.Errorf("UDP: exit code %d, printed %q", code, out)
	}
}

func TestPythonSocks(t *testing.T) {
	w := newWorld(t, func(w *world) { w.Authenticate = Credentials("user", "secret") })
	web, echo := newWeb(t), udpEcho(t, "127.0.0.1:0")
	_, port, _ := strings.Cut(w.addr, ":")
	const script = `
import socket, socks, sys
port, web, echo = map(int, sys.argv[1:])
def proxied(kind, way):
    s = socks.socksocket(socket.AF_INET, kind)
    s.set_proxy(way, "127.0.0.1", port, True, "user", "secret")
    s.settimeout(10)
    return s
for way in socks.SOCKS5, socks.HTTP:
    s = proxied(socket.SOCK_STREAM, way)
    s.connect(("app.test", web))
    s.sendall(b"GET /path HTTP/1.0\r\n\r\n")
    print(s.makefile("rb").read().splitlines()[-1].decode())
    s.close()
s = proxied(socket.SOCK_DGRAM, socks.SOCKS5)
for size in 1, 1200, 65000:
    s.sendto(b"x" * size, ("app.test", echo))
    print(len(s.recvfrom(65536)[0]))
s.close()
try:
    proxied(socket.SOCK_STREAM, socks.SOCKS5).connect(("127.0.0.1", 1))
except socks.ProxyError as e:
    print(e)
`
	out, code := run(t, nil, "/usr/bin/python3", "-c", script, port, fmt.Sprint(web.plain.Port), fmt.Sprint(echo.Port))
	want := "GET /path 0\nGET /path 0\n1\n1200\n65000\nSocket error: 0x05: Connection refused\n"
	if code != 0 || out != want {
		t.Errorf("exit code %d, printed %q, want %q", code, out, want)
	}
}

func TestNetProxy(t *testing.T) {
	w := newWorld(t, func(w *world) { w.Authenticate = Credentials("user", "secret") })
	to := listen(t, "127.0.0.1:0", echo)
	for info, ok := range map[string]bool{"user:secret": true, "user:wrong": false} {
		u, err := url.Parse("socks5://" + info + "@" + w.addr)
		if err != nil {
			t.Fatal(err)
		}
		d, err := proxy.FromURL(u, proxy.Direct)
		if err != nil {
			t.Fatal(err)
		}
		c, err := d.Dial("tcp", fmt.Sprintf("app.test:%d", to.Port))
		if (err == nil) != ok {
			t.Errorf("%s: %v", info, err)
		}
		if err == nil {
			send(t, c, []byte("x"))
			expect(t, c, []byte("x"))
			c.Close()
		}
	}
}
