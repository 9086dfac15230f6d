package sidecar

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// routeGroups are the changes that concern us, of links, addresses, routes and
// rules.
const routeGroups = 1<<(unix.RTNLGRP_LINK-1) |
	1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
	1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1) |
	1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1)

// A watch signals that the kernel reported a change. What has changed is not
// looked at: reports can be lost, so that the state itself is read each time.
type watch struct {
	conn   *nl.Conn
	closed atomic.Bool
	done   chan struct{}
}

// newWatch watches multicast groups of a netlink family.
func newWatch(family int, groups uint32, changed chan<- struct{}) (*watch, error) {
	conn, err := nl.Dial(family, &nl.Config{Groups: groups})
	if err != nil {
		return nil, fmt.Errorf("watch the kernel's changes: %w", err)
	}
	w := &watch{conn: conn, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		for {
			_, err := conn.Receive()
			if w.closed.Load() || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) {
				return
			}
			// Reports that were lost (ENOBUFS) or not understood are changes too.
			kick(changed)
		}
	}()
	return w, nil
}

// Close ends the watch.
func (w *watch) Close() error {
	if w.closed.Swap(true) {
		return nil
	}
	err := w.conn.Close()
	<-w.done
	return err
}
