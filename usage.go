package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/quicvpn/quicvpn/internal/settings"
)

// A usageError is a command line that cannot be run as it stands.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// finish gives all commands what they have in common.
func finish(commands []*cli.Command, sources settings.Sources) {
	for _, c := range commands {
		c.HideHelpCommand = true
		c.OnUsageError = flagError
		if c.Subcommands != nil {
			c.Action = missingCommand
			finish(c.Subcommands, sources)
			continue
		}
		c.Before = chain(c.Before, fill(sources))
		c.Action = exactArgs(c.Action, c.ArgsUsage)
	}
}

// chain calls both; the first, which may be nil, sees the command line alone.
func chain(first, second cli.BeforeFunc) cli.BeforeFunc {
	return func(c *cli.Context) error {
		if first != nil {
			if err := first(c); err != nil {
				return err
			}
		}
		return second(c)
	}
}

func fill(sources settings.Sources) cli.BeforeFunc {
	return func(c *cli.Context) error {
		if err := sources.Fill(c); err != nil {
			return &usageError{err.Error()}
		}
		return nil
	}
}

// flag returns a flag whose help names its variable.
func flag(name string, v *settings.Value, usage string) cli.Flag {
	return &cli.GenericFlag{Name: name, Value: v, Usage: usage + " [$" + settings.EnvName(name) + "]"}
}

// flagError rewrites what package flag says of a command line. It leaves out
// the value, which may be a secret.
func flagError(c *cli.Context, err error, _ bool) error {
	text := err.Error()
	where := fmt.Sprintf("%q lists the flags", c.Command.HelpName+" --help")
	if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
		return usagef("unknown flag --%s; %s", name, where)
	}
	if name, ok := strings.CutPrefix(text, "flag needs an argument: -"); ok {
		return usagef("--%s needs a value; %s", name, where)
	}
	if i := strings.LastIndex(text, " for flag -"); i >= 0 && strings.HasPrefix(text, "invalid value ") {
		return usagef("--%s; %s", text[i+len(" for flag -"):], where)
	}
	if i := strings.LastIndex(text, " for -"); i >= 0 && strings.HasPrefix(text, "invalid boolean value ") {
		name, _, _ := strings.Cut(text[i+len(" for -"):], ":")
		return usagef("--%s: must be true or false; %s", name, where)
	}
	return usagef("%s; %s", text, where)
}

// missingCommand is the action of what only groups commands.
func missingCommand(c *cli.Context) error {
	name := c.Command.HelpName
	if !c.Args().Present() {
		return usagef("%q needs a command: %s; %q explains them", name, namesOf(c.Command.Subcommands), name+" --help")
	}
	return noCommand(name, c.Args().First(), c.Command.Subcommands)
}

func noCommand(group, name string, commands []*cli.Command) error {
	if len(commands) == 0 {
		return usagef("unexpected argument %q; %q shows how it is used", name, group+" --help")
	}
	return usagef("%q has no command %q: it has %s", group, name, namesOf(commands))
}

func namesOf(commands []*cli.Command) string {
	var names []string
	for _, c := range commands {
		names = append(names, c.Name)
	}
	return strings.Join(names, ", ")
}

// helpCommand returns the command that turns "help token create" into "token
// create --help".
func helpCommand() *cli.Command {
	return &cli.Command{
		Name:            "help",
		Aliases:         []string{"h"},
		Usage:           "explain a command",
		ArgsUsage:       "[COMMAND...]",
		HideHelpCommand: true,
		OnUsageError:    flagError,
		Action: func(c *cli.Context) error {
			line, commands := []string{c.App.Name}, c.App.Commands
			for _, name := range c.Args().Slice() {
				i := slices.IndexFunc(commands, func(sub *cli.Command) bool { return sub.HasName(name) })
				if i < 0 {
					return noCommand(strings.Join(line, " "), name, commands)
				}
				line, commands = append(line, name), commands[i].Subcommands
			}
			return c.App.Run(append(line, "--help"))
		},
	}
}

// exactArgs has an action refuse any but the arguments that its usage names:
// none or one.
func exactArgs(action cli.ActionFunc, usage string) cli.ActionFunc {
	return func(c *cli.Context) error {
		args := c.Args().Slice()
		help := fmt.Sprintf("%q shows how it is used", c.Command.HelpName+" --help")
		if usage != "" {
			if len(args) == 0 {
				return usagef("%q needs %s; %s", c.Command.HelpName, usage, help)
			}
			args = args[1:]
		}
		if len(args) == 0 {
			return action(c)
		}
		if slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "-") }) {
			return usagef("put flags before %q: what follows an argument is not read as a flag", c.Args().First())
		}
		return usagef("unexpected argument %q; %s", args[0], help)
	}
}
