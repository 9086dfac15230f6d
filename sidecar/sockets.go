package sidecar

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	sockDestroy = 21 // SOCK_DESTROY (linux/sock_diag.h)

	// struct inet_diag_req_v2 is family, protocol, extensions, padding, states and
	// a struct inet_diag_sockid; struct inet_diag_msg begins with four bytes and
	// such an ID (linux/inet_diag.h). The ID has both ports, then the addresses.
	diagRequestHead, diagMessageHead = 8, 4
	diagID, diagSource               = 48, 4
)

// endConnections ends the TCP and UDP sockets that have one of the addresses for
// their source. What they still had to send would go out in clear once nothing
// stops it. A kernel that cannot do it is left alone.
func endConnections(own []netip.Addr) error {
	var errs []error
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			head := make([]byte, diagRequestHead, diagRequestHead+diagID)
			head[0], head[1] = family, protocol
			copy(head[4:], []byte{0xff, 0xff, 0xff, 0xff}) // in any state
			dump := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
			dump.AddRawData(append(head, make([]byte, diagID)...))
			sockets, err := dump.Execute(unix.NETLINK_INET_DIAG, 0)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			for _, s := range sockets {
				if len(s) < diagMessageHead+diagID {
					continue
				}
				id := s[diagMessageHead:][:diagID]
				if !slices.Contains(own, diagSourceAddr(family, id)) {
					continue
				}
				end := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
				end.AddRawData(append(slices.Clone(head), id...))
				if _, err := end.Execute(unix.NETLINK_INET_DIAG, 0); err != nil && !errors.Is(err, unix.ENOENT) {
					errs = append(errs, err)
				}
			}
		}
	}
	for _, err := range errs {
		if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EPROTONOSUPPORT) {
			return fmt.Errorf("end the connections of the tunnel: %w", err)
		}
	}
	return nil
}

func diagSourceAddr(family uint8, id []byte) netip.Addr {
	if family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(id[diagSource:]))
	}
	return netip.AddrFrom16([16]byte(id[diagSource:])).Unmap()
}
