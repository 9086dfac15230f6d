package sidecar

import (
	"fmt"
	"net"
	"strconv"

	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tun"
)

// refuse is the error about a field of the configuration.
func refuse(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...))
}

// gatewayOf returns where a token says that the gateway is.
func gatewayOf(t token.Token) (host string, port uint16, err error) {
	host, text, err := net.SplitHostPort(t.Address)
	if err != nil {
		return "", 0, refuse("Token", "no gateway address: give the join token that `quicvpn token create` printed on the gateway")
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || host == "" {
		return "", 0, refuse("Token", "the gateway's address %q is not host:port: make another token on the gateway", t.Address)
	}
	return host, uint16(n), nil
}

// queuesOf returns a number of queues, filled in where it is left open.
func queuesOf(n int) (int, error) {
	if n < 0 || n > tun.MaxQueues {
		return 0, refuse("Queues", "%d is out of range: 1 to %d, or 0 for one a CPU", n, tun.MaxQueues)
	}
	if n == 0 {
		return tun.DefaultQueues(), nil
	}
	return n, nil
}

func checkMTU(mtu int) error {
	if mtu != 0 && (mtu < minIPv6MTU || mtu > maxMTU) {
		return refuse("MTU", "%d is out of range: %d to %d, or 0 to follow the path", mtu, minIPv6MTU, maxMTU)
	}
	return nil
}
