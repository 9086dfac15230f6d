package settings

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"
)

func TestUnknown(t *testing.T) {
	flag := func(name string) cli.Flag { return &cli.StringFlag{Name: name} }
	commands := []*cli.Command{
		{Flags: []cli.Flag{flag("log-level"), flag("help"), flag("version")}},
		{Subcommands: []*cli.Command{{Flags: []cli.Flag{flag("state-dir"), flag("token"), flag("token-file"), flag("mtu")}}}},
	}
	sources := Sources{Environ: []string{
		"PATH=/bin", "NOT_QUICVPN_MTU=1", "QUICVPN", "QUICVPN_=",
		"QUICVPN_LOG_LEVEL=debug", "QUICVPN_STATE_DIR_FILE=/x", "QUICVPN_TOKEN_FILE=/x", "QUICVPN_MTU=1400",
		"QUICVPN_VERSION=v1", "QUICVPN_EMPTY=",
		"QUICVPN_SERVICE_HOST=x", "QUICVPN_GATEWAY_SERVICE_PORT=1", "QUICVPN_SERVICE_PORT_QUIC=1",
		"QUICVPN_PORT=x", "QUICVPN_PORT_443_UDP_ADDR=x",
		"QUICVPN_STATEDIR=/x", "QUICVPN_LOGLEVEL=debug", "QUICVPN_TOKEN_FILES=/x", "QUICVPN_Mtu=1", "QUICVPN_HELP=1",
	}}
	got := sources.Unknown(commands)
	want := []Unknown{
		{"QUICVPN_HELP", "QUICVPN_LOG_LEVEL"},
		{"QUICVPN_LOGLEVEL", "QUICVPN_LOG_LEVEL"},
		{"QUICVPN_Mtu", "QUICVPN_MTU"},
		{"QUICVPN_STATEDIR", "QUICVPN_STATE_DIR"},
		{"QUICVPN_TOKEN_FILES", "QUICVPN_TOKEN_FILE"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
