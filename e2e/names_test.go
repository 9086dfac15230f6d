package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// serveNames answers queries for names under example. in a namespace:
//
//	www.example.      the internet's server
//	whoami.example.   as text, the address that was asked
//	large.example.    more than a packet takes
func serveNames(t *testing.T, ns *netlab.NS, addrs ...netip.AddrPort) {
	t.Helper()
	for _, addr := range addrs {
		ln, err := ns.Listen("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		pc, err := ns.ListenPacket("udp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []*dns.Server{{Listener: ln}, {PacketConn: pc}} {
			s.Handler = dns.HandlerFunc(answerName)
			started, ended := make(chan struct{}), make(chan struct{})
			s.NotifyStartedFunc = func() { close(started) }
			go func() {
				defer close(ended)
				if err := s.ActivateAndServe(); err != nil {
					t.Errorf("serve names: %v", err)
				}
			}()
			<-started
			t.Cleanup(func() {
				if err := s.Shutdown(); err != nil {
					t.Errorf("end serving names: %v", err)
				}
				<-ended
			})
		}
	}
}

func answerName(w dns.ResponseWriter, m *dns.Msg) {
	r := new(dns.Msg).SetReply(m)
	q := m.Question[0]
	header := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: 60}
	switch q.Name {
	case "www.example.":
		switch q.Qtype {
		case dns.TypeA:
			r.Answer = append(r.Answer, &dns.A{Hdr: header, A: netlab.ServerAddr4.AsSlice()})
		case dns.TypeAAAA:
			r.Answer = append(r.Answer, &dns.AAAA{Hdr: header, AAAA: netlab.ServerAddr6.AsSlice()})
		}
	case "whoami.example.":
		r.Answer = append(r.Answer, &dns.TXT{Hdr: header, Txt: []string{w.LocalAddr().String()}})
	case "large.example.":
		for i := range 50 {
			r.Answer = append(r.Answer, &dns.TXT{Hdr: header, Txt: []string{strings.Repeat(string(rune('a'+i%26)), 100)}})
		}
	default:
		r.Rcode = dns.RcodeNameError
	}
	if _, ok := w.LocalAddr().(*net.UDPAddr); ok {
		size := dns.MinMsgSize
		if opt := m.IsEdns0(); opt != nil {
			size = int(opt.UDPSize())
		}
		r.Truncate(size)
	}
	_ = w.WriteMsg(r) // who has asked may be gone
}

// ask asks a name server from inside a namespace. The kernel takes an answer from
// nobody else.
func ask(ctx context.Context, ns *netlab.NS, network, server, name string, kind uint16, size uint16) (*dns.Msg, error) {
	conn, err := ns.DialContext(ctx, network, net.JoinHostPort(server, "53"))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return nil, err
	}
	m := new(dns.Msg).SetQuestion(name, kind)
	if size > 0 {
		m.SetEdns0(size, false)
	}
	c := &dns.Conn{Conn: conn, UDPSize: 65535}
	if err := c.WriteMsg(m); err != nil {
		return nil, err
	}
	return c.ReadMsg()
}

// texts returns the text records of an answer.
func texts(m *dns.Msg) (all []string) {
	for _, rr := range m.Answer {
		if txt, ok := rr.(*dns.TXT); ok {
			all = append(all, txt.Txt...)
		}
	}
	return all
}

