package netlab

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A Snapshot describes a namespace's configuration, one thing a line, sorted:
// links, addresses, routes of all tables, rules, queues, the nftables ruleset and
// the sysctls of net.ipv4 and net.ipv6. Two are equal if nothing was left behind
// and nothing was lost.
type Snapshot []string

// Diff returns the lines that only s has, with "-" before them, and those that
// only later has, with "+"; empty if there are none.
func (s Snapshot) Diff(later Snapshot) string {
	var diff strings.Builder
	for _, side := range []struct {
		sign      string
		has, lack Snapshot
	}{{"-", s, later}, {"+", later, s}} {
		for _, line := range side.has {
			if _, found := slices.BinarySearch(side.lack, line); !found {
				fmt.Fprintln(&diff, side.sign, line)
			}
		}
	}
	return diff.String()
}

// Snapshot takes a snapshot of the namespace.
func (n *NS) Snapshot() Snapshot {
	n.lab.tb.Helper()
	var lines Snapshot
	for _, args := range []string{
		"ip -o -d link",
		"ip -o addr",
		"ip -o -4 route show table all",
		"ip -o -6 route show table all",
		"ip -4 rule",
		"ip -6 rule",
		"tc qdisc",
	} {
		f := strings.Fields(args)
		for line := range strings.Lines(n.read(f[0], f[1:]...)) {
			// "\" stands for a line break in ip's one-line form.
			words := strings.Fields(strings.ReplaceAll(line, `\`, " "))
			for i, w := range words[:max(len(words)-1, 0)] {
				if strings.HasSuffix(w, "_timer") {
					words[i+1] = "…" // a bridge's run on and on
				}
			}
			lines = append(lines, f[0]+": "+strings.Join(words, " "))
		}
	}
	table := ""
	for line := range strings.Lines(n.read("nft", "-s", "list", "ruleset")) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "table ") {
			table = strings.TrimSuffix(line, " {")
		}
		if line != "" && line != "}" {
			lines = append(lines, fmt.Sprintf("nft: %s: %s", table, line))
		}
	}
	n.must("read sysctls", func() error {
		for _, root := range []string{"/proc/sys/net/ipv4", "/proc/sys/net/ipv6"} {
			err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
				if err != nil || d.IsDir() {
					return err
				}
				value, err := os.ReadFile(path)
				if err != nil {
					return nil // some can only be written, or have no value yet
				}
				lines = append(lines, fmt.Sprintf("sysctl: %s = %s", path[len("/proc/sys/"):], bytes.TrimSpace(value)))
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	slices.Sort(lines)
	return lines
}

// read runs a command that must succeed and returns its standard output.
func (n *NS) read(name string, args ...string) string {
	n.lab.tb.Helper()
	c := n.Command(context.Background(), name, args...)
	out, err := c.Output()
	if err != nil {
		n.lab.tb.Fatalf("%s %v in %s: %v: %s", name, args, n.Name, err, c.Log())
	}
	return string(out)
}

// Descriptors describes the open descriptors of a process, sorted, without their
// numbers.
func Descriptors(pid int) ([]string, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list descriptors: %w", err)
	}
	var fds []string
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // closed since, as the one that lists is
		}
		kind, _, _ := strings.Cut(target, "[") // "socket:[123]"
		fds = append(fds, kind)
	}
	slices.Sort(fds)
	return fds, nil
}
