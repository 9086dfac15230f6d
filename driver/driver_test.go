package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a driver in a network namespace of its own and returns a function
// that calls it as the engine does.
func start(t *testing.T, cfg Config) (call func(path, body string) (status int, answer string)) {
	t.Helper()
	if cfg.StateDir == "" {
		cfg.StateDir = t.TempDir()
	}
	cfg.PluginDir = t.TempDir()
	var d *Driver
	if err := netlab.New(t).NS("host").Do(func() (err error) { d, err = New(cfg); return err }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(cfg.PluginDir, "quicvpn.sock"))
	}}}
	return func(path, body string) (int, string) {
		t.Helper()
		r, err := client.Post("http://driver/"+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(bytes.TrimSpace(b))
	}
}

// What the engine, or somebody in its place, may send.
func TestCalls(t *testing.T) {
	call := start(t, Config{})
	const (
		id      = "0123456789abcdef"
		network = `{"NetworkID":"` + id + `"`
		ok      = http.StatusOK
		refused = http.StatusInternalServerError
	)
	for _, tt := range []struct {
		path, body string
		status     int
		want       string // in the answer
	}{
		{"Plugin.Activate", "", ok, `{"Implements": ["NetworkDriver"]}`},
		{"NetworkDriver.GetCapabilities", "", ok, `"Scope":"local"`},
		{"NetworkDriver.DiscoverNew", `{"DiscoveryType":1}`, ok, `{}`},
		{"NetworkDriver.CreateNetwork", "", refused, "try again"},
		{"NetworkDriver.CreateNetwork", "{", refused, "read the engine's call"},
		{"NetworkDriver.CreateNetwork", `[]`, refused, "read the engine's call"},
		{"NetworkDriver.CreateNetwork", `{"NetworkID":"../../etc"}`, refused, "only a to z"},
		{"NetworkDriver.CreateNetwork", `{"NetworkID":"` + strings.Repeat("a", 65) + `"}`, refused, "at most 64"},
		{"NetworkDriver.CreateNetwork", network + `}`, refused, "no join token"},
		{"NetworkDriver.CreateNetwork", network + `,"Options":{"com.docker.network.internal":true},"IPv4Data":[{"Pool":"nonsense"}]}`, refused, "address range"},
		{"NetworkDriver.CreateNetwork", network + `,"Options":{"com.docker.network.internal":true},"IPv4Data":[{"Pool":"224.0.0.0/24"}]}`, refused, "has no addresses for containers"},
		{"NetworkDriver.CreateNetwork", network + `,"Options":{"com.docker.network.internal":true},"IPv4Data":[{"Pool":"127.3.0.0/24"}]}`, refused, "has no addresses for containers"},
		{"NetworkDriver.CreateNetwork", network + `,"Options":{"com.docker.network.internal":true},"IPv6Data":[{"Pool":"fe80::/64"}]}`, refused, "has no addresses for containers"},
		{"NetworkDriver.CreateNetwork", network + `,"Options":{"com.docker.network.internal":true},"IPv4Data":[{"Pool":"172.30.0.0/24","Gateway":"172.31.0.1/24"}]}`, refused, "is not in its subnet"},
		{"NetworkDriver.DeleteNetwork", network + `}`, ok, `{}`}, // of a network that never was
		{"NetworkDriver.CreateEndpoint", network + `,"EndpointID":"e1"}`, refused, "does not know network"},
		{"NetworkDriver.CreateNetwork", network + `,"Options":{"com.docker.network.internal":true},"IPv4Data":[{"Pool":"172.30.0.0/24","Gateway":"172.30.0.1/24"}]}`, ok, `{}`},
		{"NetworkDriver.CreateNetwork", network + `,"Options":{"com.docker.network.internal":true},"IPv4Data":[{"Pool":"172.30.0.0/24"}]}`, refused, "is there already"},
		{"NetworkDriver.CreateEndpoint", network + `}`, refused, "try again"},
		{"NetworkDriver.CreateEndpoint", network + `,"EndpointID":"e1","Interface":{"Address":"172.30.0.2"}}`, refused, "the container's address"},
		{"NetworkDriver.CreateEndpoint", network + `,"EndpointID":"e1","Interface":{"Address":"172.30.0.2/24","MacAddress":"02:00:00:00:00:01"}}`, refused, "no MAC address"},
		{"NetworkDriver.CreateEndpoint", network + `,"EndpointID":"e1","Interface":{"Address":"172.30.0.2/24"},"Options":{"token":"x"}}`, refused, "option token"},
		{"NetworkDriver.CreateEndpoint", network + `,"EndpointID":"e1","Interface":{"Address":"172.30.0.2/24"}}`, ok, `{"Interface":{}}`},
		{"NetworkDriver.CreateEndpoint", network + `,"EndpointID":"e1","Interface":{"Address":"172.30.0.2/24"}}`, ok, `{"Interface":{}}`}, // again
		{"NetworkDriver.Join", network + `,"EndpointID":"e2","SandboxKey":"/nowhere"}`, refused, "does not know endpoint"},
		{"NetworkDriver.ProgramExternalConnectivity", network + `,"EndpointID":"e1","Options":{"com.docker.network.portmap":7}}`, refused, "port map"},
		{"NetworkDriver.EndpointOperInfo", network + `,"EndpointID":"e1"}`, ok, `{"Value":{}}`},
		{"NetworkDriver.RevokeExternalConnectivity", network + `,"EndpointID":"e1"}`, ok, `{}`},
		{"NetworkDriver.Leave", network + `,"EndpointID":"e1"}`, ok, `{}`},
		{"NetworkDriver.Leave", network + `,"EndpointID":"e9"}`, ok, `{}`},
		{"NetworkDriver.DeleteEndpoint", network + `,"EndpointID":"e1"}`, ok, `{}`},
		{"NetworkDriver.DeleteEndpoint", network + `,"EndpointID":"e1"}`, ok, `{}`},
		{"NetworkDriver.DeleteNetwork", network + `}`, ok, `{}`},
		{"NetworkDriver.DeleteEndpoint", network + `,"EndpointID":"e1"}`, ok, `{}`}, // of a network that is gone
		{"NetworkDriver.Unheard", network + `}`, http.StatusNotFound, ""},
	} {
		status, answer := call(tt.path, tt.body)
		if status != tt.status || !strings.Contains(answer, tt.want) {
			t.Errorf("%s %s: %d %s, want %d and %q", tt.path, tt.body, status, answer, tt.status, tt.want)
		}
		var e struct{ Err string }
		if status == refused && (json.Unmarshal([]byte(answer), &e) != nil || e.Err == "") {
			t.Errorf("%s %s: the engine cannot read the error %s", tt.path, tt.body, answer)
		}
	}
}

