package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/quicvpn/quicvpn/gateway"
	"github.com/quicvpn/quicvpn/internal/settings"
	"github.com/quicvpn/quicvpn/internal/token"
)

func tokenCommand() *cli.Command {
	return &cli.Command{
		Name:        "token",
		Usage:       "the join tokens of a gateway, also while it runs",
		Subcommands: []*cli.Command{createCommand(), listCommand(), revokeCommand()},
	}
}

func createCommand() *cli.Command {
	var dir string
	var o gateway.TokenOptions
	return &cli.Command{
		Name:  "create",
		Usage: "make a join token and print it",
		Flags: []cli.Flag{
			stateDir(&dir, gatewayDir, "the gateway's `DIR`"),
			flag("name", settings.Var(&o.Name, "the token's ID", settings.String), "`NAME` to list and revoke it by"),
			flag("network", settings.Var(&o.Network, gateway.DefaultNetwork, settings.String), "`NETWORK` of its clients, who reach each other and no other network"),
			flag("allow", settings.Append(&o.Allow, settings.Prefix), "the `PREFIX` that its clients may reach, and nothing else; may be repeated"),
			flag("expires", settings.Var(&o.Expires, "never", settings.Duration), "`TIME` for which it enrols clients, such as 24h"),
			flag("uses", settings.Var(&o.Uses, "no limit", settings.Int(1, math.MaxInt32)), "`NUMBER` of clients that it enrols"),
		},
		Action: func(c *cli.Context) error {
			t, err := gateway.CreateToken(dir, o, time.Now())
			if err != nil {
				return err
			}
			return printToken(c, t)
		},
	}
}

// printToken prints a token alone on standard output, so that it can be
// redirected into a file.
func printToken(c *cli.Context, t token.Token) error {
	fmt.Fprint(c.App.ErrWriter, "The join token is a secret and is not shown again. On the client, save it in a file, then:\n\n"+
		"    quicvpn sidecar --token-file FILE    # for a machine, or a container\n"+
		"    quicvpn driver --token-file FILE     # for networks of Docker\n"+
		"    quicvpn sidecar --tun=off --socks5 127.0.0.1:1080 --token-file FILE    # a proxy, which needs no privilege\n\n")
	if _, err := fmt.Fprintln(c.App.Writer, t.Encode()); err != nil {
		return fmt.Errorf("print join token: %w: revoke it, then create another", err)
	}
	return nil
}

func listCommand() *cli.Command {
	var dir string
	var asJSON bool
	return &cli.Command{
		Name:  "list",
		Usage: "list the join tokens",
		Flags: []cli.Flag{
			stateDir(&dir, gatewayDir, "the gateway's `DIR`"),
			jsonFlag(&asJSON),
		},
		Action: func(c *cli.Context) error {
			tokens, err := gateway.ListTokens(dir)
			if err != nil {
				return err
			}
			rows := make([]tokenRow, len(tokens))
			for i, t := range tokens {
				rows[i] = newTokenRow(t, time.Now())
			}
			if asJSON {
				enc := json.NewEncoder(c.App.Writer)
				enc.SetIndent("", "  ")
				return enc.Encode(rows)
			}
			return printTable(c.App.Writer, rows)
		},
	}
}

func jsonFlag(asJSON *bool) cli.Flag {
	return &cli.BoolFlag{Name: "json", Destination: asJSON, DisableDefaultText: true, Usage: "print JSON [$" + settings.EnvName("json") + "]"}
}

func revokeCommand() *cli.Command {
	var dir string
	return &cli.Command{
		Name:      "revoke",
		Usage:     "revoke a join token and end the sessions of the clients that it enrolled",
		ArgsUsage: "ID|NAME",
		Flags:     []cli.Flag{stateDir(&dir, gatewayDir, "the gateway's `DIR`")},
		Action: func(c *cli.Context) error {
			info, err := gateway.RevokeToken(dir, c.Args().First(), time.Now())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.App.Writer, "revoked %s (%s)\n", info.ID, info.Name)
			return err
		},
	}
}

// A tokenRow is a token as "token list" shows it.
type tokenRow struct {
	ID      string         `json:"id"`
	Name    string         `json:"name"`
	Network string         `json:"network"`
	State   string         `json:"state"`
	Used    int            `json:"used"`
	Uses    int            `json:"uses,omitempty"`
	Allow   []netip.Prefix `json:"allow,omitempty"`
	Created time.Time      `json:"created"`
	Expires time.Time      `json:"expires,omitzero"`
	Revoked time.Time      `json:"revoked,omitzero"`
}

// newTokenRow adds the state: whether the token enrols, and why not.
func newTokenRow(t gateway.TokenInfo, now time.Time) tokenRow {
	state := "active"
	switch {
	case !t.Revoked.IsZero():
		state = "revoked"
	case !t.Expires.IsZero() && !now.Before(t.Expires):
		state = "expired"
	case t.Uses > 0 && t.Used >= t.Uses:
		state = "used up"
	}
	return tokenRow{
		ID: t.ID, Name: t.Name, Network: t.Network, State: state, Used: t.Used, Uses: t.Uses,
		Allow: t.Allow, Created: t.Created, Expires: t.Expires, Revoked: t.Revoked,
	}
}

func printTable(w io.Writer, rows []tokenRow) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "ID\tNAME\tNETWORK\tSTATE\tUSED\tEXPIRES\tALLOW")
	for _, r := range rows {
		used := strconv.Itoa(r.Used)
		if r.Uses > 0 {
			used += " of " + strconv.Itoa(r.Uses)
		}
		expires := "never"
		if !r.Expires.IsZero() {
			expires = r.Expires.Format(time.RFC3339)
		}
		allow := "internet and network"
		if len(r.Allow) > 0 {
			allow = strings.Trim(fmt.Sprint(r.Allow), "[]")
		}
		fmt.Fprintln(table, strings.Join([]string{r.ID, r.Name, r.Network, r.State, used, expires, allow}, "\t"))
	}
	return table.Flush()
}
