// Command demo shows a tunnel from end to end on this machine: in network
// namespaces, or on its Docker Engine. It runs the roles as a user would,
// fetches pages, measures, and looks at every packet on the way to the gateway.
// It needs root, and leaves nothing behind however it ends.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	toolbox := flag.String("docker", "", "show it on the machine's Docker Engine; `TOOLBOX` is dockerlab's")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: demo [-docker TOOLBOX] PATH-OF-QUICVPN")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	s := &stage{out: os.Stdout}
	binary, err := filepath.Abs(flag.Arg(0))
	if err == nil {
		err = netlab.Main(ctx, "quicvpn-demo", func(running context.Context, tb netlab.TB) {
			s.tb = quiet{tb, ctx}
			if *toolbox != "" {
				(&dockerDemo{stage: s, binary: binary, toolbox: *toolbox}).run(running)
				return
			}
			(&demo{stage: s, binary: binary}).run(running)
		})
	}
	if s.left != nil {
		err = fmt.Errorf("something is left behind, remove it by hand: %w", s.left)
	} else if ctx.Err() != nil {
		fmt.Fprintln(os.Stderr, "interrupted; nothing was left behind")
		os.Exit(128 + int(syscall.SIGINT))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo: FAILED:", err)
		os.Exit(1)
	}
}

// quiet shows no logs of what was interrupted.
type quiet struct {
	netlab.TB
	ctx context.Context // done when the user interrupts
}

func (q quiet) Logf(format string, args ...any) {
	if q.ctx.Err() == nil {
		q.TB.Logf(format, args...)
	}
}

// A stage is where a demo is shown.
type stage struct {
	tb   netlab.TB
	out  io.Writer
	left error // why something could not be removed
}

func (s *stage) say(what, format string, args ...any) {
	fmt.Fprintf(s.out, "%-16s %s\n", what, fmt.Sprintf(format, args...))
}

// check ends the demo where something failed.
func (s *stage) check(what string, err error) {
	if err != nil {
		s.tb.Fatalf("%s: %v", what, err)
	}
}
