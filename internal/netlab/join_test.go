package netlab

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestJoin(t *testing.T) {
	ctx := testContext(t)
	n := New(t).NS("host")
	first := n.Command(ctx, "sh", "-c", "mount -t proc proc /proc && mount -t tmpfs none /mnt && echo here >/mnt/file && echo ready && exec sleep 63")
	first.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	if err := first.WaitLog(ctx, "ready"); err != nil {
		t.Fatal(err)
	}
	joined, leave, err := n.Join("inside", first.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	out, err := joined.Command(ctx, "sh", "-c", "cat /mnt/file /proc/1/comm; readlink /proc/self/ns/net").Output()
	if err != nil {
		t.Fatal(err)
	}
	wantNet := ""
	if err := n.Do(func() (err error) { wantNet, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Fields(string(out)), []string{"here", "sleep", wantNet}; strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("a command inside sees %q, want %q", got, want)
	}
	if err := joined.Do(func() error { _, err := os.Stat("/mnt/file"); return err }); err != nil {
		t.Errorf("a function inside: %v", err)
	}
	second := joined.Start(ctx, "sleep", "64")
	first.Kill() // and with it all in its PID namespace
	select {
	case <-second.Done():
	case <-time.After(30 * time.Second):
		t.Error("a command outlives the first process of its PID namespace")
	}
	leave()
	leave()
	if err := joined.Command(ctx, "true").Run(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a command after leave: %v, want ErrClosed", err)
	}
	if _, _, err := n.Join("gone", first.Process.Pid); err == nil {
		t.Error("no error for a process that is gone")
	}
}