// TestNames resolves names as containers do whose host has a private resolver.
func TestNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	c := w.client0()
	server4, server6 := netip.AddrPortFrom(netlab.ServerAddr4, 53), netip.AddrPortFrom(netlab.ServerAddr6, 53)
	serveNames(t, w.Internet, server4, server6)
	w.Gateway.Replace("/etc/resolv.conf", "nameserver 203.0.113.10\n")
	c.ns.Replace("/etc/resolv.conf", "nameserver 10.0.0.53\nnameserver fd00::53\n")
	before := w.Gateway.Snapshot()
	w.startGateway()
	c.join(w.token)

	// The C library and curl know nothing of any of this.
	for i, flag := range []string{"-4", "-6"} {
		page, err := c.ns.Command(w.ctx, "curl", flag, "--silent", "--show-error", "--max-time", "20", "http://www.example/").Output()
		if want := netlab.Page + []netip.Addr{netlab.EgressAddr4, netlab.EgressAddr6}[i].String(); err != nil || strings.TrimSpace(string(page)) != want {
			t.Errorf("curl %s: %q (%v), want %q", flag, page, err, want)
		}
	}
	if out, err := c.ns.Command(w.ctx, "getent", "ahosts", "nobody.example").CombinedOutput(); err == nil {
		t.Errorf("there is no nobody.example, but %q", out)
	}

	own := w.ownAddresses(c)
	for _, server := range append(own, "10.0.0.53", "192.168.1.1", "172.17.0.1", "169.254.169.253", "fd00::53", "fec0::1",
		netlab.EgressAddr4.String(), netlab.EgressAddr6.String()) {
		for _, network := range []string{"udp", "tcp"} {
			m, err := ask(w.ctx, c.ns, network, server, "whoami.example.", dns.TypeTXT, 0)
			if err != nil || !slices.Equal(texts(m), []string{server4.String()}) {
				t.Errorf("%s to %s: %v\n%v", network, server, err, m)
			}
			m, err = ask(w.ctx, c.ns, network, server, "large.example.", dns.TypeTXT, 4096)
			if err != nil || m.Truncated != (network == "udp") || network == "tcp" && len(texts(m)) != 50 {
				t.Errorf("a large answer by %s from %s: %v\n%v", network, server, err, m)
			}
		}
	}
	// A public one is asked itself.
	for _, server := range []netip.AddrPort{server4, server6} {
		if m, err := ask(w.ctx, c.ns, "udp", server.Addr().String(), "whoami.example.", dns.TypeTXT, 0); err != nil || !slices.Equal(texts(m), []string{server.String()}) {
			t.Errorf("%s: %v\n%v", server, err, m)
		}
	}

	c.manyNames(1000)
	c.nonsense("10.0.0.53")

	// The gateway's own resolvers change, and are gone.
	w.Gateway.Replace("/etc/resolv.conf", "nameserver 203.0.113.99\nnameserver 2001:db8:3::10\n")
	if m, err := ask(w.ctx, c.ns, "udp", "10.0.0.53", "whoami.example.", dns.TypeTXT, 0); err != nil || !slices.Equal(texts(m), []string{server6.String()}) {
		t.Errorf("with a dead name server before a good one: %v\n%v", err, m)
	}
	w.Gateway.Replace("/etc/resolv.conf", "nameserver 203.0.113.99\n")
	for _, network := range []string{"udp", "tcp"} {
		if m, err := ask(w.ctx, c.ns, network, "10.0.0.53", "whoami.example.", dns.TypeTXT, 0); err != nil || m.Rcode != dns.RcodeServerFailure {
			t.Errorf("with a dead name server, by %s: %v\n%v", network, err, m)
		}
	}
	if err := w.gateway.WaitLog(w.ctx, "no name server answers"); err != nil {
		t.Error(err)
	}
	if strings.Contains(w.gateway.Log(), "whoami") {
		t.Errorf("the log tells who asked for what:\n%s", w.gateway.Log())
	}

	c.checkTunnel()
	c.stop()
	w.stopRole(w.gateway)
	if diff := before.Diff(w.Gateway.Snapshot()); diff != "" {
		t.Errorf("the gateway's namespace is not as before:\n%s", diff)
	}
}

// ownAddresses returns the gateway's own in the clients' pools.
func (w *world) ownAddresses(c *client) (own []string) {
	for _, a := range c.addresses() {
		bits := 16
		if a.Is6() {
			bits = 64
		}
		own = append(own, netip.PrefixFrom(a, bits).Masked().Addr().Next().String())
	}
	return own
}

// manyNames asks for many names at once, and again for those that were lost on
// the way, as resolvers do. All must be answered.
func (c *client) manyNames(n int) {
	c.w.t.Helper()
	conn, err := c.ns.ListenPacket("udp", ":0")
	if err != nil {
		c.w.t.Fatal(err)
	}
	defer conn.Close()
	to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort("10.0.0.53:53"))
	missing := make(map[uint16][]byte)
	for i := range n {
		b, err := (&dns.Msg{MsgHdr: dns.MsgHdr{Id: uint16(i)},
			Question: []dns.Question{{Name: fmt.Sprintf("n%d.example.", i), Qtype: dns.TypeA, Qclass: dns.ClassINET}}}).Pack()
		if err != nil {
			c.w.t.Fatal(err)
		}
		missing[uint16(i)] = b
	}
	buf := make([]byte, 2000)
	for range 10 {
		for _, b := range missing {
			if _, err := conn.WriteTo(b, to); err != nil {
				c.w.t.Fatal(err)
			}
		}
		if err := conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			c.w.t.Fatal(err)
		}
		for len(missing) > 0 {
			size, from, err := conn.ReadFrom(buf)
			if err != nil {
				break
			}
			m := new(dns.Msg)
			if err := m.Unpack(buf[:size]); err != nil || m.Rcode != dns.RcodeNameError || from.String() != to.String() || m.Question[0].Name != fmt.Sprintf("n%d.example.", m.Id) {
				c.w.t.Errorf("the answer from %s: %v\n%v", from, err, m)
			}
			delete(missing, m.Id)
		}
	}
	if len(missing) > 0 {
		c.w.t.Errorf("%d of %d queries at once had no answer", len(missing), n)
	}
}

// nonsense sends what no name server wants to see, and then asks it as usual.
func (c *client) nonsense(server string) {
	c.w.t.Helper()
	for _, network := range []string{"udp", "tcp"} {
		for _, b := range []string{"", "\x00", "hello", "\xff\xff" + strings.Repeat("x", 600), strings.Repeat("\xc0\x0c", 300)} {
			conn, err := c.ns.DialContext(c.w.ctx, network, net.JoinHostPort(server, "53"))
			if err != nil {
				c.w.t.Fatal(err)
			}
			// It may end while it is told.
			_, _ = conn.Write([]byte(b))
			conn.Close()
		}
		if m, err := ask(c.w.ctx, c.ns, network, server, "www.example.", dns.TypeA, 0); err != nil || len(m.Answer) != 1 {
			c.w.t.Errorf("after nonsense by %s: %v\n%v", network, err, m)
		}
	}
}

