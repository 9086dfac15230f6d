package dockerlab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/quicvpn/quicvpn/internal/netlab"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// serve runs a container with the toolbox's servers and returns its address.
func serve(ctx context.Context, e *Engine, name string, args ...string) netip.Addr {
	e.tb.Helper()
	args = append([]string{"run", "--detach", "--name", name}, args...)
	e.Docker(ctx, append(args, e.ScratchImage(ctx), "serve")...)
	addr, err := netip.ParseAddr(e.Docker(ctx, "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", name))
	e.check(err)
	e.check(e.NS().WaitReady(ctx, netip.AddrPortFrom(addr, 80)))
	return addr
}

func TestToolboxOnABridge(t *testing.T) {
	ctx := testContext(t)
	e := Start(t, netlab.New(t).NS("host"), Config{})
	e.Docker(ctx, "network", "create", "--ipv6", "--subnet", "192.0.2.0/24", "--subnet", "2001:db8::/64", "net")
	serve(ctx, e, "web", "--network", "net", "--ip", "192.0.2.80", "--ip6", "2001:db8::80")
	serve(ctx, e, "user", "--network", "net", "--ip", "192.0.2.90")
	for _, tt := range []struct {
		args string
		want string // a part of the answer
	}{
		{"get http://192.0.2.80/", "192.0.2.90"},
		{"get -interface eth0 http://192.0.2.80/bytes/5", "\x00\x00\x00\x00\x00"},
		{"echo udp web:7 hello", "hello"},
		{"echo tcp [2001:db8::80]:7 hello", "hello"},
		{"chat web:7 100ms", `"Lines":`},
		{"resolve web", "192.0.2.80\n2001:db8::80"},
		{"ping 192.0.2.80", ""},
		{"ping 2001:db8::80", ""},
	} {
		out, err := e.TryDocker(ctx, append([]string{"exec", "user", "/toolbox"}, strings.Fields(tt.args)...)...)
		if err != nil || !strings.Contains(out, tt.want) {
			t.Errorf("%s: %q (%v), want %q in it", tt.args, out, err, tt.want)
		}
	}
	for _, tt := range []struct{ args, want string }{
		{"exec user /toolbox", "usage: toolbox"},
		{"exec user /toolbox ping 192.0.2.99", "no answer from 192.0.2.99"},
		{"exec user /toolbox get http://web/nowhere", "404"},
		{"run --network nobodys " + scratchName, "network nobodys not found"},
	} {
		if _, err := e.TryDocker(ctx, strings.Fields(tt.args)...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want %q in it", tt.args, err, tt.want)
		}
	}
	if _, err := os.Stat(e.Sandbox(ctx, "web")); err != nil {
		t.Error(err)
	}
}

func TestTwoEnginesAtOnce(t *testing.T) {
	ctx := testContext(t)
	top := netlab.NewTopology(t, netlab.LinkConfig{})
	top.Internet.ServeHTTP(80)
	second, _ := top.AddClient("second", netlab.LinkConfig{})
	engines := []*Engine{Start(t, top.Client, Config{}), Start(t, second.NS, Config{ResolvConf: "nameserver 192.0.2.53\n"})}
	for i, e := range engines {
		serve(ctx, e, "same-name")
		got := e.Docker(ctx, "exec", "same-name", "/toolbox", "get", "http://203.0.113.10/")
		if want := netlab.Page + []string{"192.0.2.2", "192.0.2.18"}[i]; got != want {
			t.Errorf("engine %d: page %q, want %q", i, got, want)
		}
		if got := e.Docker(ctx, "ps", "--quiet"); strings.Contains(got, "\n") {
			t.Errorf("engine %d: containers %q, want one", i, got)
		}
		resolv, err := os.ReadFile(e.Path("/etc/resolv.conf"))
		if want := e.cfg.ResolvConf; err != nil || string(resolv) != want {
			t.Errorf("engine %d: resolv.conf %q (%v), want %q", i, resolv, err, want)
		}
	}
}

func TestDaemonStopsAndStarts(t *testing.T) {
	for _, liveRestore := range []bool{false, true} {
		t.Run(fmt.Sprintf("live restore %t", liveRestore), func(t *testing.T) {
			ctx := testContext(t)
			e := Start(t, netlab.New(t).NS("host"), Config{LiveRestore: liveRestore})
			web := netip.AddrPortFrom(serve(ctx, e, "web"), 80)
			running := func() string {
				return e.Docker(ctx, "inspect", "--format", "{{.State.Running}} {{.State.StartedAt}}", "web")
			}
			was := running()

			e.Kill()
			if err := e.NS().WaitReady(ctx, web); err != nil {
				t.Errorf("the container does not outlive a killed daemon: %v", err)
			}
			if _, err := e.TryDocker(ctx, "ps"); err == nil || !strings.Contains(err.Error(), "Is the docker daemon running?") {
				t.Errorf("docker ps without a daemon: %v", err)
			}
			e.StartAgain()
			if is := running(); (is == was) != liveRestore {
				t.Errorf("the container went from %q to %q when the daemon was killed and started", was, is)
			}
			e.Docker(ctx, "start", "web")

			e.Stop()
			_, err := e.NS().DialContext(ctx, "tcp", web.String())
			if (err == nil) != liveRestore {
				t.Errorf("connect to the container after a stop: %v", err)
			}
			e.StartAgain()
			if is := running(); strings.HasPrefix(is, "true") != liveRestore {
				t.Errorf("after a stop and a start the container is %q", is)
			}
		})
	}
}

