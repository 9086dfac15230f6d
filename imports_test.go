package main

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/quicvpn/quicvpn"

// goPackage is what `go list -json` says of a package.
type goPackage struct {
	ImportPath string
	Imports    []string // of code that is not a test
}

// name is the import path below the module's, "." for the command itself.
func (p *goPackage) name() string { return relative(p.ImportPath) }

func relative(path string) string {
	if path == module {
		return "."
	}
	return strings.TrimPrefix(path, module+"/")
}

// rules says which packages of the house each room may import; a name that ends
// in /... stands for all below it. The first row that fits decides. Tests may
// import what they like.
var rules = []struct {
	room string
	may  []string
}{
	{".", []string{"driver", "gateway", "sidecar", "socks5", "internal/settings", "internal/token"}},
	{"driver/hub/...", []string{"tunnel", "tun", "internal/..."}},
	{"driver/publish/...", []string{"internal/..."}},
	{"driver/...", []string{"driver/...", "sidecar", "tunnel", "tun", "internal/..."}},
	{"gateway/userspace/...", []string{"netstack", "internal/..."}},
	{"gateway/...", []string{"gateway/...", "tunnel", "tun", "netstack", "internal/..."}},
	{"sidecar/...", []string{"tunnel", "tun", "netstack", "socks5", "internal/..."}},
	{"tunnel/...", []string{"tunnel/...", "internal/packet", "internal/relay"}},
	{"tun/...", []string{"internal/packet"}},
	{"netstack/...", []string{"internal/packet", "internal/relay"}},
	{"socks5/...", []string{"internal/relay"}},
	{"internal/packet/...", nil},
	{"internal/...", []string{"internal/..."}},
}

// tools test, measure and show: they may import all the house.
var tools = []string{"e2e", "internal/demo", "internal/bench", "internal/dockerlab"}

func matches(pattern, name string) bool {
	below, ok := strings.CutSuffix(pattern, "/...")
	return name == pattern || ok && (name == below || strings.HasPrefix(name, below+"/"))
}

func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, name) })
}

func isTool(name string) bool {
	return slices.ContainsFunc(tools, func(t string) bool { return matches(t+"/...", name) })
}

func TestImports(t *testing.T) {
	packages := listPackages(t)
	for _, room := range []string{".", "gateway", "sidecar", "tunnel", "tun", "internal/packet"} {
		if !slices.ContainsFunc(packages, func(p *goPackage) bool { return p.name() == room }) {
			t.Errorf("go list does not show %s", room)
		}
	}
	for _, p := range packages {
		for _, violation := range check(p) {
			t.Error(violation)
		}
	}
}

// check returns what a package imports against the rules.
func check(p *goPackage) (violations []string) {
	name := p.name()
	refuse := func(path, why string) { violations = append(violations, name+" imports "+relative(path)+": "+why) }
	i := slices.IndexFunc(rules, func(r struct {
		room string
		may  []string
	}) bool {
		return matches(r.room, name)
	})
	if i < 0 && !isTool(name) {
		return []string{name + " has no import rule: add one to the table above"}
	}
	for _, path := range p.Imports {
		ours := strings.HasPrefix(path, module)
		switch {
		case ours && (relative(path) == "internal/netlab" || relative(path) == "internal/dockerlab") && !isTool(name):
			refuse(path, "the test kit is for tests, the demo and benchmarks")
		case ours && !isTool(name) && !matchesAny(rules[i].may, relative(path)):
			refuse(path, "imports point one way")
		case isQUIC(path) && !matches("tunnel/...", name):
			refuse(path, "only tunnel knows QUIC")
		case strings.HasPrefix(path, "gvisor.dev/") && !matches("netstack/...", name):
			refuse(path, "only netstack knows gVisor")
		}
	}
	return violations
}

func isQUIC(path string) bool {
	return strings.HasPrefix(path, "github.com/quic-go/")
}

func TestCheckFinds(t *testing.T) {
	tests := []struct {
		p     goPackage
		wrong bool
	}{
		{goPackage{ImportPath: module, Imports: []string{module + "/gateway"}}, false},
		{goPackage{ImportPath: module, Imports: []string{module + "/tunnel"}}, true},
		{goPackage{ImportPath: module + "/gateway", Imports: []string{module + "/tun", "fmt"}}, false},
		{goPackage{ImportPath: module + "/gateway", Imports: []string{module + "/sidecar"}}, true},
		{goPackage{ImportPath: module + "/sidecar", Imports: []string{module + "/internal/netlab"}}, true},
		{goPackage{ImportPath: module + "/sidecar", Imports: []string{"github.com/quic-go/quic-go"}}, true},
		{goPackage{ImportPath: module + "/gateway", Imports: []string{"gvisor.dev/gvisor/pkg/tcpip"}}, true},
		{goPackage{ImportPath: module + "/tun", Imports: []string{module + "/tunnel"}}, true},
		{goPackage{ImportPath: module + "/tunnel", Imports: []string{module + "/tun"}}, true},
		{goPackage{ImportPath: module + "/tunnel", Imports: []string{"github.com/quic-go/quic-go/http3"}}, false},
		{goPackage{ImportPath: module + "/internal/packet", Imports: []string{module + "/internal/token"}}, true},
		{goPackage{ImportPath: module + "/internal/demo", Imports: []string{module + "/internal/netlab"}}, false},
		{goPackage{ImportPath: module + "/elsewhere"}, true},
	}
	for _, tt := range tests {
		if got := check(&tt.p); len(got) > 0 != tt.wrong {
			t.Errorf("%+v: violations %q, want some: %t", tt.p, got, tt.wrong)
		}
	}
}

func listPackages(t *testing.T) []*goPackage {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		t.Fatalf("%v: %v\n%s", cmd, err, exit.Stderr)
	} else if err != nil {
		t.Fatalf("%v: %v", cmd, err)
	}
	var packages []*goPackage
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		p := new(goPackage)
		if err := dec.Decode(p); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatalf("read what go list printed: %v", err)
		}
		packages = append(packages, p)
	}
}
