package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/internal/settings"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/sidecar"
	"github.com/quicvpn/quicvpn/tun"
)

// Bounds of a network's MTU: what IPv6 takes (RFC 8200, section 5), and what no
// path carries more than.
const (
	minMTU = 1280
	maxMTU = 1500
)

// createWait is for how long the creation of a network waits for its gateway.
const createWait = 10 * time.Second

// networkOptions are what `docker network create -o` says.
type networkOptions struct {
	exitOptions
	mtu     int // zero leaves it to the path
	queues  int // zero means one for each CPU
	hostDNS bool
	noDNS   bool
	noProxy bool
	tcp     sidecar.TCPMode
	wait    time.Duration
}

// exitOptions say through which gateway traffic leaves: of a network, or of one
// container with --driver-opt.
type exitOptions struct {
	token     token.Token
	tokenText string
	// shown says that the token was an option itself, which everybody sees who
	// may ask the engine.
	shown bool
}

func (e *exitOptions) isSet() bool { return e.tokenText != "" }

// A setOption takes the value of an option. Its error does not repeat it.
type setOption func(value string) error

// parseOptions hands every option to its parser, in the order of their names.
func parseOptions(given map[string]string, known map[string]setOption) error {
	names := make([]string, 0, len(given))
	for name := range given {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		set := known[name]
		if set == nil {
			all := make([]string, 0, len(known))
			for k := range known {
				all = append(all, k)
			}
			slices.Sort(all)
			return fmt.Errorf("unknown option %q: there are %s", name, strings.Join(all, ", "))
		}
		if err := set(given[name]); err != nil {
			return fmt.Errorf("option %s: %w", name, err)
		}
	}
	return nil
}

// option makes a setOption of a settings parser.
func option[T any](p *T, parse func(string) (T, error)) setOption {
	return func(value string) (err error) {
		*p, err = parse(value)
		return err
	}
}

func (e *exitOptions) known() map[string]setOption {
	both := errors.New("there is a token already: give either token-file or token")
	return map[string]setOption{
		"token": func(s string) error {
			if e.isSet() {
				return both
			}
			e.shown = true
			return e.setToken(s)
		},
		"token-file": func(path string) error {
			if e.isSet() {
				return both
			}
			return e.readToken(path)
		},
	}
}

func (e *exitOptions) setToken(s string) (err error) {
	if e.token, err = token.Parse(s); err != nil {
		return err
	}
	e.tokenText = e.token.Encode()
	return nil
}

// readToken reads a token file; no error repeats what is in it.
func (e *exitOptions) readToken(path string) error {
	const where = "give the absolute path of the file that holds the join token, on the host that runs the driver"
	if !filepath.IsAbs(path) {
		return errors.New(where)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("%w: %s", err, where)
	}
	defer f.Close()
	const most = 4096
	b, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return fmt.Errorf("%w: %s", err, where)
	}
	if len(bytes.TrimSpace(b)) == 0 {
		return fmt.Errorf("%s is empty: make another token on the gateway with `quicvpn token create`", path)
	}
	if err := e.setToken(string(b)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// networkOptionsOf parses the options of a network. Where they name no token,
// defaultToken is the file that holds one; empty if there is none. An internal
// network needs none.
func networkOptionsOf(options map[string]json.RawMessage, defaultToken string) (o networkOptions, err error) {
	given := make(map[string]string)
	if raw := options[optionGeneric]; raw != nil {
		if err := json.Unmarshal(raw, &given); err != nil {
			return o, fmt.Errorf("read the network's options: %w", err)
		}
	}
	o.wait = createWait
	known := o.exitOptions.known()
	known["mtu"] = option(&o.mtu, settings.Int(minMTU, maxMTU))
	known["queues"] = option(&o.queues, settings.Int(1, tun.MaxQueues))
	known["wait"] = option(&o.wait, settings.Duration)
	known["dns"] = func(value string) error {
		if _, err := settings.OneOf("tunnel", "host", "off")(value); err != nil {
			return err
		}
		o.hostDNS, o.noDNS = value == "host", value == "off"
		return nil
	}
	known["socks5"] = func(value string) error {
		_, err := settings.OneOf("on", "off")(value)
		o.noProxy = value == "off"
		return err
	}
	known["tcp"] = option(&o.tcp, settings.Named(sidecar.TCPAuto, sidecar.TCPPacket, sidecar.TCPFlow))
	if err := parseOptions(given, known); err != nil {
		return o, err
	}
	if o.isSet() || yes(options, optionInternal) {
		return o, nil
	}
	if defaultToken == "" {
		return o, errors.New("no join token: give -o token-file=PATH, or start the driver with --token-file; " +
			"`quicvpn gateway init` and `quicvpn token create` on the gateway print tokens")
	}
	if err := o.readToken(defaultToken); err != nil {
		return o, fmt.Errorf("the driver's --token-file: %w", err)
	}
	return o, nil
}

// exitOptionsOf parses a container's --driver-opt. The engine puts options of
// its own beside them, all of which have dots in their names.
func exitOptionsOf(options map[string]json.RawMessage) (o exitOptions, err error) {
	given := make(map[string]string)
	for name := range options {
		if !strings.Contains(name, ".") {
			given[name] = text(options, name)
		}
	}
	// Docker's own clients send them so; older ones put them into the generic ones.
	if raw := options[optionGeneric]; raw != nil {
		var generic map[string]string
		if json.Unmarshal(raw, &generic) == nil {
			for name, value := range generic {
				given[name] = value
			}
		}
	}
	return o, parseOptions(given, o.known())
}
