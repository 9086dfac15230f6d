package docker

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A resolver is a name server of the internet that knows where.example, and
// long.example by an answer that fits no datagram.
type resolver struct {
	mu    sync.Mutex
	asked []netip.Addr // who did
}

func (r *resolver) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	host, _, _ := net.SplitHostPort(w.RemoteAddr().String()) // of a socket: always well formed
	from, err := netip.ParseAddr(host)
	if err == nil {
		r.mu.Lock()
		r.asked = append(r.asked, from.Unmap())
		r.mu.Unlock()
	}
	switch name := q.Question[0]; {
	case name.Name == "long.example." && name.Qtype == dns.TypeA:
		for i := range longAnswer {
			m.Answer = append(m.Answer, &dns.A{
				Hdr: dns.RR_Header{Name: name.Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(198, 51, 100, byte(i+1))})
		}
		if w.RemoteAddr().Network() == "udp" {
			m.Truncate(dns.MinMsgSize)
		}
	case name.Name == "long.example.":
	case name.Name != "where.example.":
		m.Rcode = dns.RcodeNameError
	case name.Qtype == dns.TypeA:
		m.Answer = append(m.Answer, &dns.A{
			Hdr: dns.RR_Header{Name: name.Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: netlab.ServerAddr4.AsSlice()})
	}
	_ = w.WriteMsg(m) // the client went away
}

// longAnswer is how many addresses long.example has.
const longAnswer = 200

// who returns, and forgets, who asked.
func (r *resolver) who() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := slices.Clone(r.asked)
	r.asked = nil
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

// serveNames has the internet's server answer name servers' clients.
func (w *world) serveNames() *resolver { return serveNames(w.t, w.Internet) }

func serveNames(t *testing.T, ns *netlab.NS) *resolver {
	t.Helper()
	r := new(resolver)
	pc, err := ns.ListenPacket("udp", ":53")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := ns.Listen("tcp", ":53")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 2)
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: r}, {Listener: ln, Handler: r}} {
		go func() { done <- s.ActivateAndServe() }()
	}
	t.Cleanup(func() {
		pc.Close()
		ln.Close()
		<-done
		<-done
	})
	return r
}

// Siblings are known by name; all other names are asked for through the tunnel.
func TestNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	names := w.serveNames()
	h := w.newHost(dockerlab.Config{ResolvConf: "nameserver " + netlab.ServerAddr4.String() + "\n"})
	h.must("network create -d quicvpn " + subnets + " net")
	h.must("network create -d quicvpn other")
	h.must("run -d --name web --network net --network-alias alias IMAGE serve")
	h.must("run -d --name user --network net IMAGE sleep")
	h.must("run -d --name stranger --network other IMAGE sleep")
	for name, want := range map[string]string{
		"web":   "172.30.0.2\nfd00:30::2",
		"alias": "172.30.0.2\nfd00:30::2",
	} {
		if got := h.must("exec user /toolbox resolve " + name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if seen := h.get("user", "web"); seen != h.address("user", "net").String() && seen != "fd00:30::3" {
		t.Errorf("a sibling by name sees %q", seen)
	}
	if out, err := h.try("exec user /toolbox resolve stranger"); err == nil {
		t.Errorf("a container of another network is known by name as %q", out)
	}
	names.who()

	if got := h.must("exec user /toolbox resolve where.example"); got != netlab.ServerAddr4.String() {
		t.Errorf("where.example is %q", got)
	}
	if who := names.who(); !slices.Equal(who, []netip.Addr{netlab.EgressAddr4}) {
		t.Errorf("%v asked, want the gateway's address", who)
	}
	if _, err := h.try("exec user /toolbox resolve nowhere.example"); err == nil || !strings.Contains(err.Error(), "no such host") {
		t.Errorf("nowhere.example: %v", err)
	}

	// Without a gateway names wait, or fail, and nobody else is asked.
	names.who()
	w.gateway.Kill()
	if out, err := h.try("exec user /toolbox resolve where.example"); err == nil {
		t.Errorf("without a gateway where.example is %q", out)
	}
	if got := h.must("exec user /toolbox resolve web"); !strings.Contains(got, "172.30.0.2") {
		t.Errorf("without a gateway web is %q", got)
	}
	if who := names.who(); len(who) > 0 {
		t.Errorf("without a gateway %v asked", who)
	}
	w.startGateway()
	h.reaches("user")
	if got := h.must("exec user /toolbox resolve where.example"); got != netlab.ServerAddr4.String() {
		t.Errorf("with the gateway again where.example is %q", got)
	}
	h.checkTunnel()
}

// Whichever name server a container is told of, by UDP and TCP the gateway answers
// in its place, and so does the network's own address, unless the network has names
// left alone.
func TestAnyResolver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	names := w.serveNames()
	h := w.newHost(dockerlab.Config{ResolvConf: "nameserver 192.168.77.1\n"})
	h.must("network create -d quicvpn " + subnets + " net")
	for _, told := range []string{"", "--dns 10.0.0.2", "--dns 172.30.0.1", "--dns 198.51.100.53", "--dns 9.9.9.9"} {
		if got := h.must("run --rm --network net " + told + " IMAGE resolve where.example"); got != netlab.ServerAddr4.String() {
			t.Errorf("with %q where.example is %q", told, got)
		}
		if who := names.who(); !slices.Equal(who, []netip.Addr{netlab.EgressAddr4}) {
			t.Errorf("with %q %v asked, want the gateway", told, who)
		}
		// What fits no datagram comes by TCP.
		if got := strings.Fields(h.must("run --rm --network net " + told + " IMAGE resolve long.example")); len(got) != longAnswer {
			t.Errorf("with %q long.example has %d addresses, want %d", told, len(got), longAnswer)
		}
		names.who()
	}
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 -o dns=off off")
	for _, told := range []string{"10.0.0.2", "172.31.0.1"} {
		if got, err := h.try("run --rm --network off --dns " + told + " IMAGE resolve where.example"); err == nil {
			t.Errorf("without names where.example is %q of %s", got, told)
		}
	}
	if who := names.who(); len(who) > 0 {
		t.Errorf("without names %v asked", who)
	}
	if got := h.must("run --rm --network off --dns " + netlab.ServerAddr4.String() + " IMAGE resolve where.example"); got != netlab.ServerAddr4.String() {
		t.Errorf("a public name server says that where.example is %q", got)
	}
	h.checkTunnel()
}
