package main

import (
	"fmt"
	"net"
)

// notifyReady tells systemd that this process's unit is up, as its Type=notify
// wants it (sd_notify(3)). The socket is what NOTIFY_SOCKET says; it is empty
// where nobody waits. A leading @ stands for the abstract namespace, for package
// net too.
func notifyReady(socket string) error {
	if socket == "" {
		return nil
	}
	c, err := net.Dial("unixgram", socket)
	if err == nil {
		defer c.Close()
		_, err = c.Write([]byte("READY=1"))
	}
	if err != nil {
		return fmt.Errorf("tell systemd that the driver is up: %w", err)
	}
	return nil
}
