package settings

import (
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// Kubernetes sets variables like these where a service is called quicvpn; a
// version is often that of an image.
var notMeant = regexp.MustCompile(`_SERVICE_(HOST|PORT.*)$|_PORT(_[0-9]+_(TCP|UDP|SCTP).*)?$|^QUICVPN_VERSION$`)

// An Unknown is a variable that looks like a setting and is none.
type Unknown struct {
	Name    string
	Nearest string // the most similar name of a setting
}

// Unknown returns the variables whose names begin like a setting's and which no
// flag of the commands has.
func (s Sources) Unknown(commands []*cli.Command) (unknown []Unknown) {
	flags := allFlags(commands)
	known := names(flags)
	for _, variable := range s.Environ {
		name, value, _ := strings.Cut(variable, "=")
		rest, ours := strings.CutPrefix(name, prefix)
		if !ours || value == "" || notMeant.MatchString(name) {
			continue
		}
		flag := strings.ToLower(strings.ReplaceAll(rest, "_", "-"))
		base, isFile := strings.CutSuffix(flag, "-file")
		if name == EnvName(flag) && (known[flag] || isFile && known[base]) {
			continue
		}
		nearest := strings.TrimLeft(cli.SuggestFlag(flags, flag, true), "-")
		unknown = append(unknown, Unknown{name, EnvName(nearest)})
	}
	slices.SortFunc(unknown, func(a, b Unknown) int { return strings.Compare(a.Name, b.Name) })
	return unknown
}

// allFlags returns the flags that are settings.
func allFlags(commands []*cli.Command) (flags []cli.Flag) {
	for _, c := range commands {
		flags = append(flags, c.Flags...)
		flags = append(flags, allFlags(c.Subcommands)...)
	}
	return slices.DeleteFunc(flags, func(f cli.Flag) bool { return isQuestion(f.Names()[0]) })
}

// isQuestion tells flags that ask for a text from settings.
func isQuestion(flag string) bool { return flag == "help" || flag == "version" }
