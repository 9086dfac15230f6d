// Command quicvpn carries the traffic of containers, or of a network namespace, through QUIC to a
// gateway. This package turns flags, environment and signals into the
// configuration of the roles; what they do is in packages of their own.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/quicvpn/quicvpn/driver"
	"github.com/quicvpn/quicvpn/gateway"
	"github.com/quicvpn/quicvpn/internal/settings"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/sidecar"
	"github.com/quicvpn/quicvpn/socks5"
)

// Exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

const (
	gatewayDir = "/var/lib/quicvpn/gateway"
	sidecarDir = "/var/lib/quicvpn/sidecar"
	driverDir  = "/var/lib/quicvpn/driver"
)

func main() {
	// quic-go would warn of small buffers in its own words, and past our log.
	os.Setenv("QUIC_GO_DISABLE_RECEIVE_BUFFER_WARNING", "true")
	os.Exit(run(os.Args, os.Stdout, os.Stderr, settings.Sources{
		LookupEnv: os.LookupEnv,
		Environ:   os.Environ(),
		Secrets:   "/run/secrets",
	}))
}

// run is main without the process: it returns the exit code.
func run(args []string, stdout, stderr io.Writer, sources settings.Sources) int {
	err := newApp(stdout, stderr, sources).Run(args)
	if err == nil {
		return exitOK
	}
	// Joined errors stand one a line; a message is one line.
	fmt.Fprintln(stderr, "quicvpn:", strings.ReplaceAll(err.Error(), "\n", "; "))
	var usage *usageError
	var help cli.ExitCoder // of package cli, about a topic after --help
	if errors.As(err, &usage) || errors.As(err, &help) {
		return exitUsage
	}
	return exitFailure
}

// newApp returns the command line. It is made anew for each run because flags
// hold their values.
func newApp(stdout, stderr io.Writer, sources settings.Sources) *cli.App {
	logs := &logging{format: "text", level: slog.LevelInfo, out: stderr, sources: sources}
	app := &cli.App{
		Name:  "quicvpn",
		Usage: "a network namespace's traffic through QUIC",
		Description: "Every flag --some-flag may also stand in QUICVPN_SOME_FLAG, in the file that\n" +
			"QUICVPN_SOME_FLAG_FILE names, or in /run/secrets/quicvpn_some_flag. The first of\n" +
			"these that is set wins; a flag on the command line wins over all.",
		Flags: append(logs.flags(), versionFlag(), cli.HelpFlag),
		Commands: []*cli.Command{
			{
				Name:        "gateway",
				Usage:       "where tunnels end: make one, run one",
				Subcommands: []*cli.Command{initCommand(), gatewayCommand(logs)},
			},
			tokenCommand(),
			clientCommand(),
			sidecarCommand(logs),
			healthcheckCommand(),
			driverCommand(logs),
			versionCommand(),
		},
		HideHelpCommand: true, // package cli's knows one level of commands
		HideVersion:     true,
		Writer:          stdout,
		ErrWriter:       stderr,
		ExitErrHandler:  func(*cli.Context, error) {}, // run prints errors, once
		OnUsageError:    flagError,
		Before:          chain(versionAlone, fill(sources)),
		Action:          versionOrMissing,
	}
	finish(app.Commands, sources)
	app.Commands = append(app.Commands, helpCommand())
	return app
}

// logging is the log of the long-lived roles.
type logging struct {
	format  string
	level   slog.Level
	out     io.Writer
	sources settings.Sources
}

// flags returns the flags of the log, which stand before or after the command.
func (l *logging) flags() []cli.Flag {
	return []cli.Flag{
		flag("log-format", settings.Var(&l.format, l.format, settings.OneOf("text", "json")), "`FORMAT` of the log: text or json"),
		flag("log-level", settings.Var(&l.level, strings.ToLower(l.level.String()), logLevel), "least `LEVEL` that is logged: debug, info, warn or error"),
	}
}

func logLevel(s string) (l slog.Level, err error) {
	if l.UnmarshalText([]byte(s)) != nil {
		err = errors.New("must be one of debug, info, warn, error")
	}
	return l, err
}

// open returns the log, in which variables that set nothing stand first.
func (l *logging) open(app *cli.App) *slog.Logger {
	options := &slog.HandlerOptions{Level: l.level}
	log := slog.New(slog.NewTextHandler(l.out, options))
	if l.format == "json" {
		log = slog.New(slog.NewJSONHandler(l.out, options))
	}
	for _, u := range l.sources.Unknown(app.Commands) {
		log.Warn("the variable is no setting of quicvpn", "variable", u.Name, "nearest", u.Nearest)
	}
	return log
}

