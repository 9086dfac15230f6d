package main

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestNotifyReady(t *testing.T) {
	if err := notifyReady(""); err != nil {
		t.Errorf("nobody waits: %v", err)
	}
	dir := t.TempDir()
	for _, name := range []string{filepath.Join(dir, "notify"), "@" + filepath.Join(dir, "notify")} {
		l, err := net.ListenPacket("unixgram", name)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := notifyReady(name); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := l.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, _, err := l.ReadFrom(b)
		if err != nil || string(b[:n]) != "READY=1" {
			t.Errorf("%s: systemd reads %q (%v), want READY=1", name, b[:n], err)
		}
	}
	if err := notifyReady(filepath.Join(dir, "nobody")); err == nil || !strings.Contains(err.Error(), "tell systemd") {
		t.Errorf("no such socket: error %v, want one that names systemd", err)
	}
}