func TestReboot(t *testing.T) {
	ctx := testContext(t)
	ns := netlab.New(t).NS("host")
	ns.Nft("table inet mine {}")
	before := ns.Snapshot()
	e := Start(t, ns, Config{})
	serve(ctx, e, "always", "--restart", "always")
	serve(ctx, e, "never")
	on := func(script string) string {
		t.Helper()
		c := e.Command(ctx, "sh", "-c", script)
		out, err := c.Output()
		if err != nil {
			t.Fatalf("%s: %v: %s", script, err, c.Log())
		}
		return strings.TrimSpace(string(out))
	}
	on("ip link add left type bridge && nft add table inet left && echo >/run/left")
	on("ip rule add to 192.0.2.1 table 7 && ip -6 rule add to 2001:db8::1 table 7 && ip route add 192.0.2.1 dev lo table 7 && ip route add blackhole 192.0.2.2")
	boot := on("cat /proc/sys/kernel/random/boot_id")
	if len(boot) != 36 {
		t.Errorf("boot id %q", boot)
	}
	driver := e.Start(ctx, "sleep", "65")

	e.PowerOff()
	select {
	case <-driver.Done():
	case <-time.After(30 * time.Second):
		t.Error("a process outlives the host's power")
	}
	e.PowerOff()
	e.PowerOn()
	if diff := before.Diff(ns.Snapshot()); diff != "" {
		t.Errorf("the network after power on is not as it was:\n%s", diff)
	}
	early := e.Start(ctx, "sh", "-c", "test ! -e /run/left && exec sleep 66") // as a driver that is there before the daemon
	e.StartAgain()
	if again := on("cat /proc/sys/kernel/random/boot_id"); again == boot || len(again) != 36 {
		t.Errorf("boot id %q after %q", again, boot)
	}
	if got := e.Docker(ctx, "ps", "--format", "{{.Names}}"); got != "always" {
		t.Errorf("containers %q run after a reboot, want always", got)
	}
	select {
	case <-early.Done():
		t.Errorf("what started before the daemon ended: %v", early.Wait())
	default:
	}
}

func TestNothingIsLeft(t *testing.T) {
	mounts := func() string {
		t.Helper()
		m, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return string(m)
	}
	descriptors := func() []string {
		t.Helper()
		d, err := netlab.Descriptors(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	mountsBefore, descriptorsBefore := mounts(), descriptors()
	var namespaces []string // of the host and of a container
	var dir, cgroup string
	err := netlab.Main(t.Context(), "lab", func(ctx context.Context, tb netlab.TB) {
		e := Start(tb, netlab.New(tb).NS("host"), Config{})
		serve(ctx, e, "web")
		dir, cgroup = e.dir, e.cgroup
		state, err := strconv.Atoi(e.Docker(ctx, "inspect", "--format", "{{.State.Pid}}", "web"))
		e.check(err)
		for _, process := range []string{"proc/1", fmt.Sprintf("proc/%d", state)} {
			for _, kind := range []string{"mnt", "net", "pid"} {
				ns, err := os.Readlink(e.Path(process + "/ns/" + kind))
				e.check(err)
				namespaces = append(namespaces, ns)
			}
		}
		if found := cgroups(t, cgroup); len(found) == 0 {
			t.Error("the container has no control group of the engine's")
		}
		tb.Fatalf("failed on purpose")
	})
	if err == nil || err.Error() != "failed on purpose" {
		t.Errorf("error %v", err)
	}
	links, err := filepath.Glob("/proc/[0-9]*/ns/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if ns, err := os.Readlink(l); err == nil && slices.Contains(namespaces, ns) && !strings.Contains(l, fmt.Sprintf("/%d/", os.Getpid())) {
			t.Errorf("%s is still %s", l, ns)
		}
	}
	if found := cgroups(t, cgroup); len(found) > 0 {
		t.Errorf("control groups are left: %q", found)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the data directory is left (%v)", err)
	}
	if diff := cmp.Diff(mountsBefore, mounts()); diff != "" {
		t.Errorf("mounts changed:\n%s", diff)
	}
	if diff := cmp.Diff(descriptorsBefore, descriptors()); diff != "" {
		t.Errorf("descriptors changed:\n%s", diff)
	}
}

func cgroups(t *testing.T, name string) []string {
	t.Helper()
	found, err := filepath.Glob("/sys/fs/cgroup/*/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestDaemonThatDoesNotStart(t *testing.T) {
	err := netlab.Main(t.Context(), "lab", func(ctx context.Context, tb netlab.TB) {
		Start(tb, netlab.New(tb).NS("host"), Config{Flags: []string{"--storage-driver=none-such"}})
	})
	if err == nil || !strings.Contains(err.Error(), "dockerd ended (exit status 1) before it was ready") {
		t.Errorf("error %v", err)
	}
}

func TestDebianAndCompose(t *testing.T) {
	// On a new machine both take minutes to make.
	compose := Compose(t)
	if _, err := debian(); err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	e := Start(t, netlab.New(t).NS("host"), Config{})
	file := filepath.Join(t.TempDir(), "compose.yaml")
	err := os.WriteFile(file, []byte(`services:
  db:
    image: `+e.DebianImage(ctx)+`
    command: [pg_ctlcluster, --foreground, "15", main, start]
    healthcheck: {test: [CMD, pg_isready], interval: 200ms}
  app:
    image: `+debianName+`
    command: [psql, --host=db, --username=postgres, --tuples-only, --command=SELECT 6 * 7]
    depends_on: {db: {condition: service_healthy}}
`), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	up := e.Command(ctx, compose, "--file", file, "up", "--no-color", "--exit-code-from", "app")
	if out, err := up.CombinedOutput(); err != nil || !strings.Contains(string(out), "42") {
		t.Errorf("compose up: %v\n%s", err, out)
	}
	for _, program := range []string{"curl", "ping", "ip"} {
		e.Docker(ctx, "run", "--rm", debianName, program, "-V")
	}
}
