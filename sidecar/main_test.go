package sidecar

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// childVariable holds the settings of a sidecar process: the test binary plays
// it, in the namespace where it is started.
const childVariable = "QUICVPN_TEST_SIDECAR"

func TestMain(m *testing.M) {
	if settings, ok := os.LookupEnv(childVariable); ok {
		os.Exit(child(settings))
	}
	goleak.VerifyTestMain(m)
}

// childSettings are what a test wants of a sidecar process.
type childSettings struct {
	Address    string // of the gateway
	StateDir   string
	Interface  string
	Queues     int
	MTU        int
	KillSwitch KillSwitch
	ResolvConf bool
	// NoNftables and NoPolicyRouting have the kernel refuse what it would without
	// these parts.
	NoNftables, NoPolicyRouting bool
	// Pin of a real gateway; zero means the toy.
	Pin [32]byte
	// Link runs a Link alone, which asks for a block and announces prefixes, and
	// leaves for good when it is stopped.
	Link     bool
	Announce []netip.Prefix
	// Health looks after the sidecar of StateDir, for so long.
	Health time.Duration
}

// child is the main function of a sidecar process.
func child(settings string) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "FAILED:", err)
		return 1
	}
	var c childSettings
	if err := json.Unmarshal([]byte(settings), &c); err != nil {
		return fail(err)
	}
	if err := lackParts(c.NoNftables, c.NoPolicyRouting); err != nil {
		return fail(err)
	}
	before := goleak.IgnoreCurrent()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if c.Health > 0 {
		line, err := CheckHealth(ctx, c.StateDir, c.Health)
		if err != nil {
			return fail(err)
		}
		fmt.Println(line)
		return 0
	}
	if c.Link {
		if err := c.link(ctx, log); err != nil {
			return fail(err)
		}
		return 0
	}
	s, err := New(Config{
		Token:    token.Token{Address: c.Address, Pin: c.Pin},
		StateDir: c.StateDir, Interface: c.Interface, Queues: c.Queues, MTU: c.MTU,
		KillSwitch: c.KillSwitch, ResolvConf: c.ResolvConf, Log: log,
	})
	if err != nil {
		return fail(err)
	}
	if c.Pin == [32]byte{} {
		s.dial = dialToy
	}
	err = s.Run(ctx)
	stop()
	signal.Reset()
	if leaked := goleak.Find(before, goleak.IgnoreTopFunction("os/signal.loop")); leaked != nil {
		return fail(leaked)
	}
	fds, e := netlab.Descriptors(os.Getpid())
	if e != nil {
		return fail(e)
	}
	for _, fd := range fds {
		if strings.HasPrefix(fd, "socket:") || strings.Contains(fd, "tun") {
			err = errors.Join(err, fmt.Errorf("an open descriptor was left: %s", fd))
		}
	}
	if err != nil {
		return fail(err)
	}
	return 0
}

// link runs a Link that logs what it is told.
func (c childSettings) link(ctx context.Context, log *slog.Logger) error {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return err
	}
	var l *Link
	tell := func() { log.Info("told", "mtu", l.MTU(), "peers", l.Peers(), "gateway", l.Status().Gateway) }
	l, err = NewLink(LinkConfig{
		Token: token.Token{Address: c.Address, Pin: c.Pin}, Key: key, Block: true, Announce: c.Announce, Log: log,
		Connected: func(tunnel.Grant) tunnel.Sink { tell(); return nil },
		Changed:   tell,
	})
	if err != nil {
		return err
	}
	ended := make(chan error)
	go func() { ended <- l.Run(context.Background()) }()
	<-ctx.Done()
	wait, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return errors.Join(l.Leave(wait), <-ended)
}

// A lab is a topology with a toy gateway in it.
type lab struct {
	*netlab.Topology
	t   *testing.T
	gw  *toyGateway
	ctx context.Context
	dir string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	t.Cleanup(cancel)
	top := netlab.NewTopology(t, netlab.LinkConfig{})
	l := &lab{Topology: top, t: t, gw: newToyGateway(t, top.Gateway), ctx: ctx, dir: t.TempDir()}
	l.ping(netlab.GatewayAddr4, netlab.GatewayAddr6) // IPv6 takes a moment to settle
	return l
}