// A state directory, and a socket, are one driver's.
func TestOneDriver(t *testing.T) {
	dir := t.TempDir()
	start(t, Config{StateDir: dir})
	_, err := New(Config{StateDir: dir, PluginDir: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "another driver runs with the state directory "+dir) {
		t.Errorf("a second driver: %v", err)
	}
	plugins := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(plugins, "quicvpn.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := New(Config{StateDir: t.TempDir(), PluginDir: plugins}); err == nil || !strings.Contains(err.Error(), "another driver answers on") {
		t.Errorf("with another's socket: %v", err)
	}
}

// A socket of a run that was killed is no hindrance; a network that cannot be
// used does not hold up the others.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"cut", "empty"} {
		if err := os.MkdirAll(filepath.Join(dir, "networks", name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(dir, "networks", "cut", recordFile), `{"Version":1,`)
	call := start(t, Config{StateDir: dir})
	if _, answer := call("NetworkDriver.CreateEndpoint", `{"NetworkID":"cut","EndpointID":"e1"}`); !strings.Contains(answer, "is damaged") {
		t.Errorf("a damaged network: %s", answer)
	}
	if _, answer := call("NetworkDriver.CreateEndpoint", `{"NetworkID":"empty","EndpointID":"e1"}`); !strings.Contains(answer, "does not know network") {
		t.Errorf("a network without a record: %s", answer)
	}
	if status, answer := call("NetworkDriver.DeleteNetwork", `{"NetworkID":"cut"}`); status != http.StatusOK {
		t.Errorf("to remove the damaged one: %s", answer)
	}
	if _, err := os.Stat(filepath.Join(dir, "networks", "cut")); !os.IsNotExist(err) {
		t.Errorf("what was removed is still there: %v", err)
	}
}