// serve runs a role until it fails or a signal ends it. A second signal ends
// the process at once.
func serve(ctx context.Context, log *slog.Logger, run func(context.Context) error) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	defer context.AfterFunc(ctx, func() {
		stop()
		log.Info("stopping; a second signal stops at once")
	})()
	return run(ctx)
}

func stateDir(dir *string, shown, usage string) cli.Flag {
	*dir = shown
	return flag("state-dir", settings.Var(dir, shown, settings.String), usage)
}

func initCommand() *cli.Command {
	var o gateway.InitOptions
	return &cli.Command{
		Name:  "init",
		Usage: "make a gateway's identity and print its first join token",
		Flags: []cli.Flag{
			stateDir(&o.Dir, gatewayDir, "`DIR` for the identity, tokens and addresses"),
			flag("address", settings.Var(&o.Address, "", dialAddress), "`HOST:PORT` at which clients reach the gateway (UDP); required"),
			flag("pool", settings.Var(&o.Pool4, "10.91.0.0/16", settings.PrefixOf(4, 8, 30)), "IPv4 `PREFIX` of the clients' addresses"),
			flag("pool6", settings.Var(&o.Pool6, "a random fdxx:xxxx:xxxx::/64", settings.PrefixOf(6, 16, 126)), "IPv6 `PREFIX` of the clients' addresses"),
		},
		Action: func(c *cli.Context) error {
			if o.Address == "" {
				return usagef("no address: give --address HOST:PORT, the name or IP address and the UDP port at which clients reach this gateway")
			}
			t, err := gateway.Init(o)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.App.ErrWriter, "The gateway's identity is in %s: keep a backup, clients know the gateway by it. Start it:\n\n"+
				"    quicvpn gateway run --state-dir %s\n\n", o.Dir, o.Dir)
			return printToken(c, t)
		},
	}
}

func dialAddress(s string) (string, error) {
	if token.CheckAddress(s) != nil {
		return "", errors.New("not an address that clients can dial: write it as gw.example.com:443, 192.0.2.1:443 or [2001:db8::1]:443")
	}
	return s, nil
}

func gatewayCommand(logs *logging) *cli.Command {
	var cfg gateway.Config
	return &cli.Command{
		Name:  "run",
		Usage: "run a gateway until a signal stops it",
		Flags: append([]cli.Flag{
			stateDir(&cfg.StateDir, gatewayDir, "`DIR` that \"gateway init\" filled"),
			flag("listen", settings.Var(&cfg.Listen, "port of --address", settings.ListenAddr), "UDP `IP:PORT` to listen on"),
			flag("egress", settings.Var(&cfg.Egress, cfg.Egress.String(), settings.Named(gateway.EgressAuto, gateway.EgressKernel, gateway.EgressUserspace)), "`WAY` of clients' packets out: kernel (needs NET_ADMIN and /dev/net/tun), userspace (ordinary sockets, no privilege) or auto (kernel where it can be)"),
			flag("interface", settings.Var(&cfg.Interface, "quicvpn-gw", settings.Interface), "`NAME` of the TUN device"),
			flag("queues", settings.Var(&cfg.Queues, "by CPUs", settings.Int(1, 256)), "`NUMBER` of queues of the TUN device, 1 to 256"),
			flag("mtu", settings.Var(&cfg.MTU, "by path", settings.Int(1280, 1500)), "largest packet in `BYTES`, 1280 to 1500"),
			flag("congestion", settings.Var(&cfg.Congestion, "bbr", congestion), "`CONTROL` of how fast it sends: bbr, or newreno as quic-go has it"),
			flag("udp-offload", settings.Var(&cfg.DisableOffload, "on", off), "`SWITCH` UDP segmentation and merging by the kernel on, or off where a network card does them badly"),
			flag("dns", settings.Append(&cfg.NameServers, nameServer), "`ADDRESS` of a name server, with or without a port, for clients whose own the gateway refuses; may be repeated; off refuses their queries too (default: those in /etc/resolv.conf)"),
		}, logs.flags()...),
		Action: func(c *cli.Context) error {
			if slices.Contains(cfg.NameServers, noNameServer) {
				if len(cfg.NameServers) > 1 {
					return usagef("--dns off stands alone: name servers, or off")
				}
				cfg.NameServers, cfg.DisableDNS = nil, true
			}
			cfg.Log = logs.open(c.App)
			return serve(c.Context, cfg.Log, func(ctx context.Context) error {
				g, err := gateway.New(cfg)
				if err != nil {
					return err
				}
				return g.Run(ctx)
			})
		},
	}
}

// noNameServer is what off stands for in the place of a name server.
var noNameServer netip.AddrPort

