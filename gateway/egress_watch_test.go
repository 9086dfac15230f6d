package gateway

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// run runs a command on the host that has to succeed.
func (w *world) run(words ...string) string {
	w.t.Helper()
	out, err := w.host.Command(w.t.Context(), words[0], words[1:]...).CombinedOutput()
	if err != nil {
		w.t.Fatalf("%q: %v: %s", words, err, out)
	}
	return string(out)
}

// nft loads a ruleset that stands on one line, which nft's grammar does not take.
func (w *world) nft(ruleset string) {
	w.t.Helper()
	w.host.Nft(strings.NewReplacer("{ ", "{\n", "; ", ";\n", " }", "\n}").Replace(ruleset) + "\n")
}

func TestEgressFollowsTheHostsAddresses(t *testing.T) {
	w := newWorld(t)
	e := w.open(w.config())
	for _, ip := range []netip.Addr{hostAddr4, hostAddr6, netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("127.0.0.1")} {
		if !e.isHost(ip) {
			t.Errorf("%v is not known as the host's", ip)
		}
	}
	if e.isHost(inetAddr4) {
		t.Errorf("%v is not the host's", inetAddr4)
	}
	for _, p := range prefixes("203.0.113.77/24 2001:db8:77::1/64") {
		w.inet.Address(p)
		within(t, patience, "a new address", func() bool { return e.isHost(p.Addr()) })
		w.run("ip", "addr", "del", p.String(), "dev", "eth0")
		within(t, patience, "an address that went", func() bool { return !e.isHost(p.Addr()) })
	}
}

func TestEgressFollowsTheHostsRoutes(t *testing.T) {
	w := newWorld(t)
	before := w.snapshot()
	e := w.open(w.config())
	forwards := func() bool {
		return w.sysctl("net/ipv4/conf/eth1/forwarding") == "1" && w.sysctl("net/ipv6/conf/eth1/force_forwarding") == "1"
	}
	if forwards() {
		t.Fatal("eth1 forwards from the start")
	}
	w.run("ip", "route", "replace", "default", "via", lanAddr4.String())
	w.run("ip", "-6", "route", "replace", "default", "via", lanAddr6.String())
	within(t, patience, "forwarding by the new default route", forwards)
	// Bounded as eth0 is.
	if rules := w.run("nft", "list", "ruleset"); strings.Count(rules, `iifname "eth1" drop`) != 2 {
		t.Errorf("the firewall does not know of eth1:\n%s", rules)
	}
	w.run("ip", "route", "replace", "default", "via", inetAddr4.String())
	w.run("ip", "-6", "route", "replace", "default", "via", inetAddr6.String())
	if err := e.close(); err != nil {
		t.Error(err)
	}
	if diff := before.Diff(w.host.Snapshot()); diff != "" {
		t.Errorf("the host is not as it was:\n%s", diff)
	}
}

// A client may have been allowed a network that no default route leads to.
func TestEgressLetsAllowedNetworksThrough(t *testing.T) {
	w := newWorld(t)
	e := w.open(w.config())
	wire := newWire(t, e)
	for _, f := range families {
		e.letThrough(prefixes(f.lanPrefix))
		client, server := port16(f.client, 4000), port16(f.lan, 53)
		in := newInbox(t, w.lan, server)
		wire.send(udpPacket(client, server, []byte("question")))
		from := in.waitFrom(t, "question")
		if from.Addr() != f.hostEth1 {
			t.Errorf("the LAN sees %v", from)
		}
		send(t, w.lan, from, "too late") // from another port: no answer to anything
		if _, err := in.WriteTo([]byte("answer"), net.UDPAddrFromAddrPort(from)); err != nil {
			t.Fatal(err)
		}
		wire.wait("the answer", is(packet.UDP, server, client))
		if wire.find(func(_ packet.Header, b []byte) bool { return bytes.HasSuffix(b, []byte("too late")) }) != nil {
			t.Error("a packet that answers nothing came through")
		}
	}
}

func TestEgressRepairsTheFirewall(t *testing.T) {
	w := newWorld(t)
	w.open(w.config())
	before := w.run("nft", "-s", "list", "ruleset")
	for _, damage := range []string{"flush ruleset", "flush chain inet quicvpn-gw-quicvpn-gw forward", "delete chain inet quicvpn-gw-quicvpn-gw input"} {
		w.run("nft", damage)
		w.inet.Address(netip.MustParsePrefix("203.0.113.77/24")) // an occasion to look
		within(t, patience, "repair after "+damage, func() bool { return w.run("nft", "-s", "list", "ruleset") == before })
		w.run("ip", "addr", "del", "203.0.113.77/24", "dev", "eth0")
	}
	if !strings.Contains(w.log.String(), "put back") {
		t.Error("the log does not say so")
	}
}

