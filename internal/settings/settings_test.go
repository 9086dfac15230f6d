package settings

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/urfave/cli/v2"
)

// parse runs a command line "app [args] sub [args]" and returns what its flags
// hold: of the app --shared, of sub --some-flag, --token, --token-file, --on and
// --shared.
func parse(t *testing.T, sources Sources, args ...string) (map[string]string, error) {
	t.Helper()
	values := map[string]*string{"shared": new(string), "some-flag": new(string), "token": new(string)}
	*values["some-flag"] = "default"
	flag := func(name string) cli.Flag {
		return &cli.GenericFlag{Name: name, Value: Var(values[name], *values[name], func(s string) (string, error) {
			if strings.HasPrefix(s, "bad") {
				return "", fmt.Errorf("not good")
			}
			return String(s)
		})}
	}
	got := map[string]string{}
	app := &cli.App{
		Name:           "app",
		Flags:          []cli.Flag{flag("shared")},
		Before:         sources.Fill,
		Writer:         t.Output(),
		ErrWriter:      t.Output(),
		ExitErrHandler: func(*cli.Context, error) {},
		Commands: []*cli.Command{{
			Name: "sub",
			Flags: []cli.Flag{flag("some-flag"), flag("token"), flag("shared"),
				&cli.StringFlag{Name: "token-file"}, &cli.BoolFlag{Name: "on"}},
			Before: sources.Fill,
			Action: func(c *cli.Context) error {
				for name, p := range values {
					if *p != "" {
						got[name] = *p
					}
				}
				if c.Bool("on") {
					got["on"] = "true"
				}
				return nil
			},
		}},
	}
	return got, app.Run(append([]string{"app"}, args...))
}