func nameServer(s string) (netip.AddrPort, error) {
	if s == "off" {
		return noNameServer, nil
	}
	a, err := settings.NameServer(s)
	if err != nil {
		err = fmt.Errorf("%w; or off", err)
	}
	return a, err
}

func sidecarCommand(logs *logging) *cli.Command {
	var cfg sidecar.Config
	var masque sidecar.Masque
	var inArguments []string
	return &cli.Command{
		Name:  "sidecar",
		Usage: "carry this network namespace's traffic to a gateway until a signal stops it",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "token-file", Usage: "`FILE` that holds the join token [$" + settings.EnvName("token-file") + "]"},
			flag("token", settings.Var(&cfg.Token, "", token.Parse), "the join `TOKEN` itself; anyone can see it in ps"),
			stateDir(&cfg.StateDir, sidecarDir, "`DIR` for the client's key"),
			flag("interface", settings.Var(&cfg.Interface, "quicvpn0", settings.Interface), "`NAME` of the TUN device"),
			flag("queues", settings.Var(&cfg.Queues, "by CPUs", settings.Int(1, 256)), "`NUMBER` of queues of the TUN device, 1 to 256"),
			flag("mtu", settings.Var(&cfg.MTU, "by path", settings.Int(1280, 1500)), "largest packet in `BYTES`, 1280 to 1500"),
			flag("congestion", settings.Var(&cfg.Congestion, "bbr", congestion), "`CONTROL` of how fast it sends: bbr, or newreno as quic-go has it"),
			flag("udp-offload", settings.Var(&cfg.DisableOffload, "on", off), "`SWITCH` UDP segmentation and merging by the kernel on, or off where a network card does them badly"),
			flag("kill-switch", settings.Var(&cfg.KillSwitch, cfg.KillSwitch.String(), settings.Named(sidecar.KillSwitchOn, sidecar.KillSwitchKeep, sidecar.KillSwitchOff)), "`WHEN` rules block what would leave beside the tunnel: on (until a graceful stop), keep (after it too) or off"),
			flag("tun", settings.Var(&cfg.DisableTUN, "on", off), "`SWITCH` the TUN device on, or off together with routes and kill switch: what goes through --socks5 goes through the tunnel, and no privilege is needed"),
			flag("masque", settings.Var(&masque, "", sidecar.ParseMasque), "`URL` of an HTTP/3 proxy of another make, https://[USER:PASSWORD@]HOST[:PORT], that the proxies use in the place of a gateway; with --tun=off, without a token"),
			flag("socks5", settings.Append(&cfg.Proxies, proxyAddr), "`IP:PORT` of a proxy for SOCKS5 and HTTP (CONNECT and http:// URLs), both on this port; other than a loopback address it needs --proxy-credentials-file; may be repeated"),
			&cli.StringFlag{Name: "proxy-credentials-file", Usage: "`FILE` that holds the users of the proxies, USER:PASSWORD, one a line [$" + settings.EnvName("proxy-credentials-file") + "]"},
			flag("proxy-credentials", settings.Var(&cfg.ProxyAuth, "", socks5.ParseCredentials), "`USER:PASSWORD` itself; anyone can see it in ps"),
			flag("tcp", settings.Var(&cfg.TCP, cfg.TCP.String(), settings.Named(sidecar.TCPAuto, sidecar.TCPPacket, sidecar.TCPFlow)), "`WAY` of TCP connections: packet (as they come), flow (ended here, and opened anew by the gateway: fast where it is far away) or auto (flow from a round trip of 5 ms on)"),
			flag("tcp-open", settings.Var(&cfg.TCPOpen, cfg.TCPOpen.String(), settings.Named(sidecar.TCPOpenAuto, sidecar.TCPOpenEarly, sidecar.TCPOpenStrict)), "`WHEN` a connection is open for a program: strict (when the gateway has connected), early (at once; one that fails is reset then), or auto (early where the gateway has connected lately)"),
			&cli.BoolFlag{Name: "resolv-conf", Destination: &cfg.ResolvConf, Usage: "have /etc/resolv.conf name the gateway, which resolves names, until the sidecar ends [$" + settings.EnvName("resolv-conf") + "]"},
		}, logs.flags()...),
		Before: func(c *cli.Context) error {
			for _, name := range []string{"token", "proxy-credentials"} {
				if c.IsSet(name) {
					inArguments = append(inArguments, name)
				}
			}
			return nil
		},
		Action: func(c *cli.Context) error {
			if err := checkProxies(cfg); err != nil {
				return err
			}
			if masque != (sidecar.Masque{}) {
				return runMasque(c, masque, cfg, logs)
			}
			if cfg.Token == (token.Token{}) {
				return usagef("no join token: give --token-file FILE, or the file as QUICVPN_TOKEN_FILE or /run/secrets/quicvpn_token; " +
					`"quicvpn gateway init" and "quicvpn token create" print tokens`)
			}
			cfg.Log = logs.open(c.App)
			for _, name := range inArguments {
				cfg.Log.Warn("--" + name + " shows a secret to everybody who can run ps on this host: use --" + name + "-file")
			}
			return serve(c.Context, cfg.Log, func(ctx context.Context) error {
				s, err := sidecar.New(cfg)
				if err != nil {
					return err
				}
				return s.Run(ctx)
			})
		},
	}
}

