package docker

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// TestDemo runs the program behind "make demo-docker": to its end, interrupted,
// and where it can do nothing. It never leaves anything behind.
func TestDemo(t *testing.T) {
	t.Parallel()
	demo := filepath.Join(t.TempDir(), "demo")
	build := exec.Command("go", "build", "-o", demo, "../../internal/demo")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the demo: %v\n%s", err, out)
	}
	e := dockerlab.Start(t, netlab.New(t).NS("host"), dockerlab.Config{})
	other := func(t *testing.T, state string) *netlab.Cmd {
		t.Helper()
		c := e.Start(context.Background(), program, "driver", "--state-dir", state)
		if err := c.WaitLog(context.Background(), "the driver is up"); err != nil {
			t.Fatal(err)
		}
		return c
	}
	for _, tt := range []struct {
		name string
		// once is what the demo has printed when all its processes get a signal.
		once   string
		signal syscall.Signal
		engine string // DOCKER_HOST
		before func(t *testing.T)
		code   int
		says   []string
	}{
		{name: "to its end", says: []string{"one interface, eth0: tuntap", "the gateway\n", " Gbit/s ", " in clear, the gateway's own aside: 0\n", "OK, in "}},
		{name: "interrupted early", once: "2 internet", signal: syscall.SIGINT, code: 130, says: []string{"interrupted; nothing was left"}},
		{name: "interrupted late", once: "7 inside user", signal: syscall.SIGINT, code: 130, says: []string{"interrupted; nothing was left"}},
		{name: "terminated", once: "6 containers", signal: syscall.SIGTERM, code: 130, says: []string{"interrupted; nothing was left"}},
		{name: "no engine", engine: "unix:///run/none.sock", code: 1, says: []string{"no Docker Engine", "apt-get install docker.io", "systemctl start docker"}},
		{name: "engine elsewhere", engine: "tcp://192.0.2.1:2375", code: 1, says: []string{"is on another machine", "unset DOCKER_HOST"}},
		{name: "another driver", code: 1, says: []string{"a quicvpn driver already runs"}, before: func(t *testing.T) {
			c := other(t, t.TempDir())
			t.Cleanup(c.Kill)
		}},
		{name: "another driver's networks", code: 1, says: []string{"networks of a quicvpn driver", "(theirs)"}, before: func(t *testing.T) {
			state := t.TempDir()
			c := other(t, state)
			e.Docker(t.Context(), "network", "create", "-d", "quicvpn", "--internal", "theirs")
			c.Kill()
			t.Cleanup(func() {
				c := other(t, state)
				e.Docker(context.Background(), "network", "rm", "theirs")
				c.Kill()
			})
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.before != nil {
				tt.before(t)
			}
			before := remains(t, e)
			temp := t.TempDir()
			c := e.Command(t.Context(), demo, "-docker", dockerlab.Toolbox(t), program)
			c.Env = append(c.Env, "TMPDIR="+temp)
			if tt.engine != "" {
				c.Env = append(c.Env, "DOCKER_HOST="+tt.engine)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			if tt.once != "" {
				if err := c.WaitLog(t.Context(), tt.once); err != nil {
					t.Fatal(err)
				}
				// As a terminal does it.
				if err := syscall.Kill(-c.Process.Pid, tt.signal); err != nil {
					t.Fatal(err)
				}
			}
			_ = c.Wait() // the code says more
			if code := c.ProcessState.ExitCode(); code != tt.code {
				t.Errorf("exit code %d, want %d:\n%s", code, tt.code, c.Log())
			}
			for _, say := range tt.says {
				if !strings.Contains(c.Log(), say) {
					t.Errorf("it did not say %q:\n%s", say, c.Log())
				}
			}
			if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
				t.Errorf("files are left: %v (%v)", left, err)
			}
			if diff := cmp.Diff(before, remains(t, e)); diff != "" {
				t.Errorf("something is left:\n%s", diff)
			}
		})
	}
}

// remains are what a demo could leave on a Docker host.
func remains(t *testing.T, e *dockerlab.Engine) map[string]string {
	t.Helper()
	found := map[string]string{"network": strings.Join(e.NS().Snapshot(), "\n")}
	for _, command := range []string{"ps -aq", "network ls -q", "volume ls -q", "images -aq"} {
		found[command] = e.Docker(t.Context(), strings.Fields(command)...)
	}
	sockets, err := filepath.Glob(e.Path("/run/docker/plugins/*.sock"))
	if err != nil {
		t.Fatal(err)
	}
	found["sockets"] = strings.Join(sockets, "\n")
	found["processes"] = strings.Join(processes(t, e), "\n")
	return found
}

// processes are the programs of ours that run on a Docker host.
func processes(t *testing.T, e *dockerlab.Engine) (ours []string) {
	t.Helper()
	all, err := filepath.Glob(e.Path("/proc") + "/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	running := 0
	for _, link := range all {
		program, err := os.Readlink(link)
		if err != nil {
			continue // it has ended meanwhile
		}
		running++
		if name := filepath.Base(program); name == "quicvpn" || name == "demo" {
			ours = append(ours, program)
		}
	}
	if running == 0 {
		t.Fatal("the host shows no processes, not even its engine's")
	}
	slices.Sort(ours)
	return ours
}