// When somebody else makes a router of the host, as Docker does, the gateway no
// longer keeps it from being one, and leaves it one.
func TestEgressMakesWayForARouter(t *testing.T) {
	w := newWorld(t)
	w.internet.DefaultRoute(hostAddr4, hostAddr6)
	e := w.open(w.config())
	inboxes := make([]*inbox, len(families))
	for i, f := range families {
		inboxes[i] = newInbox(t, w.internet, port16(f.inet, 7000))
		send(t, w.lan, port16(f.inet, 7000), "before")
	}
	w.prepare("net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
	w.inet.Address(netip.MustParsePrefix("203.0.113.77/24")) // an occasion to look
	for i, f := range families {
		within(t, patience, "forwarding by others, "+f.name, func() bool {
			send(t, w.lan, port16(f.inet, 7000), "after")
			_, ok := inboxes[i].from("after")
			return ok
		})
		if _, ok := inboxes[i].from("before"); ok {
			t.Errorf("%s was forwarded before", f.name)
		}
	}
	// And when it is no router any more, the gateway still forwards.
	w.prepare("net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0")
	w.inet.Address(netip.MustParsePrefix("203.0.113.78/24"))
	within(t, patience, "forwarding by the gateway", func() bool {
		return w.sysctl("net/ipv4/conf/quicvpn-gw/forwarding") == "1" && w.sysctl("net/ipv4/conf/eth0/forwarding") == "1" &&
			w.sysctl("net/ipv6/conf/quicvpn-gw/force_forwarding") == "1" && w.sysctl("net/ipv6/conf/eth0/force_forwarding") == "1"
	})
	wire := newWire(t, e)
	for _, f := range families {
		testUDP(t, w, wire, f)
	}
	w.prepare("net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
	if err := e.close(); err != nil {
		t.Error(err)
	}
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv4/conf/eth0/forwarding", "net/ipv6/conf/all/forwarding"} {
		if got := w.sysctl(key); got != "1" {
			t.Errorf("%s is %s afterwards", key, got)
		}
	}
}

func TestEgressFindsBlockers(t *testing.T) {
	const docker = `table ip filter {
	chain DOCKER-USER { %s }
	chain FORWARD { type filter hook forward priority filter; policy drop; jump DOCKER-USER; }
}`
	tests := []struct{ name, ruleset, want string }{
		{"none", "table inet mine { chain forward { type filter hook forward priority 0; policy accept; } }", ""},
		{"a chain at another hook", "table inet mine { chain input { type filter hook input priority 0; policy drop; } }", ""},
		{
			"Docker", strings.ReplaceAll(docker, "%s", ""),
			"iptables -I DOCKER-USER -i quicvpn-gw -j ACCEPT && iptables -I DOCKER-USER -o quicvpn-gw -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
		},
		{"Docker, let through", strings.ReplaceAll(docker, "%s", `iifname "quicvpn-gw" accept`), ""},
		{
			"Docker, another let through", strings.ReplaceAll(docker, "%s", `iifname "quicvpn-gw2" accept`),
			"iptables -I DOCKER-USER -i quicvpn-gw -j ACCEPT && iptables -I DOCKER-USER -o quicvpn-gw -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
		},
		{
			"ip6tables", "table ip6 filter { chain FORWARD { type filter hook forward priority 0; policy drop; } }",
			"ip6tables -I FORWARD -i quicvpn-gw -j ACCEPT && ip6tables -I FORWARD -o quicvpn-gw -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
		},
		{
			"an nftables firewall", "table inet mine { chain forwarding { type filter hook forward priority 10; policy drop; } }",
			`nft 'insert rule inet mine forwarding iifname "quicvpn-gw" accept; insert rule inet mine forwarding oifname "quicvpn-gw" ct state established,related accept'`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.nft(tt.ruleset)
			var found []blocker
			look := func() {
				t.Helper()
				if err := w.host.Do(func() (err error) {
					found, err = findBlockers("quicvpn-gw", true)
					return err
				}); err != nil {
					t.Fatal(err)
				}
			}
			look()
			if tt.want == "" {
				if len(found) > 0 {
					t.Errorf("found %+v", found)
				}
				return
			}
			if len(found) != 1 || found[0].remedy("quicvpn-gw") != tt.want {
				t.Fatalf("found %+v", found)
			}
			// The advice helps, and who followed it is not warned again.
			w.run("sh", "-c", tt.want)
			if look(); len(found) > 0 {
				t.Errorf("after the advice was followed: %+v", found)
			}
			wire := newWire(t, w.open(w.config()))
			for _, f := range families {
				testUDP(t, w, wire, f)
			}
			if strings.Contains(w.log.String(), "another firewall") {
				t.Error("the log warns")
			}
		})
	}
}

func TestEgressWarnsOfBlockers(t *testing.T) {
	w := newWorld(t)
	w.nft("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; } }")
	w.open(w.config())
	if log := w.log.String(); !strings.Contains(log, "ip filter FORWARD") || !strings.Contains(log, "iptables -I FORWARD -i quicvpn-gw -j ACCEPT") {
		t.Errorf("the log says %s", log)
	}
}

func TestExplainNft(t *testing.T) {
	for err, want := range map[error]string{
		unix.EPERM: "NET_ADMIN",
		os.NewSyscallError("socket", unix.EPROTONOSUPPORT): "kernel lacks nftables",
		os.NewSyscallError("receive", unix.EOPNOTSUPP):     "kernel lacks nftables",
		unix.ENOBUFS: "no buffer space",
	} {
		if got := explainNft(err).Error(); !strings.Contains(got, want) {
			t.Errorf("about %v it says %q, want something about %q", err, got, want)
		}
	}
}

func TestIfnameIsWhole(t *testing.T) {
	r := &nftables.Rule{Exprs: rule(in("quicvpn-gw2"), accept())}
	if acceptsInterface(r, "quicvpn-gw") || !acceptsInterface(r, "quicvpn-gw2") {
		t.Error("a part of a name passes for the name")
	}
	if acceptsInterface(&nftables.Rule{Exprs: rule(in("quicvpn-gw"), drop())}, "quicvpn-gw") {
		t.Error("a rule that drops passes for one that accepts")
	}
}
