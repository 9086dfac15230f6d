// Command toolbox is the only program of dockerlab's smallest image: a server
// and a user in a container. On the host it is the first process of an engine.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

const usage = `usage: toolbox COMMAND

In containers:
  sleep                     wait for SIGTERM
  serve                     until SIGTERM: HTTP on port 80 ("/" says who asked,
                            "/bytes/N" has N bytes), echo on TCP and UDP port 7
  get [-interface NAME] URL print a page
  echo tcp|udp ADDRESS TEXT send a text to an echo server, print what comes back
  associate PROXY ADDRESS SIZE
                            send a datagram to an echo server by a SOCKS5 proxy,
                            wait for its echo
  chat ADDRESS DURATION     keep one TCP connection to an echo server busy, print
                            how it went as JSON
  resolve NAME              print the addresses of a name, sorted, one a line
  ping ADDRESS              wait a second for the answer to an echo request

On the host:
  init DIR                  set up a Docker host's mounts, be its first process
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "toolbox:", err)
		stop()
		os.Exit(1)
	}
}

// commands have a fixed number of arguments, but for get.
var commands = map[string]struct {
	args int
	run  func(ctx context.Context, args []string) error
}{
	"sleep":     {0, func(ctx context.Context, _ []string) error { <-ctx.Done(); return nil }},
	"serve":     {0, serve},
	"get":       {-1, get},
	"echo":      {3, echo},
	"associate": {3, associate},
	"chat":      {2, chat},
	"resolve":   {1, resolve},
	"ping":      {1, ping},
	"init":      {1, initialize},
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 {
		c, ok := commands[args[0]]
		if args = args[1:]; ok && (c.args < 0 || len(args) == c.args) {
			return c.run(ctx, args)
		}
	}
	fmt.Fprint(os.Stderr, usage)
	return errors.New("no such command, or not its number of arguments")
}