// snapshot describes the client's namespace, but for the number of the TUN
// device, and a key that the kernel makes when it thinks of a link-local address.
func (l *lab) snapshot() netlab.Snapshot {
	l.t.Helper()
	lines := l.Client.Snapshot()
	for i, line := range lines {
		lines[i] = deviceNumber.ReplaceAllString(line, "ip: N: ${1}0")
	}
	slices.Sort(lines)
	return slices.DeleteFunc(lines, func(line string) bool { return strings.Contains(line, "/stable_secret") })
}

var deviceNumber = regexp.MustCompile(`^ip: [0-9]+: (quicvpn)0`)

// command prepares a sidecar process in the client's namespace.
func (l *lab) command(c childSettings, wrapper ...string) *netlab.Cmd {
	l.t.Helper()
	if c.Address == "" {
		c.Address = fmt.Sprintf("%v:%d", netlab.GatewayAddr4, toyPort)
	}
	if c.StateDir == "" {
		c.StateDir = l.dir
	}
	settings, err := json.Marshal(c)
	if err != nil {
		l.t.Fatal(err)
	}
	args := append(wrapper, os.Args[0])
	cmd := l.Client.Command(l.ctx, args[0], args[1:]...)
	// The race detector's pause at the end is for other programs.
	cmd.Env = append(os.Environ(), childVariable+"="+string(settings), "GORACE=atexit_sleep_ms=0")
	return cmd
}

// start starts a sidecar and waits until its tunnel carries packets.
func (l *lab) start(c childSettings) *netlab.Cmd {
	l.t.Helper()
	cmd := l.command(c)
	if err := cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	if err := cmd.WaitLog(l.ctx, "msg=connected"); err != nil {
		l.t.Fatal(err)
	}
	return cmd
}

func (l *lab) stop(cmd *netlab.Cmd) {
	l.t.Helper()
	complaints := func() int { return strings.Count(cmd.Log(), "cannot keep the namespace") }
	before := complaints()
	if err := cmd.Stop(testPatience); err != nil {
		l.t.Fatalf("stop: %v\n%s", err, cmd.Log())
	}
	if complaints() > before {
		l.t.Errorf("it complains of what it takes away itself:\n%s", cmd.Log())
	}
}

// ping waits until the address answers through the tunnel.
func (l *lab) ping(addrs ...netip.Addr) {
	l.t.Helper()
	for _, a := range addrs {
		ctx, cancel := context.WithTimeout(l.ctx, testPatience)
		if err := l.Client.WaitPing(ctx, a); err != nil {
			l.t.Errorf("%v\n%s", err, l.dump())
		}
		cancel()
	}
}

// dump shows the client's namespace.
func (l *lab) dump() string {
	var b strings.Builder
	for _, args := range []string{"ip addr", "ip rule", "ip -6 rule", "ip route show table 20822", "ip -6 route show table 20822", "nft list ruleset"} {
		f := strings.Fields(args)
		out, _ := l.Client.Command(l.ctx, f[0], f[1:]...).CombinedOutput()
		fmt.Fprintf(&b, "--- %s\n%s", args, out)
	}
	return b.String()
}

// sh runs a command in the client's namespace, which must succeed.
func (l *lab) sh(args ...string) string {
	l.t.Helper()
	out, err := l.Client.Command(l.ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		l.t.Fatalf("%v: %v: %s", args, err, out)
	}
	return string(out)
}

// testPatience is how long tests wait for what must happen; machines may be busy.
const testPatience = 30 * time.Second

// eventually waits until ok returns nil.
func (l *lab) eventually(ok func() error) {
	l.t.Helper()
	deadline := time.Now().Add(testPatience)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("after %v: %v\n%s", testPatience, err, l.dump())
		}
		time.Sleep(20 * time.Millisecond)
	}
}
