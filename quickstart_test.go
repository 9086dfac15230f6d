package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// TestQuickStart runs the shell lines of the README's sections for a gateway and a
// sidecar, as they stand there.
func TestQuickStart(t *testing.T) {
	gatewayLines, clientLines, healthLines, operatorLines := quickStart(t)
	world := netlab.NewTopology(t, netlab.LinkConfig{})
	world.Internet.ServeHTTP(80)
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()

	// A home directory each; scp copies between the two.
	home := map[*netlab.NS]string{world.Gateway: t.TempDir(), world.Client: t.TempDir()}
	bin := t.TempDir()
	scp := "#!/bin/sh\nexec cp " + home[world.Gateway] + "/${1#gw.example.com:} $2\n"
	if err := os.WriteFile(filepath.Join(bin, "scp"), []byte(scp), 0o755); err != nil {
		t.Fatal(err)
	}
	shell := func(ns *netlab.NS, line string) *netlab.Cmd {
		c := ns.Command(ctx, "sh", "-c", "exec "+line)
		if strings.Contains(line, ">") || strings.HasPrefix(line, "scp") {
			c = ns.Command(ctx, "sh", "-ec", line)
		}
		c.Dir = home[ns]
		c.Env = append(os.Environ(), "PATH="+filepath.Dir(binary)+":"+bin+":"+os.Getenv("PATH"))
		return c
	}
	run := func(ns *netlab.NS, line string) {
		t.Helper()
		if out, err := shell(ns, line).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	start := func(ns *netlab.NS, line string) *netlab.Cmd {
		t.Helper()
		c := shell(ns, line)
		if err := c.Start(); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		return c
	}
	for ns := range home {
		err := ns.Do(func() error { return unix.Mount("none", "/var/lib", "tmpfs", 0, "") })
		if err != nil {
			t.Fatal(err)
		}
	}
	world.Client.Replace("/etc/hosts", netlab.GatewayAddr4.String()+" gw.example.com\n")

	before := world.Client.Snapshot()
	run(world.Gateway, gatewayLines[0])
	info, err := os.Stat(filepath.Join(home[world.Gateway], "token"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("the token's file has the mode %v, want 0600", info.Mode())
	}
	g := start(world.Gateway, gatewayLines[1])
	run(world.Client, clientLines[0])
	s := start(world.Client, clientLines[1])
	if err := world.Client.WaitRoute(ctx, netlab.ServerAddr4, "quicvpn0"); err != nil {
		t.Fatalf("%v\n%s\n%s", err, s.Log(), g.Log())
	}
	page, err := world.Client.Get(ctx, fmt.Sprintf("http://%s/", netlab.ServerAddr4))
	if want := netlab.Page + netlab.EgressAddr4.String(); err != nil || !strings.HasPrefix(page, want) {
		t.Errorf("the page says %q (%v), want %q\n%s\n%s", page, err, want, s.Log(), g.Log())
	}
	for _, line := range healthLines {
		var out []byte
		for healthy := false; !healthy && ctx.Err() == nil; { // the session is new
			out, err = shell(world.Client, line).CombinedOutput()
			healthy = err == nil
		}
		if err != nil {
			t.Errorf("%s: %v\n%s", line, err, out)
		}
	}
	for _, line := range operatorLines {
		run(world.Gateway, line)
	}
	for _, c := range []*netlab.Cmd{s, g} {
		if err := c.Stop(30 * time.Second); err != nil {
			t.Errorf("%v\n%s", err, c.Log())
		}
	}
	if diff := before.Diff(world.Client.Snapshot()); diff != "" {
		t.Errorf("the client's machine is not as it was:\n%s", diff)
	}
}

var shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")

// quickStart returns the lines of the sections' shell blocks, without comments.
func quickStart(t *testing.T) (gateway, client, health, operator []string) {
	t.Helper()
	of := func(title string, want int) [][]string {
		blocks := shellBlocks(t, title)
		if len(blocks) != want {
			t.Fatalf("the section %q has the blocks %q, want %d", title, blocks, want)
		}
		return blocks
	}
	sidecar, tokens := of("A sidecar", 2), of("Tokens", 2)
	return of("A gateway on a server", 1)[0], sidecar[0], sidecar[1], append(tokens[0], tokens[1]...)
}

// shellBlocks returns the lines of a section of the README, by block.
func shellBlocks(t *testing.T, title string) (blocks [][]string) {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n## "+title+"\n")
	if !ok {
		t.Fatalf("README.md has no section %q", title)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	for _, m := range shellBlock.FindAllStringSubmatch(section, -1) {
		var lines []string
		for line := range strings.Lines(m[1]) {
			line, _, _ = strings.Cut(line, "#")
			lines = append(lines, strings.TrimSpace(line))
		}
		blocks = append(blocks, lines)
	}
	return blocks
}
