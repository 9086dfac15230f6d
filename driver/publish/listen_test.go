package publish

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var byValue = cmpopts.EquateComparable(netip.Addr{})

// occupy takes a port of the host.
func (w *world) occupy(network, address string) {
	w.t.Helper()
	var c interface{ Close() error }
	var err error
	if strings.HasPrefix(network, "tcp") {
		c, err = w.host.Listen(network, address)
	} else {
		c, err = w.host.ListenPacket(network, address)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
}

// What cannot be published says why, and leaves none of the others.
func TestListenRefuses(t *testing.T) {
	w := newWorld(t)
	w.occupy("tcp4", "192.0.2.1:8080")
	w.occupy("tcp", "[::]:9000")
	w.occupy("tcp", "[::]:9001")
	w.occupy("udp4", "192.0.2.1:5353")
	local := netip.MustParseAddr("127.0.0.1")
	for _, tt := range []struct {
		port Port
		want string
	}{
		{web, "publish 8080->80/tcp: host port 8080/tcp is in use: stop what uses it or publish another port"},
		{dns, "publish 5353->53/udp: host port 5353/udp is in use: stop what uses it or publish another port"},
		{Port{Protocol: "tcp", HostIP: host4, HostPort: 8080, ContainerPort: 80}, "publish 192.0.2.1:8080->80/tcp: host port 192.0.2.1:8080/tcp is in use: stop what uses it or publish another port"},
		{Port{Protocol: "tcp", HostPort: 9000, HostPortEnd: 9001, ContainerPort: 80}, "publish 9000-9001->80/tcp: host ports 9000-9001/tcp are all in use: stop what uses one of them or publish other ports"},
		{Port{Protocol: "tcp", HostIP: netip.MustParseAddr("192.0.2.77"), HostPort: 1, ContainerPort: 80}, "publish 192.0.2.77:1->80/tcp: 192.0.2.77 is no address of this host: publish on one that it has, or on all"},
		{Port{Protocol: "sctp", HostPort: 1, ContainerPort: 80}, "publish 1->80/sctp: quicvpn publishes tcp and udp ports, not sctp"},
		{Port{Protocol: "TCP", HostPort: 1, ContainerPort: 80}, "publish 1->80/TCP: the protocol must be tcp or udp"},
		{Port{Protocol: "tcp", HostIP: local, HostPort: 1}, "publish 127.0.0.1:1->0/tcp: the container's port must not be 0"},
		{Port{Protocol: "tcp", HostIP: netip.IPv6Loopback(), HostPort: 9, HostPortEnd: 8, ContainerPort: 1}, "publish [::1]:9->1/tcp: the host's ports 9-8 are no range"},
		{Port{Protocol: "tcp", HostPortEnd: 8, ContainerPort: 1}, "publish 0-8->1/tcp: the host's ports 0-8 are no range"},
	} {
		good := Port{Protocol: "tcp", HostPort: 7000, ContainerPort: 7}
		before := descriptors(t)
		l, err := w.listen(good, tt.port)
		if err == nil {
			t.Errorf("%v is published", l.Ports())
			l.Close()
			continue
		}
		if err.Error() != tt.want {
			t.Errorf("%+v:\n got %q\nwant %q", tt.port, err, tt.want)
		}
		if diff := cmp.Diff(before, descriptors(t)); diff != "" {
			t.Errorf("%v: descriptors (-before +after):\n%s", tt.port, diff)
		}
	}
	w.to.Addrs = nil
	if _, err := w.listen(web); err == nil || !strings.Contains(err.Error(), "the container has no IP address") {
		t.Errorf("without an address of the container: %v", err)
	}
}

func TestPorts(t *testing.T) {
	w := newWorld(t)
	w.occupy("tcp", "[::]:8000")
	w.occupy("tcp4", "192.0.2.1:8001")
	w.serve("tcp", ":80", echoWhole)
	ports := []Port{
		{Protocol: "tcp", HostPort: 8000, HostPortEnd: 8010, ContainerPort: 80},
		{Protocol: "tcp", HostPort: 8000, HostPortEnd: 8010, ContainerPort: 81},
		{Protocol: "udp", HostPort: 8000, HostPortEnd: 8010, ContainerPort: 82},
		{Protocol: "tcp", HostIP: host6, ContainerPort: 80},
		{Protocol: "udp", ContainerPort: 80},
	}
	l := w.publish(ports...)
	got := l.Ports()
	want := []Port{
		{Protocol: "tcp", HostPort: 8002, ContainerPort: 80},
		{Protocol: "tcp", HostPort: 8003, ContainerPort: 81},
		{Protocol: "udp", HostPort: 8000, ContainerPort: 82},
		{Protocol: "tcp", HostIP: host6, HostPort: got[3].HostPort, ContainerPort: 80},
		{Protocol: "udp", HostPort: got[4].HostPort, ContainerPort: 80},
	}
	if diff := cmp.Diff(want, got, byValue); diff != "" {
		t.Errorf("ports (-want +got):\n%s", diff)
	}
	for _, p := range got[3:] {
		if p.HostPort == 0 {
			t.Errorf("no port was chosen: %v", p)
		}
		w.logged("port=" + p.String())
	}
	w.dial("tcp", host4, 8002)
	w.dial("tcp", host6, got[3].HostPort)
	if c, err := w.client.DialContext(w.ctx, "tcp", net.JoinHostPort(host4.String(), strconv.Itoa(int(got[3].HostPort)))); err == nil {
		t.Errorf("a port of one address is open at another: %v", c.RemoteAddr())
		c.Close()
	}
	// After a restart the same ports are published again.
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := w.listen(got...)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if !cmp.Equal(got, again.Ports(), byValue) {
		t.Errorf("published again: %v, want %v", again.Ports(), got)
	}
}

// The unspecified addresses are one IP version each, as in `-p 0.0.0.0:80:80`.
func TestOneVersion(t *testing.T) {
	w := newWorld(t)
	w.serve("tcp", ":80", echoWhole)
	w.app.ServeEcho(80)
	for _, protocol := range []string{"tcp", "udp"} {
		w.publish(
			Port{Protocol: protocol, HostIP: netip.IPv4Unspecified(), HostPort: 4444, ContainerPort: 80},
			Port{Protocol: protocol, HostIP: netip.IPv6Unspecified(), HostPort: 6666, ContainerPort: 80},
		)
	}
	for at, port := range map[netip.Addr]uint16{host4: 4444, host6: 6666} {
		w.dial("tcp", at, port)
		w.echoes(w.dial("udp", at, port), []byte("x"))
	}
	for at, port := range map[netip.Addr]uint16{host4: 6666, host6: 4444} {
		if c, err := w.client.DialContext(w.ctx, "tcp", netip.AddrPortFrom(at, port).String()); err == nil {
			t.Errorf("%v is open", c.RemoteAddr())
			c.Close()
		}
	}
}

// A host without IPv6 publishes by IPv4.
func TestHostWithoutIPv6(t *testing.T) {
	w := newWorld(t)
	w.host.Sysctl("net.ipv6.conf.all.disable_ipv6", "1")
	w.serve("tcp", ":80", echoWhole)
	w.app.ServeEcho(53)
	w.publish(web, dns)
	w.dial("tcp", host4, 8080)
	w.echoes(w.dial("udp", host4, 5353), []byte("x"))
	_, err := w.listen(Port{Protocol: "tcp", HostIP: host6, HostPort: 81, ContainerPort: 80})
	if err == nil || !strings.Contains(err.Error(), "is no address of this host") {
		t.Errorf("publish on IPv6: %v", err)
	}
}

func TestListenNothing(t *testing.T) {
	l, err := Listen(nil, Target{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if ports := l.Ports(); len(ports) != 0 {
		t.Errorf("ports: %v", ports)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