// runMasque has the proxies use a proxy of another make.
func runMasque(c *cli.Context, masque sidecar.Masque, cfg sidecar.Config, logs *logging) error {
	if !cfg.DisableTUN {
		return usagef("--masque carries no packets: give --tun=off as well, and --socks5 127.0.0.1:1080 for programs that use a proxy")
	}
	if cfg.Token != (token.Token{}) {
		return usagef("--masque stands in the place of a gateway: leave out either it or the join token")
	}
	cfg.Log = logs.open(c.App)
	return serve(c.Context, cfg.Log, func(ctx context.Context) error { return masque.Run(ctx, cfg) })
}

// checkProxies refuses what cannot be meant.
func checkProxies(cfg sidecar.Config) error {
	for _, p := range cfg.Proxies {
		if !p.Addr().IsLoopback() && cfg.ProxyAuth == nil {
			return usagef("--socks5 %v is not a loopback address, and everybody who reaches it could use the tunnel: "+
				"give --proxy-credentials-file FILE, with USER:PASSWORD in it, or listen on 127.0.0.1:%d", p, p.Port())
		}
	}
	if cfg.DisableTUN && cfg.Proxies == nil {
		return usagef("--tun=off leaves no way into the tunnel: give --socks5 127.0.0.1:1080, for programs that use a proxy")
	}
	if cfg.DisableTUN && cfg.ResolvConf {
		return usagef("--resolv-conf needs the TUN device: with --tun=off leave names to the proxy, by socks5h:// in place of socks5://")
	}
	return nil
}

func proxyAddr(s string) (netip.AddrPort, error) {
	a, err := settings.ListenAddr(s)
	if err != nil {
		return a, errors.New("not an IP address and a port: write it as 127.0.0.1:1080, [::1]:1080 or, for all addresses, :1080")
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
}

func driverCommand(logs *logging) *cli.Command {
	var cfg driver.Config
	return &cli.Command{
		Name:  "driver",
		Usage: "serve Docker as its network driver until a signal stops it: docker network create -d quicvpn",
		Flags: append([]cli.Flag{
			flag("token-file", settings.Var(&cfg.TokenFile, "", settings.String), "`FILE` that holds the join token of networks that are created without -o token-file; it is read at each creation"),
			stateDir(&cfg.StateDir, driverDir, "`DIR` for networks, their keys and tokens"),
			flag("plugin-dir", settings.Var(&cfg.PluginDir, "/run/docker/plugins", settings.String), "`DIR` in which Docker looks for the driver's socket"),
			flag("docker-socket", settings.Var(&cfg.DockerSocket, "/run/docker.sock", settings.String), "Docker's own `SOCKET`, which is asked after a start for networks that were removed meanwhile"),
			flag("congestion", settings.Var(&cfg.Congestion, "bbr", congestion), "`CONTROL` of how fast it sends: bbr, or newreno as quic-go has it"),
			flag("udp-offload", settings.Var(&cfg.DisableOffload, "on", off), "`SWITCH` UDP segmentation and merging by the kernel on, or off where a network card does them badly"),
		}, logs.flags()...),
		Action: func(c *cli.Context) error {
			cfg.Log = logs.open(c.App)
			return serve(c.Context, cfg.Log, func(ctx context.Context) error {
				d, err := driver.New(cfg)
				if err != nil {
					return err
				}
				if err := notifyReady(os.Getenv("NOTIFY_SOCKET")); err != nil {
					return errors.Join(err, d.Close())
				}
				return d.Run(ctx)
			})
		},
	}
}

// off reads a switch that a Config has the other way round.
func off(s string) (bool, error) {
	if s != "on" && s != "off" {
		return false, errors.New("must be one of on, off")
	}
	return s == "off", nil
}

// congestion reads the name of a congestion control.
func congestion[T interface {
	~string
	Check() error
}](s string) (T, error) {
	if s == "" || T(s).Check() != nil {
		return "", errors.New("must be one of bbr, newreno")
	}
	return T(s), nil
}
