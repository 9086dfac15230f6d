package nsenter

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestDo(t *testing.T) {
	ns := netlab.New(t).NS("there")
	c := ns.Start(t.Context(), "sleep", "60")
	path := fmt.Sprintf("/proc/%d/ns/net", c.Process.Pid)
	self := func() string {
		link, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Error(err)
		}
		return link
	}
	here, there := self(), ""
	var l net.Listener
	err := Do(path, func() (err error) {
		there = self()
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if there == here {
		t.Errorf("the function ran in %s, where it was called", here)
	}
	if want, err := os.Readlink(path); err != nil || there != want {
		t.Errorf("the function ran in %s, want %s (%v)", there, want, err)
	}
	for range 20 { // a thread that came back would be taken for another goroutine
		done := make(chan string)
		go func() { done <- self() }()
		if now := <-done; now != here {
			t.Fatalf("afterwards a goroutine is in %s", now)
		}
	}
	// What was opened stays there.
	if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Error("a socket of the namespace answers outside")
	}
	if err := ns.Do(func() error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			c.Close()
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

func TestDoErrors(t *testing.T) {
	own := errors.New("the function's own")
	if err := Do("/proc/self/ns/net", func() error { return own }); err != own {
		t.Errorf("error %v, want the function's own as it is", err)
	}
	// Docker's sandboxes are mounts: without the mount the file is an empty one.
	file := filepath.Join(t.TempDir(), "sandbox")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, file + "-missing"} {
		err := Do(path, func() error { t.Error("it was called"); return nil })
		if !errors.Is(err, ErrGone) || !strings.Contains(err.Error(), path) {
			t.Errorf("error %v, want ErrGone and %s", err, path)
		}
	}
}
