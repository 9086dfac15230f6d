package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/quicvpn/quicvpn/gateway"
	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// binary is the command as users have it, built once for all tests.
var binary string

// stuckEnv makes the test binary a role that does not end by itself.
const stuckEnv = "QUICVPN_TEST_STUCK"

func TestMain(m *testing.M) {
	if os.Getenv(stuckEnv) != "" {
		serve(context.Background(), slog.New(slog.NewTextHandler(os.Stderr, nil)), stuck)
		os.Exit(exitOK)
	}
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "quicvpn-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "make a directory for the binary:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "quicvpn")
	build := exec.Command("go", "build", "-o", binary, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the binary: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// stuck is a role that does not heed its context.
func stuck(context.Context) error {
	fmt.Fprintln(os.Stderr, "stuck role runs")
	select {}
}

// result is what a process left.
type result struct {
	code           int
	stdout, stderr string
}

// quicvpn runs the binary with an environment of these variables alone.
func quicvpn(t *testing.T, env []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %v: %v", args, err)
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

func TestBadUsage(t *testing.T) {
	const secret = "qv1_c2VjcmV0" // damaged, so that it is an error that could repeat it
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		args string
		env  []string
		want string
	}{
		{args: "", want: `"quicvpn" needs a command: gateway, token, client, sidecar, healthcheck, driver, version, help; "quicvpn --help" explains them`},
		{args: "gatway run", want: `"quicvpn" has no command "gatway": it has gateway, token, client, sidecar, healthcheck, driver, version, help`},
		{args: "--verbose", want: `unknown flag --verbose; "quicvpn --help" lists the flags`},
		{args: "--log-format xml version", want: `--log-format: must be one of text, json; "quicvpn --help" lists the flags`},
		{args: "--log-level loud version", want: `--log-level: must be one of debug, info, warn, error; "quicvpn --help" lists the flags`},
		{args: "version", env: []string{"QUICVPN_LOG_LEVEL=loud"}, want: `QUICVPN_LOG_LEVEL: must be one of debug, info, warn, error`},
		{args: "version now", want: `unexpected argument "now"; "quicvpn version --help" shows how it is used`},
		{args: "help nothing", want: `"quicvpn" has no command "nothing": it has gateway, token, client, sidecar, healthcheck, driver, version, help`},
		{args: "help token nothing", want: `"quicvpn token" has no command "nothing": it has create, list, revoke`},
		{args: "help sidecar up", want: `unexpected argument "up"; "quicvpn sidecar --help" shows how it is used`},
		{args: "help --all", want: `unknown flag --all; "quicvpn help --help" lists the flags`},
		{args: "--version=maybe", want: `--version: must be true or false; "quicvpn --help" lists the flags`},
		{args: "--version sidecar", want: `unexpected argument "sidecar" after --version`},

		{args: "gateway", want: `"quicvpn gateway" needs a command: init, run; "quicvpn gateway --help" explains them`},
		{args: "gateway start", want: `"quicvpn gateway" has no command "start": it has init, run`},
		{args: "gateway init", want: `no address: give --address HOST:PORT, the name or IP address and the UDP port at which clients reach this gateway`},
		{args: "gateway init --address gw.example.com", want: `--address: not an address that clients can dial: write it as gw.example.com:443, 192.0.2.1:443 or [2001:db8::1]:443; "quicvpn gateway init --help" lists the flags`},
		{args: "gateway init --pool 10.1.2.3/16", want: `--pool: the address has bits beyond the prefix length: write the first address of the prefix; "quicvpn gateway init --help" lists the flags`},
		{args: "gateway init extra", want: `unexpected argument "extra"; "quicvpn gateway init --help" shows how it is used`},
		{args: "gateway run --mtu", want: `--mtu needs a value; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --mtu big", want: `--mtu: must be a whole number from 1280 to 1500, or 0 for the default; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --listen 443", want: `--listen: not an IP address and a port: write it as [::]:443, 0.0.0.0:443 or :443; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --interface a/b", want: `--interface: not a name for a TUN device: take 1 to 15 letters, digits, dots or dashes; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --interfaces a", want: `unknown flag --interfaces; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --dns 9.9.9.9 --dns resolver", want: `--dns: not the address of a name server: write it as 192.0.2.1, 192.0.2.1:5353, 2001:db8::1 or [2001:db8::1]:5353; or off; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --dns 9.9.9.9,off", want: `--dns off stands alone: name servers, or off`},
		{args: "gateway run now", want: `unexpected argument "now"; "quicvpn gateway run --help" shows how it is used`},
		{args: "gateway run", env: []string{"QUICVPN_QUEUES=many"}, want: `QUICVPN_QUEUES: must be a whole number from 1 to 256, or 0 for the default`},
		{args: "sidecar", env: []string{"QUICVPN_MTU=1000"}, want: `QUICVPN_MTU: must be a whole number from 1280 to 1500, or 0 for the default`},
		{args: "gateway run --mtu 1000", want: `--mtu: must be a whole number from 1280 to 1500, or 0 for the default; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --mtu 100000", want: `--mtu: must be a whole number from 1280 to 1500, or 0 for the default; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --queues 257", want: `--queues: must be a whole number from 1 to 256, or 0 for the default; "quicvpn gateway run --help" lists the flags`},
		{args: "gateway run --queues -1", want: `--queues: must be a whole number from 1 to 256, or 0 for the default; "quicvpn gateway run --help" lists the flags`},
		{args: "sidecar --mtu 1000", want: `--mtu: must be a whole number from 1280 to 1500, or 0 for the default; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --queues 257", want: `--queues: must be a whole number from 1 to 256, or 0 for the default; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --interface lo", want: `--interface: not a name for a TUN device: take 1 to 15 letters, digits, dots or dashes; "quicvpn sidecar --help" lists the flags`},
		{args: "token create --uses -1", want: `--uses: must be a whole number from 1 to 2147483647, or 0 for the default; "quicvpn token create --help" lists the flags`},
		{args: "gateway init --pool 10.91.0.0/31", want: `--pool: must be an IPv4 prefix from /8 to /30; "quicvpn gateway init --help" lists the flags`},
		{args: "gateway init --pool fd00::/24", want: `--pool: must be an IPv4 prefix from /8 to /30; "quicvpn gateway init --help" lists the flags`},
		{args: "gateway init --pool6 fd00::/127", want: `--pool6: must be an IPv6 prefix from /16 to /126; "quicvpn gateway init --help" lists the flags`},

		{args: "token", want: `"quicvpn token" needs a command: create, list, revoke; "quicvpn token --help" explains them`},
		{args: "client", want: `"quicvpn client" needs a command: list, remove; "quicvpn client --help" explains them`},
		{args: "client remove", want: `"quicvpn client remove" needs KEY|ADDRESS; "quicvpn client remove --help" shows how it is used`},
		{args: "client list --json=maybe", want: `--json: must be true or false; "quicvpn client list --help" lists the flags`},
		{args: "token create --allow 10.0.0.1", want: `--allow: not an address prefix: write it as 192.0.2.0/24 or 2001:db8::/32; "quicvpn token create --help" lists the flags`},
		{args: "token create --expires 1d", want: `--expires: not a time span: write it as 10s, 30m or 24h; "quicvpn token create --help" lists the flags`},
		{args: "token create --uses some", want: `--uses: must be a whole number from 1 to 2147483647, or 0 for the default; "quicvpn token create --help" lists the flags`},
		{args: "token create laptop", want: `unexpected argument "laptop"; "quicvpn token create --help" shows how it is used`},
		{args: "token list --json=maybe", want: `--json: must be true or false; "quicvpn token list --help" lists the flags`},
		{args: "token list all", want: `unexpected argument "all"; "quicvpn token list --help" shows how it is used`},
		{args: "token revoke", want: `"quicvpn token revoke" needs ID|NAME; "quicvpn token revoke --help" shows how it is used`},
		{args: "token revoke a b", want: `unexpected argument "b"; "quicvpn token revoke --help" shows how it is used`},
		{args: "token revoke a --state-dir /x", want: `put flags before "a": what follows an argument is not read as a flag`},

		{args: "sidecar", want: `no join token: give --token-file FILE, or the file as QUICVPN_TOKEN_FILE or /run/secrets/quicvpn_token; "quicvpn gateway init" and "quicvpn token create" print tokens`},
		{args: "sidecar --token " + secret, want: `--token: the join token is damaged or incomplete: copy it again; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --token-file " + file, want: `--token-file ` + file + `: the join token is damaged or incomplete: copy it again`},
		{args: "sidecar", env: []string{"QUICVPN_TOKEN_FILE=" + file}, want: `QUICVPN_TOKEN_FILE ` + file + `: the join token is damaged or incomplete: copy it again`},
		{args: "sidecar", env: []string{"QUICVPN_TOKEN=" + secret}, want: `QUICVPN_TOKEN: the join token is damaged or incomplete: copy it again`},
		{args: "sidecar", env: []string{"QUICVPN_TOKEN=" + secret, "QUICVPN_TOKEN_FILE=" + file}, want: `QUICVPN_TOKEN and QUICVPN_TOKEN_FILE are both set: unset one of them`},
		{args: "sidecar --token x --token-file x", want: `--token: the join token does not start with qv1_: copy all of the line that ` + "`quicvpn token create`" + ` printed; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --token-file /nowhere/token", want: `--token-file /nowhere/token: there is no such file: check the path`},
		{args: "sidecar --token-file /", want: `--token-file /: it is a directory (Docker makes one where the file to mount does not exist): check the path on the host`},
		{args: "sidecar --tun=off", want: `--tun=off leaves no way into the tunnel: give --socks5 127.0.0.1:1080, for programs that use a proxy`},
		{args: "sidecar --masque http://proxy.example.com", want: `--masque: not the URL of a proxy: write it as https://proxy.example.com:443 or https://USER:PASSWORD@proxy.example.com; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --masque https://proxy.example.com", want: "--masque carries no packets: give --tun=off as well, and --socks5 127.0.0.1:1080 for programs that use a proxy"},
		{args: "sidecar --masque https://proxy.example.com --tun off", want: "--tun=off leaves no way into the tunnel: give --socks5 127.0.0.1:1080, for programs that use a proxy"},
		{args: "sidecar --tcp-open late", want: `--tcp-open: must be one of auto, early, strict; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --tun=no", want: `--tun: must be one of on, off; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --socks5 1080", want: `--socks5: not an IP address and a port: write it as 127.0.0.1:1080, [::1]:1080 or, for all addresses, :1080; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --socks5 127.0.0.1:0", want: `--socks5: not an IP address and a port: write it as 127.0.0.1:1080, [::1]:1080 or, for all addresses, :1080; "quicvpn sidecar --help" lists the flags`},
		{args: "sidecar --socks5 127.0.0.1:1080 --socks5 :1080", want: `--socks5 [::]:1080 is not a loopback address, and everybody who reaches it could use the tunnel: give --proxy-credentials-file FILE, with USER:PASSWORD in it, or listen on 127.0.0.1:1080`},
		{args: "sidecar", env: []string{"QUICVPN_SOCKS5=192.0.2.1:1080,127.0.0.1:1080", "QUICVPN_PROXY_CREDENTIALS=" + secret}, want: `QUICVPN_PROXY_CREDENTIALS: line 1 is not USER:PASSWORD`},
		{args: "sidecar --proxy-credentials-file " + file, want: `--proxy-credentials-file ` + file + `: line 1 is not USER:PASSWORD`},
		{args: "sidecar --proxy-credentials-file /nowhere/users", want: `--proxy-credentials-file /nowhere/users: there is no such file: check the path`},
		{args: "sidecar --tun=off --socks5 127.0.0.1:1080 --resolv-conf", want: `--resolv-conf needs the TUN device: with --tun=off leave names to the proxy, by socks5h:// in place of socks5://`},
		{args: "sidecar", env: []string{"QUICVPN_RESOLV_CONF=yes"}, want: `QUICVPN_RESOLV_CONF: must be true or false`},
		{args: "healthcheck --timeout 0s", want: `--timeout: must be longer than 0; "quicvpn healthcheck --help" lists the flags`},
		{args: "healthcheck --timeout soon", want: `--timeout: not a time span: write it as 10s, 30m or 24h; "quicvpn healthcheck --help" lists the flags`},
		{args: "healthcheck now", want: `unexpected argument "now"; "quicvpn healthcheck --help" shows how it is used`},
		{args: "sidecar --token-file " + file + " up", want: `--token-file ` + file + `: the join token is damaged or incomplete: copy it again`},
	}
	for _, tt := range tests {
		t.Run(strings.Join(append(tt.env, tt.args), " "), func(t *testing.T) {
			got := quicvpn(t, tt.env, strings.Fields(tt.args)...)
			if want := (result{exitUsage, "", "quicvpn: " + tt.want + "\n"}); got != want {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
			if strings.Contains(got.stderr, secret) {
				t.Error("the error repeats the token")
			}
		})
	}
}

func TestHelp(t *testing.T) {
	for _, args := range []string{"--help", "-h", "help", "gateway --help", "gateway init --help", "gateway run -h",
		"token create --help", "token list --help", "token revoke --help", "client list --help", "client remove --help", "sidecar --help", "healthcheck --help", "version --help", "help --help"} {
		got := quicvpn(t, nil, strings.Fields(args)...)
		if got.code != exitOK || got.stderr != "" || !strings.Contains(got.stdout, "USAGE:") {
			t.Errorf("%s: %+v", args, got)
		}
	}
}

// TestHelpCommand compares "help COMMAND" with "COMMAND --help".
func TestHelpCommand(t *testing.T) {
	commands := []string{"", "gateway", "token", "client", "help"}
	for name := range leaves("", testApp().Commands) {
		commands = append(commands, name)
	}
	for _, name := range commands {
		args := strings.Fields(name)
		got := quicvpn(t, nil, append([]string{"help"}, args...)...)
		if want := quicvpn(t, nil, append(args, "--help")...); got != want || !strings.Contains(got.stdout, "USAGE:") {
			t.Errorf("help %s: got\n%+v\nwant\n%+v", name, got, want)
		}
	}
}

func TestVersion(t *testing.T) {
	got := quicvpn(t, nil, "version")
	if got.code != exitOK || got.stderr != "" {
		t.Fatalf("%+v", got)
	}
	for _, want := range []string{"quicvpn ", "\ngo go1.", "\nquic-go v0."} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("%q is not in %q", want, got.stdout)
		}
	}
	// Deployments have variables of that name for the version of an image.
	if flag := quicvpn(t, []string{"QUICVPN_VERSION=v1.2.3"}, "--version"); flag != got {
		t.Errorf("--version: got %+v, want %+v", flag, got)
	}
}

func TestPrintVersion(t *testing.T) {
	info := &debug.BuildInfo{
		Main: debug.Module{Version: "v1.2.3"},
		Deps: []*debug.Module{{Path: "github.com/quic-go/qpack", Version: "v0.6.0"}, {Path: "github.com/quic-go/quic-go", Version: "v0.65.0"}},
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"}},
	}
	goLine := fmt.Sprintf("go %s %s/%s\n", runtime.Version(), runtime.GOOS, runtime.GOARCH)
	for _, tt := range []struct {
		info *debug.BuildInfo
		want string
	}{
		{info, "quicvpn v1.2.3\ncommit abc 2026-01-02T03:04:05Z (modified)\n" + goLine + "quic-go v0.65.0\n"},
		{new(debug.BuildInfo), "quicvpn (unknown)\n" + goLine},
	} {
		var got strings.Builder
		if err := printVersion(&got, tt.info); err != nil || got.String() != tt.want {
			t.Errorf("error %v, got %q, want %q", err, got.String(), tt.want)
		}
	}
}

// TestTokens makes a gateway and goes through the life of its tokens.
func TestTokens(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gateway")
	env := []string{"QUICVPN_STATE_DIR=" + dir}

	fails(t, env, "quicvpn: list tokens: stat "+dir+": no such file or directory: run `quicvpn gateway init`, or name the directory where it was run",
		"token", "list")

	first := tokenOf(t, quicvpn(t, env, "gateway", "init", "--address", "gw.example.com:443"))
	if first.Address != "gw.example.com:443" {
		t.Errorf("the token names %s", first.Address)
	}
	fails(t, env, "quicvpn: init gateway: "+dir+" already holds a gateway's identity: make another join token with `quicvpn token create`, or choose another directory",
		"gateway", "init", "--address", "gw.example.com:443")

	// The values of a list: repeated, and with commas.
	second := tokenOf(t, quicvpn(t, env, "token", "create", "--name", "laptop", "--network", "office", "--uses", "2", "--expires", "24h",
		"--allow", "10.20.0.0/16,10.30.0.0/16", "--allow", "2001:db8::/32"))
	if second.Address != first.Address || second.Pin != first.Pin || second.Secret == first.Secret {
		t.Error("the second token is not one of the same gateway with a secret of its own")
	}
	fails(t, env, `quicvpn: create token: the network name "My Network" is not 1 to 63 of the characters a-z, 0-9 and -`,
		"token", "create", "--network", "My Network")

	rows := listTokens(t, env)
	want := []tokenRow{
		{Name: "first", Network: "default", State: "active"},
		{Name: "laptop", Network: "office", State: "active", Uses: 2, Allow: []netip.Prefix{
			netip.MustParsePrefix("10.20.0.0/16"), netip.MustParsePrefix("10.30.0.0/16"), netip.MustParsePrefix("2001:db8::/32")}},
	}
	ignore := cmpopts.IgnoreFields(tokenRow{}, "ID", "Created", "Expires")
	equate := cmpopts.EquateComparable(netip.Prefix{})
	if diff := cmp.Diff(want, rows, ignore, equate); diff != "" {
		t.Errorf("token list --json, -want +got:\n%s", diff)
	}
	if life := rows[1].Expires.Sub(rows[1].Created); !rows[0].Expires.IsZero() || life != 24*time.Hour {
		t.Errorf("the first token expires at %v, the second after %v", rows[0].Expires, life)
	}

	fails(t, env, "quicvpn: revoke token: there is no such token: `quicvpn token list` shows those that are", "token", "revoke", "tablet")
	got := quicvpn(t, env, "token", "revoke", "laptop")
	if want := (result{exitOK, "revoked " + rows[1].ID + " (laptop)\n", ""}); got != want {
		t.Errorf("token revoke: got %+v, want %+v", got, want)
	}
	if state := listTokens(t, env)[1].State; state != "revoked" {
		t.Errorf("after token revoke the state is %q", state)
	}
	table := quicvpn(t, env, "token", "list")
	wantTable := "ID        NAME    NETWORK  STATE    USED    EXPIRES               ALLOW\n" +
		rows[0].ID + "  first   default  active   0       never                 internet and network\n" +
		rows[1].ID + "  laptop  office   revoked  0 of 2  " + rows[1].Expires.Format(time.RFC3339) + "  10.20.0.0/16 10.30.0.0/16 2001:db8::/32\n"
	if want := (result{exitOK, wantTable, ""}); table != want {
		t.Errorf("token list:\n%s\nwant:\n%s", table.stdout, wantTable)
	}
}

// TestClients lists and removes clients of a gateway that does not run.
func TestClients(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gateway")
	env := []string{"QUICVPN_STATE_DIR=" + dir}
	fails(t, env, "quicvpn: list clients: stat "+dir+": no such file or directory: run `quicvpn gateway init`, or name the directory where it was run",
		"client", "list")
	first := tokenOf(t, quicvpn(t, env, "gateway", "init", "--address", "gw.example.com:443", "--pool6", "fd05::/64"))
	if got, want := quicvpn(t, env, "client", "list"), (result{exitOK, "KEY  TOKEN  NETWORK  ADDRESSES  BLOCK  SINCE\n", ""}); got != want {
		t.Errorf("client list: got %+v, want %+v", got, want)
	}
	state, err := gateway.OpenState(dir)
	if err != nil {
		t.Fatal(err)
	}
	since := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	keys := []tunnel.Fingerprint{{1, 2, 3}, {4, 5, 6}}
	for i, key := range keys {
		if _, err := state.Authorize(tunnel.Join{Client: key, Secret: first.SecretText(), Block: i == 1}, since); err != nil {
			t.Fatal(err)
		}
	}
	if err := state.Close(); err != nil {
		t.Fatal(err)
	}
	table := "KEY           TOKEN  NETWORK  ADDRESSES          BLOCK                          SINCE\n" +
		"AQIDAAAAAAAA  first  default  10.91.0.2 fd05::2  none                           2026-03-01T12:00:00Z\n" +
		"BAUGAAAAAAAA  first  default  10.91.0.3 fd05::3  10.91.254.0/24 fd05::fe00/120  2026-03-01T12:00:00Z\n"
	if got, want := quicvpn(t, env, "client", "list"), (result{exitOK, table, ""}); got != want {
		t.Errorf("client list:\n%s\nwant:\n%s", got.stdout, want.stdout)
	}
	fails(t, env, "quicvpn: remove client: there is no such client: `quicvpn client list` shows those that are", "client", "remove", "10.91.0.9")
	if got, want := quicvpn(t, env, "client", "remove", "10.91.0.2"), (result{exitOK, "removed " + keys[0].String() + " (first, 10.91.0.2)\n", ""}); got != want {
		t.Errorf("client remove: got %+v, want %+v", got, want)
	}
	got := quicvpn(t, env, "client", "list", "--json")
	var rows []clientRow
	if err := json.Unmarshal([]byte(got.stdout), &rows); err != nil {
		t.Fatalf("%+v: %v", got, err)
	}
	want := []clientRow{{Key: keys[1].String(), Token: "first", Network: "default",
		Addrs: []netip.Addr{netip.MustParseAddr("10.91.0.3"), netip.MustParseAddr("fd05::3")},
		Block: []netip.Prefix{netip.MustParsePrefix("10.91.254.0/24"), netip.MustParsePrefix("fd05::fe00/120")}, Since: since}}
	if diff := cmp.Diff(want, rows, cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); diff != "" {
		t.Errorf("client list --json, -want +got:\n%s", diff)
	}
}

// newToken returns a token of a gateway that nobody reaches.
func newToken(t *testing.T) string {
	t.Helper()
	tok, err := token.New("192.0.2.1:443", [32]byte{1})
	if err != nil {
		t.Fatal(err)
	}
	return tok.Encode()
}

// TestTokenInArguments warns of a token that ps shows, and of no other.
func TestTokenInArguments(t *testing.T) {
	const warning = "--token shows a secret to everybody who can run ps on this host: use --token-file"
	for _, tt := range []struct {
		name string
		warn bool
	}{{"argument", true}, {"variable", false}} {
		t.Run(tt.name, func(t *testing.T) {
			tok := newToken(t)
			args := []string{"sidecar", "--log-format", "json", "--state-dir", t.TempDir()}
			env := []string{"QUICVPN_TOKEN=" + tok}
			if tt.warn {
				args, env = append(args, "--token", tok), nil
			}
			c := netlab.New(t).NS("client").Command(t.Context(), binary, args...)
			c.Env = env
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			if err := c.WaitLog(t.Context(), "the namespace is set up"); err != nil {
				t.Fatal(err)
			}
			if err := c.Stop(30 * time.Second); err != nil {
				t.Error(err)
			}
			if strings.Contains(c.Log(), warning) != tt.warn || strings.Contains(c.Log(), tok) {
				t.Errorf("want the warning: %t, and never the token; the log is\n%s", tt.warn, c.Log())
			}
			for line := range strings.Lines(c.Log()) {
				if !json.Valid([]byte(line)) {
					t.Errorf("not JSON: %s", line)
				}
			}
		})
	}
}

// TestUnknownVariable warns of a setting that is misspelled, once.
func TestUnknownVariable(t *testing.T) {
	c := netlab.New(t).NS("host").Command(t.Context(), binary, "gateway", "run", "--state-dir", t.TempDir())
	c.Env = []string{"QUICVPN_LOGLEVEL=debug", "QUICVPN_LOG_LEVEL=warn", "QUICVPN_PORT=udp://10.0.0.1:443"}
	out, _ := c.CombinedOutput() // there is no identity
	log, _, _ := strings.Cut(string(out), "quicvpn: ")
	const want = `level=WARN msg="the variable is no setting of quicvpn" variable=QUICVPN_LOGLEVEL nearest=QUICVPN_LOG_LEVEL` + "\n"
	if strings.Count(log, "\n") != 1 || !strings.HasSuffix(log, want) {
		t.Errorf("the log is %q, want one line that ends in %q", log, want)
	}
}

// fails runs a command that must fail with a message of one line.
func fails(t *testing.T, env []string, message string, args ...string) {
	t.Helper()
	if got, want := quicvpn(t, env, args...), (result{exitFailure, "", message + "\n"}); got != want {
		t.Errorf("%s:\ngot  %+v\nwant %+v", strings.Join(args, " "), got, want)
	}
}

// tokenOf reads the token that a command has printed, alone on standard output.
func tokenOf(t *testing.T, r result) token.Token {
	t.Helper()
	text, ok := strings.CutSuffix(r.stdout, "\n")
	got, err := token.Parse(text)
	if r.code != exitOK || !ok || err != nil || got.Encode() != text {
		t.Fatalf("%+v is not the output of a token: %v", r, err)
	}
	if !strings.Contains(r.stderr, "quicvpn sidecar --token-file FILE") || strings.Contains(r.stderr, text) {
		t.Errorf("standard error does not explain the token, or repeats it: %s", r.stderr)
	}
	return got
}

func listTokens(t *testing.T, env []string) (rows []tokenRow) {
	t.Helper()
	got := quicvpn(t, env, "token", "list", "--json")
	if err := json.Unmarshal([]byte(got.stdout), &rows); err != nil || got.code != exitOK || got.stderr != "" {
		t.Fatalf("token list --json: %v: %+v", err, got)
	}
	return rows
}

func TestTokenStates(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	tests := []struct {
		info gateway.TokenInfo
		want string
	}{
		{gateway.TokenInfo{}, "active"},
		{gateway.TokenInfo{Expires: now.Add(time.Second), Uses: 2, Used: 1}, "active"},
		{gateway.TokenInfo{Expires: now}, "expired"},
		{gateway.TokenInfo{Uses: 1, Used: 1}, "used up"},
		{gateway.TokenInfo{Uses: 1, Used: 1, Expires: now, Revoked: now}, "revoked"},
	}
	for _, tt := range tests {
		if got := newTokenRow(tt.info, now).State; got != tt.want {
			t.Errorf("%+v: state %q, want %q", tt.info, got, tt.want)
		}
	}
}

// TestSecondSignal ends a role that does not heed the first.
func TestSecondSignal(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), stuckEnv+"=1")
			stderr, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(stderr)
			for _, want := range []string{"stuck role runs", "stopping; a second signal stops at once"} {
				if !lines.Scan() || !strings.Contains(lines.Text(), want) {
					t.Fatalf("the log says %q, want %q", lines.Text(), want)
				}
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
			}
			err = cmd.Wait()
			if status := cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != sig {
				t.Errorf("it ended with %v, want by %v", err, sig)
			}
		})
	}
}

// TestSecrets reads a container's secret where containers have them.
func TestSecrets(t *testing.T) {
	ns := netlab.New(t).NS("client")
	ns.Hide("/run")
	err := ns.Do(func() error {
		if err := os.Mkdir("/run/secrets", 0o755); err != nil {
			return err
		}
		return os.WriteFile("/run/secrets/quicvpn_token", []byte("not a token"), 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := ns.Command(t.Context(), binary, "sidecar").CombinedOutput()
	want := "quicvpn: secret /run/secrets/quicvpn_token: the join token does not start with qv1_: copy all of the line that `quicvpn token create` printed\n"
	if string(out) != want {
		t.Errorf("error %v, output %q, want %q", err, out, want)
	}
}
