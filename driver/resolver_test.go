package driver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckResolvers(t *testing.T) {
	const (
		resolv  = "etc/resolv.conf"
		systemd = "run/systemd/resolve/resolv.conf"
		daemon  = "etc/docker/daemon.json"
	)
	tests := []struct {
		name  string
		files map[string]string
		want  string // part of the error; empty for none
	}{
		{"no file", nil, ""},
		{"no server", map[string]string{resolv: "search example.com\n"}, ""},
		{"private server", map[string]string{resolv: "nameserver 192.168.1.1\n"}, ""},
		{"loopback", map[string]string{resolv: "nameserver 127.0.0.1\n"}, "127.0.0.1 in /etc/resolv.conf"},
		{"loopback, IPv6", map[string]string{resolv: "# ours\nnameserver ::1\n"}, "::1 in /etc/resolv.conf"},
		{"loopback as the second", map[string]string{resolv: "nameserver 9.9.9.9\nnameserver 127.0.0.1\n"}, "127.0.0.1"},
		{"systemd's stub", map[string]string{resolv: "nameserver 127.0.0.53\n", systemd: "nameserver 10.0.0.1\n"}, ""},
		{"systemd's stub without the list behind it", map[string]string{resolv: "nameserver 127.0.0.53\n"}, "127.0.0.53"},
		{"systemd's stub beside another", map[string]string{resolv: "nameserver 127.0.0.53\nnameserver 127.0.0.1\n", systemd: "nameserver 10.0.0.1\n"}, "127.0.0.53"},
		{"loopback, and the engine has another", map[string]string{resolv: "nameserver 127.0.0.1\n", daemon: `{"dns": ["9.9.9.9"]}`}, ""},
		{"loopback, and the engine has it too", map[string]string{resolv: "nameserver 127.0.0.1\n", daemon: `{"dns": ["9.9.9.9", "127.0.0.1"]}`}, "127.0.0.1"},
		{"loopback, and the engine's file is damaged", map[string]string{resolv: "nameserver 127.0.0.1\n", daemon: `{"dns": [`}, "127.0.0.1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range tt.files {
				path := filepath.Join(dir, name)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			err := hostFiles(dir).checkResolvers()
			if tt.want == "" && err != nil {
				t.Errorf("refused: %v", err)
			}
			if tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "-o dns=host")) {
				t.Errorf("error %v, want one about %s that says what to do", err, tt.want)
			}
		})
	}
}
