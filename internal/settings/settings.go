// Package settings fills the flags that the command line left alone: from the
// environment, from files that the environment names, and from container
// secrets.
//
// It owns the names and the precedence. It does not know what a flag means: its
// value parses itself.
package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"
)

const (
	prefix = "QUICVPN_"
	// maxFile bounds what is read of a file: every setting is one short line.
	maxFile = 64 << 10
)

// Sources are the places where a setting may stand besides the command line.
type Sources struct {
	// LookupEnv is os.LookupEnv or a substitute. Required.
	LookupEnv func(string) (string, bool)
	// Environ is what os.Environ returns, for Unknown alone; nil has none.
	Environ []string
	// Secrets is the directory of container secrets; empty looks nowhere.
	Secrets string
}

// EnvName returns the variable that sets a flag: QUICVPN_STATE_DIR for
// state-dir.
func EnvName(flag string) string {
	return prefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Fill sets every flag of the command that the command line did not set. The
// first source that has the setting wins:
//
//  1. the flag --some-flag
//  2. the variable QUICVPN_SOME_FLAG
//  3. the file that QUICVPN_SOME_FLAG_FILE names
//  4. the file quicvpn_some_flag among the secrets
//  5. the flag's default
//
// An empty variable counts as not set, because Compose files pass on empty
// ones. A variable beside its _FILE form is an error: one of them is a mistake.
// A flag --some-flag-file beside a flag --some-flag is the command line's form
// of the third source and has no variable of its own.
//
// A flag that a parent command has too is filled there. The flags help and
// version are questions and no settings. No error contains a value.
func (s Sources) Fill(c *cli.Context) error {
	own := names(c.Command.Flags)
	for _, f := range c.Command.Flags {
		name := f.Names()[0]
		base, isFile := strings.CutSuffix(name, "-file")
		if isQuestion(name) || isFile && own[base] || hasParent(c, name) {
			continue
		}
		where, value, err := s.find(c, name, own[name+"-file"])
		if err != nil {
			return err
		}
		if where == "" {
			continue
		}
		if err := c.Set(name, value); err != nil {
			if _, isBool := f.(*cli.BoolFlag); isBool {
				err = errors.New("must be true or false") // package cli's repeats the value
			}
			return fmt.Errorf("%s: %w", where, err)
		}
	}
	return nil
}

// find returns where a flag's value stands and the value; an empty where says
// that the command line or the default decides.
func (s Sources) find(c *cli.Context, name string, hasFileFlag bool) (where, value string, err error) {
	if hasFileFlag && c.IsSet(name+"-file") {
		where := "--" + name + "-file"
		if c.IsSet(name) {
			return "", "", fmt.Errorf("--%s and %s are both set: give one of them", name, where)
		}
		return readFile(where, c.String(name+"-file"))
	}
	if c.IsSet(name) {
		return "", "", nil
	}

	env := EnvName(name)
	value, _ = s.LookupEnv(env)
	path, _ := s.LookupEnv(env + "_FILE")
	switch {
	case value != "" && path != "":
		return "", "", fmt.Errorf("%s and %s_FILE are both set: unset one of them", env, env)
	case value != "":
		return env, value, nil
	case path != "":
		return readFile(env+"_FILE", path)
	}

	if s.Secrets == "" {
		return "", "", nil
	}
	secret := filepath.Join(s.Secrets, strings.ToLower(env))
	// A directory of secrets that this user may not enter holds none for it.
	if _, err := os.Stat(secret); err != nil {
		return "", "", nil
	}
	return readFile("secret", secret)
}

// readFile returns what stands in a file, without one trailing newline, and
// "source path" as the place to name in errors.
func readFile(source, path string) (where, value string, err error) {
	where = source + " " + path
	data, err := read(path)
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", where, explain(err))
	}
	if len(data) > maxFile {
		return "", "", fmt.Errorf("%s: the file is larger than %d bytes: name the file that holds the value alone", where, maxFile)
	}
	data = bytes.TrimSuffix(data, []byte("\n"))
	data = bytes.TrimSuffix(data, []byte("\r"))
	if len(data) == 0 {
		return "", "", fmt.Errorf("%s: the file is empty: write the value into it", where)
	}
	return where, string(data), nil
}

func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxFile+1))
}

// explain turns an error about a file into what to do about it.
func explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errors.New("there is no such file: check the path")
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("uid %d may not read the file: change its owner or its mode", os.Geteuid())
	case errors.Is(err, syscall.EISDIR):
		return errors.New("it is a directory (Docker makes one where the file to mount does not exist): check the path on the host")
	}
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err
	}
	return err
}

func names(flags []cli.Flag) map[string]bool {
	m := make(map[string]bool, len(flags))
	for _, f := range flags {
		m[f.Names()[0]] = true
	}
	return m
}

func hasParent(c *cli.Context, name string) bool {
	for _, parent := range c.Lineage()[1:] {
		if parent.Command != nil && names(parent.Command.Flags)[name] {
			return true
		}
	}
	return false
}