func TestFill(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const hidden = "c0ntent"
	one := file("one", "from file\n")
	crlf := file("crlf", "from file\r\n")
	newlines := file("newlines", hidden+"\n\n")
	empty := file("empty", "\n")
	bad := file("bad", "bad "+hidden)
	large := file("large", strings.Repeat(hidden, 10000))
	file("secrets/quicvpn_some_flag", "from secret\n")
	file("secrets/quicvpn_token", "from secret\n")
	file("badsecrets/quicvpn_some_flag", "bad "+hidden)
	if err := os.MkdirAll(filepath.Join(dir, "dirsecrets/quicvpn_some_flag"), 0o755); err != nil {
		t.Fatal(err)
	}

	tests := []struct {
		name    string
		args    string
		env     map[string]string
		secrets string
		want    map[string]string
		err     string
	}{
		{name: "default", args: "sub", want: map[string]string{"some-flag": "default"}},
		{name: "secret over default", args: "sub", secrets: "secrets",
			want: map[string]string{"some-flag": "from secret", "token": "from secret"}},
		{name: "file over secret", args: "sub", secrets: "secrets", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": one},
			want: map[string]string{"some-flag": "from file", "token": "from secret"}},
		{name: "variable over secret", args: "sub", secrets: "secrets", env: map[string]string{"QUICVPN_SOME_FLAG": "from env"},
			want: map[string]string{"some-flag": "from env", "token": "from secret"}},
		{name: "flag over variable", args: "sub --some-flag arg", secrets: "secrets", env: map[string]string{"QUICVPN_SOME_FLAG": "from env"},
			want: map[string]string{"some-flag": "arg", "token": "from secret"}},
		{name: "flag over file", args: "sub --some-flag=arg", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": one},
			want: map[string]string{"some-flag": "arg"}},
		{name: "flag over variable and file", args: "sub --some-flag arg",
			env:  map[string]string{"QUICVPN_SOME_FLAG": "x", "QUICVPN_SOME_FLAG_FILE": one},
			want: map[string]string{"some-flag": "arg"}},
		{name: "file flag over secret", args: "sub --token-file " + one, secrets: "secrets",
			want: map[string]string{"some-flag": "from secret", "token": "from file"}},
		{name: "file flag over variable", args: "sub --token-file " + one, env: map[string]string{"QUICVPN_TOKEN": "x"},
			want: map[string]string{"some-flag": "default", "token": "from file"}},
		{name: "file flag over file variable", args: "sub --token-file " + one, env: map[string]string{"QUICVPN_TOKEN_FILE": "/nowhere"},
			want: map[string]string{"some-flag": "default", "token": "from file"}},
		{name: "file variable of a file flag", args: "sub", env: map[string]string{"QUICVPN_TOKEN_FILE": one},
			want: map[string]string{"some-flag": "default", "token": "from file"}},
		{name: "no variable of the file flag itself", args: "sub", env: map[string]string{"QUICVPN_TOKEN_FILE_FILE": "/nowhere"},
			want: map[string]string{"some-flag": "default"}},
		{name: "empty variables", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG": "", "QUICVPN_SOME_FLAG_FILE": ""},
			want: map[string]string{"some-flag": "default"}},
		{name: "an empty variable beside a file", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG": "", "QUICVPN_SOME_FLAG_FILE": crlf},
			want: map[string]string{"some-flag": "from file"}},
		{name: "boolean", args: "sub", env: map[string]string{"QUICVPN_ON": "true"},
			want: map[string]string{"some-flag": "default", "on": "true"}},
		{name: "shared flag before", args: "--shared a sub", env: map[string]string{"QUICVPN_SHARED": "x"},
			want: map[string]string{"some-flag": "default", "shared": "a"}},
		{name: "shared flag after", args: "--shared a sub --shared b", env: map[string]string{"QUICVPN_SHARED": "x"},
			want: map[string]string{"some-flag": "default", "shared": "b"}},
		{name: "shared variable", args: "sub", env: map[string]string{"QUICVPN_SHARED": "x"},
			want: map[string]string{"some-flag": "default", "shared": "x"}},
		{name: "no secrets directory", args: "sub", secrets: "nowhere", want: map[string]string{"some-flag": "default"}},
		{name: "help is not a setting", args: "sub", env: map[string]string{"QUICVPN_HELP": "true"},
			want: map[string]string{"some-flag": "default"}},

		{name: "variable and file", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG": "x", "QUICVPN_SOME_FLAG_FILE": one},
			err: "QUICVPN_SOME_FLAG and QUICVPN_SOME_FLAG_FILE are both set: unset one of them"},
		{name: "flag and file flag", args: "sub --token x --token-file " + one,
			err: "--token and --token-file are both set: give one of them"},
		{name: "bad variable", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG": "bad " + hidden},
			err: "QUICVPN_SOME_FLAG: not good"},
		{name: "bad boolean", args: "sub", env: map[string]string{"QUICVPN_ON": hidden},
			err: "QUICVPN_ON: must be true or false"},
		{name: "bad file", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": bad},
			err: "QUICVPN_SOME_FLAG_FILE " + bad + ": not good"},
		{name: "bad file of a file flag", args: "sub --token-file " + bad,
			err: "--token-file " + bad + ": not good"},
		{name: "bad secret", args: "sub", secrets: "badsecrets",
			err: "secret " + dir + "/badsecrets/quicvpn_some_flag: not good"},
		{name: "one newline only", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": newlines},
			err: "QUICVPN_SOME_FLAG_FILE " + newlines + ": it is more than one line"},
		{name: "empty file", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": empty},
			err: "QUICVPN_SOME_FLAG_FILE " + empty + ": the file is empty: write the value into it"},
		{name: "large file", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": large},
			err: "QUICVPN_SOME_FLAG_FILE " + large + ": the file is larger than 65536 bytes: name the file that holds the value alone"},
		{name: "endless file", args: "sub --token-file /dev/zero",
			err: "--token-file /dev/zero: the file is larger than 65536 bytes: name the file that holds the value alone"},
		{name: "no file", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": "/nowhere/x"},
			err: "QUICVPN_SOME_FLAG_FILE /nowhere/x: there is no such file: check the path"},
		{name: "no file of a file flag", args: "sub --token-file /nowhere/x",
			err: "--token-file /nowhere/x: there is no such file: check the path"},
		{name: "directory", args: "sub", env: map[string]string{"QUICVPN_SOME_FLAG_FILE": dir},
			err: "QUICVPN_SOME_FLAG_FILE " + dir + ": it is a directory (Docker makes one where the file to mount does not exist): check the path on the host"},
		{name: "secret is a directory", args: "sub", secrets: "dirsecrets",
			err: "secret " + dir + "/dirsecrets/quicvpn_some_flag: it is a directory (Docker makes one where the file to mount does not exist): check the path on the host"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			sources := Sources{LookupEnv: func(name string) (string, bool) {
				v, ok := tt.env[name]
				return v, ok
			}}
			if tt.secrets != "" {
				sources.Secrets = filepath.Join(dir, tt.secrets)
			}
			got, err := parse(t, sources, strings.Fields(tt.args)...)
			if tt.err != "" {
				if err == nil || err.Error() != tt.err {
					t.Fatalf("error %v, want %s", err, tt.err)
				}
				if strings.Contains(err.Error(), hidden) {
					t.Fatalf("error repeats the content: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if fmt.Sprint(got) != fmt.Sprint(tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestExplainPermission(t *testing.T) {
	err := explain(&fs.PathError{Op: "open", Path: "/x", Err: syscall.EACCES})
	want := fmt.Sprintf("uid %d may not read the file: change its owner or its mode", os.Geteuid())
	if err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
}

func TestEnvName(t *testing.T) {
	if got := EnvName("state-dir"); got != "QUICVPN_STATE_DIR" {
		t.Errorf("got %s", got)
	}
}
