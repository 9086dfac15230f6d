package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v2"
)

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:   "version",
		Usage:  "print the versions of quicvpn, Go and quic-go",
		Action: showVersion,
	}
}

// versionFlag returns the flag that stands for the command.
func versionFlag() cli.Flag {
	return &cli.BoolFlag{Name: "version", DisableDefaultText: true, Usage: "print the versions, as the command does"}
}

// versionAlone refuses the flag before a command, which it would not change.
func versionAlone(c *cli.Context) error {
	if c.Bool("version") && c.Args().Present() {
		return usagef("unexpected argument %q after --version", c.Args().First())
	}
	return nil
}

// versionOrMissing is the action where no command is named.
func versionOrMissing(c *cli.Context) error {
	if c.Bool("version") {
		return showVersion(c)
	}
	return missingCommand(c)
}

func showVersion(c *cli.Context) error {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = new(debug.BuildInfo) // a build without modules
	}
	return printVersion(c.App.Writer, info)
}

// printVersion prints one fact a line, the name first.
func printVersion(w io.Writer, info *debug.BuildInfo) error {
	version := info.Main.Version
	if version == "" {
		version = "(unknown)"
	}
	text := fmt.Sprintf("quicvpn %s\n", version)

	vcs := make(map[string]string)
	for _, s := range info.Settings {
		vcs[s.Key] = s.Value
	}
	if revision := vcs["vcs.revision"]; revision != "" {
		text += fmt.Sprintf("commit %s %s", revision, vcs["vcs.time"])
		if vcs["vcs.modified"] == "true" {
			text += " (modified)"
		}
		text += "\n"
	}
	text += fmt.Sprintf("go %s %s/%s\n", runtime.Version(), runtime.GOOS, runtime.GOARCH)
	for _, dep := range info.Deps {
		if dep.Path == "github.com/quic-go/quic-go" {
			text += fmt.Sprintf("quic-go %s\n", dep.Version)
		}
	}
	_, err := io.WriteString(w, text)
	return err
}
