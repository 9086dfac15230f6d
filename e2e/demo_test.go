package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestDemo runs the program behind "make demo" to its end, and interrupts it.
func TestDemo(t *testing.T) {
	demo := filepath.Join(t.TempDir(), "demo")
	if out, err := exec.Command("go", "build", "-o", demo, "../internal/demo").CombinedOutput(); err != nil {
		t.Fatalf("build the demo: %v\n%s", err, out)
	}
	for _, tt := range []struct {
		name string
		stop os.Signal
		says []string
	}{
		{"to its end", nil, []string{"curl by IPv4", "curl by IPv6", "bare veth", " 0 in clear", "OK"}},
		{"interrupted", os.Interrupt, []string{"interrupted"}},
		{"terminated", syscall.SIGTERM, []string{"interrupted"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			temp := t.TempDir()
			var out bytes.Buffer
			// A copy of the binary, by whose name its processes are found again.
			mine := filepath.Join(t.TempDir(), "quicvpn")
			if err := os.Link(program, mine); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), demo, mine)
			cmd.Env = append(os.Environ(), "TMPDIR="+temp)
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if tt.stop != nil {
				// Both roles run when it is stopped.
				for deadline := time.Now().Add(30 * time.Second); len(running(t, mine)) < 2; time.Sleep(20 * time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatal("the demo does not start its roles")
					}
				}
				if err := cmd.Process.Signal(tt.stop); err != nil {
					t.Fatal(err)
				}
			}
			err := cmd.Wait()
			if (err == nil) != (tt.stop == nil) {
				t.Errorf("the demo ended with %v:\n%s", err, &out)
			}
			for _, say := range tt.says {
				if !strings.Contains(out.String(), say) {
					t.Errorf("the demo did not say %q:\n%s", say, &out)
				}
			}
			if left := running(t, mine); len(left) > 0 {
				t.Errorf("processes are left: %v", left)
			}
			if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
				t.Errorf("files are left: %v (%v)", left, err)
			}
		})
	}
}

// running returns the processes of a binary.
func running(t *testing.T, binary string) (pids []string) {
	t.Helper()
	exes, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, exe := range exes {
		if target, err := os.Readlink(exe); err == nil && target == binary {
			pids = append(pids, exe)
		}
	}
	return pids
}
