package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/quicvpn/quicvpn/internal/settings"
	"github.com/quicvpn/quicvpn/sidecar"
)

func healthcheckCommand() *cli.Command {
	var dir string
	timeout := 3 * time.Second
	return &cli.Command{
		Name:  "healthcheck",
		Usage: "ask the gateway for an answer through the running sidecar's tunnel: exit code 0 if it comes",
		Flags: []cli.Flag{
			stateDir(&dir, sidecarDir, "the sidecar's state `DIR`"),
			flag("timeout", settings.Var(&timeout, timeout.String(), positive), "longest `TIME` to wait for the answer, such as 3s"),
		},
		Action: func(c *cli.Context) error {
			line, err := sidecar.CheckHealth(c.Context, dir, timeout)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.App.Writer, line)
			return err
		},
	}
}

// positive reads a time span that is longer than nothing.
func positive(s string) (time.Duration, error) {
	d, err := settings.Duration(s)
	if err == nil && d == 0 {
		err = errors.New("must be longer than 0")
	}
	return d, err
}
