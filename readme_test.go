package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/quicvpn/quicvpn/internal/settings"
)

// leaves returns the commands that do something, by their full names.
func leaves(prefix string, commands []*cli.Command) map[string]*cli.Command {
	m := make(map[string]*cli.Command)
	for _, c := range commands {
		if c.Subcommands == nil {
			m[prefix+c.Name] = c
		}
		for name, sub := range leaves(prefix+c.Name+" ", c.Subcommands) {
			m[name] = sub
		}
	}
	return m
}

func testApp() *cli.App {
	return newApp(io.Discard, io.Discard, settings.Sources{LookupEnv: func(string) (string, bool) { return "", false }})
}

// parses checks a command line without running its command, and returns which
// one it is.
func parses(args []string) (command string, err error) {
	app := testApp()
	for name, c := range leaves("", app.Commands) {
		c.Before = nil // it would read files
		action := exactArgs(func(*cli.Context) error { return nil }, c.ArgsUsage)
		if name == "help" { // takes the name of any command, and only prints
			action = c.Action
		}
		c.Action = func(c *cli.Context) error {
			command = name
			return action(c)
		}
	}
	return command, app.Run(args)
}

// commandLines returns the lines of a document that call quicvpn: those of its
// shell blocks from the name on, without redirections and comments, and those
// between backquotes in its text.
func commandLines(document string) (lines [][]string) {
	inBlock := false
	for line := range strings.Lines(document) {
		if strings.HasPrefix(line, "```") {
			inBlock = !inBlock
			continue
		}
		pieces := []string{line}
		if !inBlock {
			pieces = nil
			for _, m := range inlineCode.FindAllStringSubmatch(line, -1) {
				pieces = append(pieces, m[1])
			}
		}
		for _, piece := range pieces {
			piece, _, _ = strings.Cut(piece, "#")
			piece, _, _ = strings.Cut(piece, ">")
			piece, _, _ = strings.Cut(piece, "|")
			words := strings.Fields(piece)
			if len(words) > 0 && slices.Contains([]string{"docker", "systemctl"}, words[0]) {
				continue // where quicvpn is a driver, a network, an image or a unit
			}
			if i := slices.Index(words, "quicvpn"); i >= 0 && len(words) > i+1 && (inBlock || i == 0) {
				lines = append(lines, words[i:])
			}
		}
	}
	return lines
}

var inlineCode = regexp.MustCompile("`([^`]+)`")

// TestDocumentedCommands parses every command line of the documents.
func TestDocumentedCommands(t *testing.T) {
	documents, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(documents, "README.md", "CHANGELOG.md") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		seen := make(map[string]bool)
		for _, line := range commandLines(string(text)) {
			command, err := parses(line)
			// A text may name a group of commands, or a command without what it needs.
			if err != nil && !isGroup(line) && !leafAlone(line) {
				t.Errorf("%s: %s: %v", path, strings.Join(line, " "), err)
			}
			seen[command] = true
		}
		if path == "README.md" {
			for name := range leaves("", testApp().Commands) {
				if !seen[name] {
					t.Errorf("README.md shows no use of quicvpn %s", name)
				}
			}
		}
	}
}

func isGroup(line []string) bool {
	return slices.ContainsFunc(testApp().Commands, func(c *cli.Command) bool {
		return c.Subcommands != nil && len(line) == 2 && line[1] == c.Name
	})
}

func leafAlone(line []string) bool {
	return leaves("", testApp().Commands)[strings.Join(line[1:], " ")] != nil
}

func TestCommandLines(t *testing.T) {
	const document = "Run `quicvpn version`, not `go version`; quicvpn is a name.\n" +
		"```sh\nmake demo # quicvpn too\nsudo quicvpn token list --json | jq .   # all\nquicvpn token create > quicvpn\n```\n"
	var got []string
	for _, line := range commandLines(document) {
		got = append(got, strings.Join(line, " "))
	}
	want := []string{"quicvpn version", "quicvpn token list --json", "quicvpn token create"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, bad := range []string{"quicvpn token list --all", "quicvpn sidecar up", "quicvpn tokens", "quicvpn token revoke"} {
		if _, err := parses(strings.Fields(bad)); err == nil {
			t.Errorf("%s parses", bad)
		}
	}
}

// beforeCommands heads the part of the table about the flags of quicvpn itself.
const beforeCommands = "before the command, and on `gateway run`, `sidecar` and `driver`"

// TestConfigurationTable compares the README's table with the flags.
func TestConfigurationTable(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := make(map[string][]string) // rows by command
	command := ""
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(line, "|\n"), "|")
		if len(cells) != 4 {
			continue
		}
		first := strings.TrimSpace(cells[0])
		switch {
		case strings.HasPrefix(first, "**"):
			command = strings.Trim(first, "*")
		case strings.HasPrefix(first, "`--"):
			row := first + strings.TrimRight(cells[1]+cells[2], " ")
			documented[command] = append(documented[command], strings.ReplaceAll(row, "`", ""))
		}
	}

	app := testApp()
	flags := map[string][]string{beforeCommands: rowsOf(app.Flags)}
	for name, c := range leaves("", app.Commands) {
		rows := slices.DeleteFunc(rowsOf(c.Flags), func(row string) bool {
			return slices.Contains(flags[beforeCommands], row)
		})
		if len(rows) > 0 {
			flags[name] = rows
		}
	}
	for name, rows := range flags {
		if !slices.Equal(documented[name], rows) {
			t.Errorf("%s: the table has\n\t%s\nthe flags are\n\t%s", name,
				strings.Join(documented[name], "\n\t"), strings.Join(rows, "\n\t"))
		}
	}
	for name := range documented {
		if flags[name] == nil {
			t.Errorf("the table has the flags of %q, which is no command", name)
		}
	}
}

// rowsOf writes flags as the table does: name, variable and default. The row of
// a flag that must be given, and of one that is off, says so in words.
func rowsOf(flags []cli.Flag) (rows []string) {
	for _, f := range flags {
		name := f.Names()[0]
		if name == "help" || name == "version" {
			continue // no settings
		}
		def := f.(cli.DocGenerationFlag).GetDefaultText()
		switch {
		case name == "address":
			def = "required"
		case name == "allow":
			def = "internet and network"
		case name == "dns":
			def = "/etc/resolv.conf"
		}
		rows = append(rows, strings.TrimRight("--"+name+" "+settings.EnvName(name)+"  "+def, " "))
	}
	return rows
}

// TestTroubleshooting looks for the messages in the headings of
// troubleshooting.md in the code.
func TestTroubleshooting(t *testing.T) {
	text, err := os.ReadFile("docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	code := sources(t)
	messages := 0
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "### ") {
			continue
		}
		for _, m := range inlineCode.FindAllStringSubmatch(line, -1) {
			messages++
			for part := range strings.SplitSeq(m[1], "…") {
				if part = strings.Trim(part, " "); len(part) > 2 && !strings.Contains(code, part) {
					t.Errorf("%q of the message %q is in no package", part, m[1])
				}
			}
		}
	}
	if messages < 30 {
		t.Errorf("only %d messages", messages)
	}
}

// sources returns all code that is not a test's, with strings that go on in the
// next line put together.
func sources(t *testing.T) string {
	var b strings.Builder
	for _, p := range listPackages(t) {
		files, err := filepath.Glob(filepath.Join(".", p.name(), "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			b.Write(text)
		}
	}
	return splitString.ReplaceAllString(strings.ReplaceAll(b.String(), "%%", "%"), "")
}

var splitString = regexp.MustCompile(`" \+\n\s*"`)
