package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/driver"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

const (
	// debianCLI is tried first: what else is in PATH may be too new for the engine.
	debianCLI = "/usr/bin/docker"
	// commandLimit is when a command of Docker's has hung.
	commandLimit = time.Minute
	// pluginSocket is where the engine looks for a driver.
	pluginSocket = "/run/docker/plugins/" + driver.Name + ".sock"
)

// An engine is the machine's own, used as from a terminal.
type engine struct {
	host    *netlab.NS
	cli     string
	socket  string
	version string
}

// findEngine returns the engine that the client knows, if it is on this machine
// and no driver works for it yet.
func findEngine(host *netlab.NS) (*engine, error) {
	e := &engine{host: host, cli: debianCLI}
	if _, err := os.Stat(e.cli); err != nil {
		if e.cli, err = exec.LookPath("docker"); err != nil {
			return nil, noEngine(err)
		}
	}
	endpoint, err := e.run("context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
	if err != nil {
		return nil, err
	}
	var local bool
	if e.socket, local = strings.CutPrefix(endpoint, "unix://"); !local {
		return nil, fmt.Errorf("the Docker Engine %s is on another machine, and a network driver runs beside its engine: "+
			"unset DOCKER_HOST and DOCKER_CONTEXT to use this machine's", endpoint)
	}
	if e.version, err = e.run("version", "--format", "{{.Server.Version}}"); err != nil {
		return nil, noEngine(err)
	}
	return e, e.checkFree()
}

func noEngine(err error) error {
	return fmt.Errorf(`no Docker Engine: %w
install one:  apt-get install docker.io    (Debian and Ubuntu; for others see https://docs.docker.com/engine/install)
start it:     systemctl start docker       (without systemd: dockerd)
and try again`, err)
}

// checkFree refuses to get in the way of a driver that is there already.
func (e *engine) checkFree() error {
	if c, err := net.Dial("unix", pluginSocket); err == nil {
		c.Close()
		return fmt.Errorf("a %s driver already runs on this machine, at %s: stop it while the demo runs one of its own", driver.Name, pluginSocket)
	}
	plugins, err := e.list("plugin", "ls", "--format", "{{.Name}}")
	if err != nil {
		return err
	}
	for _, p := range plugins {
		if name, _, _ := strings.Cut(p, ":"); path.Base(name) == driver.Name {
			return fmt.Errorf("the engine has the managed plugin %s: remove it while the demo runs a driver of its own", p)
		}
	}
	networks, err := e.list("network", "ls", "--format", "{{.Name}}", "--filter", "driver="+driver.Name)
	if err == nil && len(networks) > 0 {
		err = fmt.Errorf("the engine has networks of a %s driver that is not here (%s), and the demo's would answer for it: remove them, "+
			"or use another machine", driver.Name, strings.Join(networks, ", "))
	}
	return err
}

// run runs a command of Docker's to its end, whatever the user interrupts: the
// engine would go on with what it has begun. It returns standard output, without
// spaces around it.
func (e *engine) run(args ...string) (string, error) { return e.runWith(nil, args...) }

func (e *engine) runWith(stdin io.Reader, args ...string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), commandLimit, fmt.Errorf("it has hung for %v", commandLimit))
	defer cancel()
	c := e.host.Command(ctx, e.cli, args...)
	var stdout, stderr bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = stdin, &stdout, &stderr
	err := c.Run()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		err = fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSpace(stdout.String()), err
}

// list is run for commands that print names.
func (e *engine) list(args ...string) ([]string, error) {
	out, err := e.run(args...)
	return strings.Fields(out), err
}

// listContainers is completed by a part of their names.
const listContainers = "ps --all --format {{.Names}} --filter name="

// logs shows what the last lines of containers' logs are.
func (e *engine) logs(prefix string, logf func(format string, args ...any)) {
	containers, err := e.list(strings.Fields(listContainers + prefix)...)
	if err != nil {
		logf("%v", err)
	}
	for _, name := range containers {
		c := e.host.Command(context.Background(), e.cli, "logs", "--tail", "20", name)
		out, err := c.CombinedOutput()
		logf("%s printed (%v):\n%s", name, err, out)
	}
}

// A kind of thing that an engine has.
type kind struct {
	list, remove string // commands, which the prefix or the names complete
}

// kinds are in the order in which they go: the driver says good-bye to a gateway
// that is still there.
var kinds = []kind{
	{"ps --all --format {{.Names}} --filter network=PREFIX-net", "rm --force"},
	{"network ls --format {{.Name}} --filter name=PREFIX-net", "network rm"},
	{listContainers + "PREFIX", "rm --force"},
	{"network ls --format {{.Name}} --filter name=PREFIX", "network rm"},
	{"volume ls --format {{.Name}} --filter name=PREFIX", "volume rm"},
	{"images --format {{.Repository}} --filter reference=PREFIX", "rmi"},
}

// remove removes all whose name has a prefix that nothing else has, and says
// what it does. Where something cannot be removed it goes on with the rest.
func (e *engine) remove(prefix string, say func(command string)) error {
	var errs []error
	for _, k := range kinds {
		found, err := e.list(strings.Fields(strings.ReplaceAll(k.list, "PREFIX", prefix))...)
		if err == nil && len(found) > 0 {
			args := append(strings.Fields(k.remove), found...)
			say("docker " + strings.Join(args, " "))
			_, err = e.run(args...)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// archive packs programs as the root of an image.
func archive(programs map[string]string) (*bytes.Buffer, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, path := range programs {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	return &b, w.Close()
}
