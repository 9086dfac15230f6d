package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/quicvpn/quicvpn/gateway"
)

func clientCommand() *cli.Command {
	return &cli.Command{
		Name:        "client",
		Usage:       "the clients of a gateway, also while it runs",
		Subcommands: []*cli.Command{clientListCommand(), clientRemoveCommand()},
	}
}

func clientListCommand() *cli.Command {
	var dir string
	var asJSON bool
	return &cli.Command{
		Name:  "list",
		Usage: "list the clients that hold addresses, whether they are here or not",
		Flags: []cli.Flag{
			stateDir(&dir, gatewayDir, "the gateway's `DIR`"),
			jsonFlag(&asJSON),
		},
		Action: func(c *cli.Context) error {
			clients, err := gateway.ListClients(dir)
			if err != nil {
				return err
			}
			rows := make([]clientRow, len(clients))
			for i, info := range clients {
				rows[i] = newClientRow(info)
			}
			if asJSON {
				enc := json.NewEncoder(c.App.Writer)
				enc.SetIndent("", "  ")
				return enc.Encode(rows)
			}
			return printClients(c.App.Writer, rows)
		},
	}
}

func clientRemoveCommand() *cli.Command {
	var dir string
	return &cli.Command{
		Name:      "remove",
		Usage:     "end a client's session and free its addresses; by a token in force it may come back",
		ArgsUsage: "KEY|ADDRESS",
		Flags:     []cli.Flag{stateDir(&dir, gatewayDir, "the gateway's `DIR`")},
		Action: func(c *cli.Context) error {
			info, err := gateway.RemoveClient(dir, c.Args().First())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.App.Writer, "removed %s (%s, %s)\n", info.ID, info.Name, info.Addr4)
			return err
		},
	}
}

// A clientRow is a client as "client list" shows it.
type clientRow struct {
	Key     string         `json:"key"`
	Token   string         `json:"token"`
	Network string         `json:"network"`
	Addrs   []netip.Addr   `json:"addresses"`
	Block   []netip.Prefix `json:"block,omitempty"`
	Since   time.Time      `json:"since"`
}

func newClientRow(c gateway.ClientInfo) clientRow {
	r := clientRow{Key: c.ID.String(), Token: c.Name, Network: c.Network, Addrs: []netip.Addr{c.Addr4, c.Addr6}, Since: c.Since}
	if c.Block4.IsValid() {
		r.Block = []netip.Prefix{c.Block4, c.Block6}
	}
	return r
}

// keyLength is how much of a key the table shows: enough to tell it by.
const keyLength = 12

func printClients(w io.Writer, rows []clientRow) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "KEY\tTOKEN\tNETWORK\tADDRESSES\tBLOCK\tSINCE")
	for _, r := range rows {
		block := "none"
		if len(r.Block) > 0 {
			block = strings.Trim(fmt.Sprint(r.Block), "[]")
		}
		fmt.Fprintln(table, strings.Join([]string{r.Key[:keyLength], r.Token, r.Network,
			strings.Trim(fmt.Sprint(r.Addrs), "[]"), block, r.Since.Format(time.RFC3339)}, "\t"))
	}
	return table.Flush()
}
