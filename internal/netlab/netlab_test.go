package netlab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestNamespaceIsSeparate(t *testing.T) {
	host, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	n := New(t).NS("one")
	if err := n.Do(func() error {
		inside, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		if inside == host {
			return fmt.Errorf("inside and outside are both %s", host)
		}
		ifaces, err := net.Interfaces()
		if err != nil {
			return err
		}
		if len(ifaces) != 1 || ifaces[0].Flags&net.FlagUp == 0 {
			return fmt.Errorf("interfaces %v, want loopback alone, up", ifaces)
		}
		devices, err := filepath.Glob("/sys/class/net/*")
		if err != nil || len(devices) != 1 {
			return fmt.Errorf("/sys/class/net has %v (%v), want one", devices, err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	// No thread of the process stays inside by accident.
	for range 4 * runtime.NumCPU() {
		got, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil || got != host {
			t.Fatalf("after Do a thread is in %s (%v), want %s", got, err, host)
		}
	}
}

func TestHost(t *testing.T) {
	ctx := testContext(t)
	want, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	host := New(t).Host()
	out, err := host.Command(ctx, "readlink", "/proc/self/ns/net").Output()
	if got := strings.TrimSpace(string(out)); err != nil || got != want {
		t.Errorf("a command is in %s (%v), want %s", got, err, want)
	}
	got := ""
	if err := host.Do(func() (err error) { got, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil || got != want {
		t.Errorf("a function is in %s (%v), want %s", got, err, want)
	}
}

func TestDoReturnsWhenTheFunctionExits(t *testing.T) {
	n := New(t).NS("one")
	if err := n.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("no error from a function that did not return")
	}
	want := errors.New("mine")
	if err := n.Do(func() error { return want }); err != want {
		t.Errorf("error %v, want %v", err, want)
	}
}

func TestCloseWaitsForDials(t *testing.T) {
	var client *NS
	dialled := make(chan error)
	err := Main(t.Context(), "lab", func(ctx context.Context, tb TB) {
		client = NewTopology(tb, LinkConfig{}).Client
		go func() {
			_, err := client.DialContext(context.WithoutCancel(ctx), "tcp", "203.0.113.99:80") // nobody answers
			dialled <- err
		}()
		time.Sleep(50 * time.Millisecond)
	})
	if err != nil {
		t.Error(err)
	}
	if err := <-dialled; !errors.Is(err, context.Canceled) && !strings.Contains(err.Error(), "canceled") {
		t.Errorf("the dial ended with %v, want that it was cancelled", err)
	}
	if err := client.Do(func() error { return nil }); !errors.Is(err, net.ErrClosed) {
		t.Errorf("enter a namespace of a closed lab: %v, want ErrClosed", err)
	}
}

func TestSysctlAndMountsStayInside(t *testing.T) {
	ctx := testContext(t)
	l := New(t)
	a, b := l.NS("a"), l.NS("b")
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	a.Sysctl("net.ipv4.ip_forward", "1")
	a.Replace("/etc/hosts", "127.0.0.9 only-here\n")
	a.Hide("/var")
	a.ReadOnly("/proc/sys")
	if err := a.Do(func() error { return writeSysctl("net.ipv4.ip_forward", "1") }); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write to a read-only sysctl: %v, want EROFS", err)
	}
	for _, tt := range []struct {
		ns             *NS
		forward, hosts string
		emptyVar       bool
	}{
		{a, "1\n", "127.0.0.9 only-here\n", true},
		{b, "0\n", string(hosts), false},
	} {
		out, err := tt.ns.Command(ctx, "cat", "/proc/sys/net/ipv4/ip_forward").Output()
		if err != nil || string(out) != tt.forward {
			t.Errorf("%s: forwarding %q (%v), want %q", tt.ns.Name, out, err, tt.forward)
		}
		hosts, err := tt.ns.Command(ctx, "cat", "/etc/hosts").Output()
		if err != nil || string(hosts) != tt.hosts {
			t.Errorf("%s: hosts %q (%v), want %q", tt.ns.Name, hosts, err, tt.hosts)
		}
		list, err := tt.ns.Command(ctx, "ls", "/var").Output()
		if err != nil || (len(list) == 0) != tt.emptyVar {
			t.Errorf("%s: /var has %q (%v), want empty %v", tt.ns.Name, list, err, tt.emptyVar)
		}
	}
}

func TestCommand(t *testing.T) {
	ctx := testContext(t)
	n := New(t).NS("one")

	t.Run("what it prints is kept", func(t *testing.T) {
		c := n.Start(ctx, "sh", "-c", "echo out; echo err >&2; exec sleep 60")
		if err := c.WaitLog(ctx, "err"); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff("out\nerr\n", c.Log()); diff != "" {
			t.Error(diff)
		}
		if err := c.Stop(5 * time.Second); err == nil || !strings.Contains(err.Error(), "terminated") {
			t.Errorf("stop: %v, want the signal", err)
		}
		if err := c.Stop(time.Second); err == nil {
			t.Error("a second stop forgot how the process ended")
		}
		c.Kill()
	})
	t.Run("a stubborn one is killed with its children", func(t *testing.T) {
		c := n.Start(ctx, "sh", "-c", "trap '' TERM; sleep 61 & echo $!; wait; wait; wait")
		if err := c.WaitLog(ctx, "\n"); err != nil {
			t.Fatal(err)
		}
		var child int
		if _, err := fmt.Sscan(c.Log(), &child); err != nil {
			t.Fatal(err)
		}
		if err := c.Stop(50 * time.Millisecond); err == nil || !strings.Contains(err.Error(), "did not end") {
			t.Errorf("stop: %v, want that it did not end", err)
		}
		deadline := time.Now().Add(30 * time.Second)
		for alive(child) {
			if time.Now().After(deadline) {
				t.Fatalf("child %d is still alive", child)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	t.Run("one that ends early is an error of WaitLog", func(t *testing.T) {
		c := n.Start(ctx, "sh", "-c", "echo good reason; exit 3")
		if err := c.WaitLog(ctx, "never"); err == nil || !strings.Contains(err.Error(), "good reason") {
			t.Errorf("error %v, want what the command printed", err)
		}
	})
}

// alive says whether a process runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestNothingOutlivesTheLab(t *testing.T) {
	before, err := Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	err = Main(t.Context(), "lab", func(ctx context.Context, tb TB) {
		top := NewTopology(tb, LinkConfig{})
		top.Internet.ServeHTTP(80)
		top.ClientIf.Capture()
		pid = top.Client.Start(ctx, "sleep", "62").Process.Pid
		tb.Fatalf("failure number %d", 7)
	})
	if err == nil || err.Error() != "failure number 7" {
		t.Errorf("error %v, want failure number 7", err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the command %d is still there (%v)", pid, err)
	}
	after, err := Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("descriptors left (-before +after):\n%s", diff)
	}
}

func TestMainCleansUpAfterPanic(t *testing.T) {
	var dir string
	err := Main(t.Context(), "lab", func(_ context.Context, tb TB) {
		dir = tb.TempDir()
		panic("boom")
	})
	if err == nil || !strings.Contains(err.Error(), "boom") {
		t.Errorf("error %v, want the panic", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the temporary directory is still there: %v", err)
	}
}