// TestNamesOff refuses what is for private name servers, as anything else.
func TestNamesOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	serveNames(t, w.Internet, netip.AddrPortFrom(netlab.ServerAddr4, 53))
	w.startGateway("--dns", "off")
	c := w.client0()
	c.join(w.token)
	for _, server := range append(w.ownAddresses(c), "10.0.0.53", "fd00::53") {
		for _, network := range []string{"udp", "tcp"} {
			m, err := ask(w.ctx, c.ns, network, server, "www.example.", dns.TypeA, 0)
			if !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.EACCES) && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s to %s: %v\n%v, want an error at once", network, server, err, m)
			}
		}
	}
	if m, err := ask(w.ctx, c.ns, "udp", "203.0.113.10", "www.example.", dns.TypeA, 0); err != nil || len(m.Answer) != 1 {
		t.Errorf("a public name server: %v\n%v", err, m)
	}
	c.checkTunnel()
}

// TestNamesByServersOfItsOwn gives the gateway name servers by flag, and a client
// that may reach a private one itself.
func TestNamesByServersOfItsOwn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	given := netip.AddrPortFrom(netlab.ServerAddr6, 5353)
	private := netip.MustParseAddrPort("10.0.0.53:53")
	w.InternetIf.Address(netip.PrefixFrom(private.Addr(), 24))
	serveNames(t, w.Internet, given, private)
	w.Gateway.Route(netip.MustParsePrefix("10.0.0.0/24"), netlab.ServerAddr4)
	w.Gateway.Replace("/etc/resolv.conf", "nameserver 203.0.113.99\n")
	w.startGateway("--dns", given.String())
	ordinary, insider := w.client0(), w.addClient("insider")
	ordinary.join(w.token)
	insider.join(w.newToken("insider", "--allow", "10.0.0.0/24", "--allow", "203.0.113.0/24", "--allow", "2001:db8:3::/64"))
	for c, want := range map[*client]map[string]string{
		ordinary: {"10.0.0.53": given.String(), "10.0.1.53": given.String()},
		insider:  {"10.0.0.53": private.String(), "10.0.1.53": given.String()},
	} {
		for server, answers := range want {
			for _, network := range []string{"udp", "tcp"} {
				if m, err := ask(w.ctx, c.ns, network, server, "whoami.example.", dns.TypeTXT, 0); err != nil || !slices.Equal(texts(m), []string{answers}) {
					t.Errorf("%s asks %s by %s: %v\n%v\nwant %s to answer", c.ns.Name, server, network, err, m, answers)
				}
			}
		}
		c.checkTunnel()
	}

	// A client's address is no name server for all of them.
	w.stopRole(w.gateway)
	out, err := w.Gateway.Command(w.ctx, program, "gateway", "run", "--state-dir", w.gatewayDir(), "--dns", "10.91.0.5").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "quicvpn: start gateway: name server 10.91.0.5:53: clients have addresses there") {
		t.Errorf("--dns with a client's address: %v: %s", err, out)
	}
}

// TestResolvConf is about a machine whose name server is on its own link, which is
// asked by nobody: with --resolv-conf the gateway is asked instead, for as long as
// the sidecar runs. After a SIGKILL the next start puts the file back.
func TestResolvConf(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{})
	c := w.client0()
	serveNames(t, w.Internet, netip.AddrPortFrom(netlab.ServerAddr4, 53))
	w.Gateway.Replace("/etc/resolv.conf", "nameserver 203.0.113.10\n")
	const original = "# a router's\nnameserver 192.0.2.1\noptions timeout:1 attempts:1\n"
	c.ns.Replace("/etc/resolv.conf", original)
	content := func() string {
		t.Helper()
		out, err := c.ns.Command(w.ctx, "cat", "/etc/resolv.conf").Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	resolves := func() bool {
		out, err := c.ns.Command(w.ctx, "getent", "ahostsv4", "www.example").Output()
		return err == nil && strings.HasPrefix(string(out), netlab.ServerAddr4.String()+" ")
	}
	w.startGateway()
	c.join(w.token)
	if resolves() {
		t.Error("the name server on the link was asked")
	}
	c.stop()
	c.join(w.token, "--resolv-conf")
	if !resolves() {
		t.Errorf("the gateway does not resolve; resolv.conf says\n%s", content())
	}
	c.sidecar.Kill()
	if content() == original {
		t.Error("the file was restored by a process that was killed")
	}
	c.join(w.token)
	if got := content(); got != original {
		t.Errorf("after a SIGKILL and a start resolv.conf says\n%s", got)
	}
	c.stop()
	c.join(w.token, "--resolv-conf")
	if !resolves() {
		t.Errorf("the gateway does not resolve; resolv.conf says\n%s", content())
	}
	c.stop()
	if got := content(); got != original {
		t.Errorf("after a stop resolv.conf says\n%s", got)
	}
}
