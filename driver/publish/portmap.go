package publish

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// PortMapOption is the key of Docker's port map among the options of the calls
// CreateEndpoint and ProgramExternalConnectivity.
const PortMapOption = "com.docker.network.portmap"

// binding is an entry of the port map, libnetwork's types.PortBinding. Its IP is
// the container's, which the driver knows better.
type binding struct {
	Proto       uint8 // an IP protocol number
	Port        uint16
	HostIP      string
	HostPort    uint16
	HostPortEnd uint16
}

// ParsePortMap reads Docker's port map. None, or null, is no ports.
func ParsePortMap(raw json.RawMessage) ([]Port, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	var bindings []binding
	if err := json.Unmarshal(raw, &bindings); err != nil {
		return nil, fmt.Errorf("read Docker's port map: %w", err)
	}
	var ports []Port
	for _, b := range bindings {
		p, err := b.published()
		if err != nil {
			return nil, err
		}
		ports = append(ports, p)
	}
	return ports, nil
}

func (b binding) published() (Port, error) {
	p := Port{Protocol: protocol(b.Proto), HostPort: b.HostPort, HostPortEnd: b.HostPortEnd, ContainerPort: b.Port}
	if b.HostIP != "" {
		a, err := netip.ParseAddr(b.HostIP)
		if err != nil {
			return p, fmt.Errorf("publish %v: the host's address %q is no IP address", p, b.HostIP)
		}
		p.HostIP = a.Unmap()
	}
	if p.HostPortEnd == p.HostPort {
		p.HostPortEnd = 0 // Docker's form of a single port
	}
	return p, p.validate()
}

func protocol(number uint8) string {
	switch number {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	}
	return "IP protocol " + strconv.Itoa(int(number))
}
