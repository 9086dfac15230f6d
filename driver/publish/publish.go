// Package publish makes ports of a container reachable at the host, as
// `docker run -p` asks: Docker leaves that to the network's driver.
//
// A container on a quicvpn network has a TUN device and nothing else: there is no
// bridge by which the host could forward packets to it. So each published port is
// a listener in the host's network namespace, and for each of its clients a socket
// is made inside the container's namespace, which connects to the container's own
// address there. No packet filter, address translation or route is involved, and
// nothing passes the tunnel.
//
// The price: the container sees its own address as the client's, never the true
// one. Where an app must know it, publish a reverse proxy in its place and have
// that one tell (X-Forwarded-For), or reach the app through the tunnel.
package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
)

// A Port is one published port.
type Port struct {
	// Protocol is tcp or udp.
	Protocol string
	// HostIP is the address of the host to listen on; the zero value is all of
	// them, IPv4 and IPv6.
	HostIP netip.Addr
	// HostPort is the port to listen on; zero leaves the choice to the system.
	HostPort uint16
	// HostPortEnd makes HostPort the first of a range, of which the first free one
	// is taken; zero means that there is no range.
	HostPortEnd uint16
	// ContainerPort is where the container listens.
	ContainerPort uint16
}

// String returns the port as `docker ps` shows it, such as
// 127.0.0.1:8080->80/tcp.
func (p Port) String() string {
	return fmt.Sprintf("%s->%d/%s", p.host(), p.ContainerPort, p.Protocol)
}

// host returns what is listened on, such as 127.0.0.1:8080.
func (p Port) host() string {
	port := fmt.Sprint(p.HostPort)
	if p.last() != p.HostPort {
		port += fmt.Sprintf("-%d", p.last())
	}
	switch {
	case !p.HostIP.IsValid():
		return port
	case p.HostIP.Is6():
		return "[" + p.HostIP.String() + "]:" + port
	default:
		return p.HostIP.String() + ":" + port
	}
}

func (p Port) last() uint16 { return max(p.HostPort, p.HostPortEnd) }

func (p Port) validate() error {
	switch {
	case p.Protocol == "sctp":
		return fmt.Errorf("publish %v: quicvpn publishes tcp and udp ports, not sctp", p)
	case p.Protocol != "tcp" && p.Protocol != "udp":
		return fmt.Errorf("publish %v: the protocol must be tcp or udp", p)
	case p.ContainerPort == 0:
		return fmt.Errorf("publish %v: the container's port must not be 0", p)
	case p.HostPortEnd != 0 && p.HostPortEnd < p.HostPort, p.HostPort == 0 && p.HostPortEnd != 0:
		return fmt.Errorf("publish %v: the host's ports %d-%d are no range", p, p.HostPort, p.HostPortEnd)
	}
	return nil
}

// Listeners are the published ports of one container.
type Listeners struct {
	ports   []Port
	servers []server
	cancel  context.CancelFunc
	running sync.WaitGroup
}

// A server is a socket of the host that listens.
type server interface {
	// serve returns, once the socket is closed and ctx done, when all that it
	// started has ended.
	serve(ctx context.Context)
	port() uint16
	Close() error
}

// Listen publishes all the ports, or none and returns an error. The container's
// namespace need not be there yet: it is entered for each client. A nil log
// discards.
func Listen(ports []Port, t Target, log *slog.Logger) (*Listeners, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return listen(ports, &container{
		Target: t, log: log, limit: limit, idleUnanswered: idleUnanswered, idleAnswered: idleAnswered,
	})
}

func listen(ports []Port, to *container) (*Listeners, error) {
	ctx, cancel := context.WithCancel(context.Background())
	l := &Listeners{cancel: cancel}
	for _, p := range ports {
		s, err := open(p, to)
		if err != nil {
			return nil, errors.Join(err, l.Close())
		}
		chosen := p.HostPort != s.port()
		p.HostPort, p.HostPortEnd = s.port(), 0
		if chosen {
			to.log.Info("chose a host port to publish", "port", p)
		}
		l.ports = append(l.ports, p)
		l.servers = append(l.servers, s)
	}
	for _, s := range l.servers {
		l.running.Go(func() { s.serve(ctx) })
	}
	return l, nil
}

// Ports returns the published ports with the host's ports that were chosen, in
// the order of Listen.
func (l *Listeners) Ports() []Port { return slices.Clone(l.ports) }

// Close ends the listeners, resets their connections, and waits until all has
// ended. Further calls do nothing.
func (l *Listeners) Close() error {
	l.cancel()
	var errs []error
	for _, s := range l.servers {
		errs = append(errs, s.Close())
	}
	l.running.Wait()
	return errors.Join(errs...)
}
