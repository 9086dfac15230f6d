package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

func TestConfig(t *testing.T) {
	good := Config{Token: token.Token{Address: "gateway.example:443"}, StateDir: t.TempDir()}
	tests := []struct {
		name   string
		change func(*Config)
		want   string // empty: it is good
	}{
		{"as it is", func(*Config) {}, ""},
		{"an IPv6 gateway", func(c *Config) { c.Token.Address = "[2001:db8::1]:443" }, ""},
		{"least MTU", func(c *Config) { c.MTU = 1280 }, ""},
		{"largest MTU", func(c *Config) { c.MTU = 1500 }, ""},
		{"no token", func(c *Config) { c.Token = token.Token{} }, "Token: no gateway address"},
		{"no port", func(c *Config) { c.Token.Address = "host:0" }, "Token:"},
		{"no state directory", func(c *Config) { c.StateDir = "" }, "StateDir:"},
		{"MTU of 1000", func(c *Config) { c.MTU = 1000 }, "MTU: 1000 is out of range: 1280 to 1500"},
		{"MTU of 100000", func(c *Config) { c.MTU = 100000 }, "MTU: 100000 is out of range: 1280 to 1500"},
		{"negative MTU", func(c *Config) { c.MTU = -1 }, "MTU:"},
		{"too many queues", func(c *Config) { c.Queues = 257 }, "Queues: 257 is out of range: 1 to 256"},
		{"negative queues", func(c *Config) { c.Queues = -1 }, "Queues:"},
		{"long name", func(c *Config) { c.Interface = "sixteen-letters0" }, "Interface:"},
		{"name with a slash", func(c *Config) { c.Interface = "a/b" }, "Interface:"},
		{"name with a pattern", func(c *Config) { c.Interface = "tun%d" }, "Interface:"},
		{"loopback", func(c *Config) { c.Interface = "lo" }, "Interface:"},
		{"unknown kill switch", func(c *Config) { c.KillSwitch = 3 }, "KillSwitch:"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := good
			tt.change(&c)
			s, err := New(c)
			if tt.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				if s.cfg.Interface != "quicvpn0" || s.cfg.Queues < 1 || s.cfg.Queues > 8 {
					t.Errorf("defaults: interface %q, queues %d", s.cfg.Interface, s.cfg.Queues)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want it to contain %q", err, tt.want)
			}
		})
	}
}

func TestKeyIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	cfg := Config{Token: token.Token{Address: "gateway.example:443"}, StateDir: dir}
	if _, err := New(cfg); err != nil {
		t.Fatal(err)
	}
	first, err := os.ReadFile(filepath.Join(dir, "client.key"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(cfg); err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(filepath.Join(dir, "client.key"))
	if err != nil || string(first) != string(second) {
		t.Errorf("another start has another key (%v)", err)
	}
}

func TestKillSwitchString(t *testing.T) {
	var got []string
	for k := KillSwitchOn; k <= KillSwitchOff+1; k++ {
		got = append(got, k.String())
	}
	if diff := cmp.Diff([]string{"on", "keep", "off", "KillSwitch(3)"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestOnLink(t *testing.T) {
	addr := func(s string) netlink.Addr {
		a, err := netlink.ParseAddr(s)
		if err != nil {
			t.Fatal(err)
		}
		return *a
	}
	peer := addr("10.1.0.1/32")
	_, other, err := net.ParseCIDR("10.2.0.0/30")
	if err != nil {
		t.Fatal(err)
	}
	peer.Peer = other
	tests := []struct {
		addr netlink.Addr
		own  []string
		want []string
	}{
		{addr("172.17.0.2/16"), []string{"172.17.0.2"}, []string{"172.17.0.1-172.17.255.254"}},
		{addr("192.0.2.2/31"), []string{"192.0.2.2"}, []string{"192.0.2.2-192.0.2.3"}},
		{addr("192.0.2.2/32"), []string{"192.0.2.2"}, []string{"192.0.2.2-192.0.2.2"}},
		{peer, []string{"10.1.0.1"}, []string{"10.2.0.1-10.2.0.2"}},
		{addr("10.0.0.1/8"), []string{"10.0.0.1"}, []string{"10.0.0.1-10.255.255.254"}},
		// Half of the internet is no link.
		{addr("10.0.0.1/1"), []string{"10.0.0.1"}, nil},
		{addr("10.0.0.1/0"), []string{"10.0.0.1"}, nil},
		{addr("2001:db8::2/64"), []string{"2001:db8::2"}, []string{"2001:db8::-2001:db8::ffff:ffff:ffff:ffff"}},
		{addr("2001:db8::2/3"), []string{"2001:db8::2"}, nil},
		{addr("192.168.0.1/15"), []string{"192.168.0.1"}, nil},
		// Nor is what is somebody else's.
		{addr("8.8.8.7/24"), []string{"8.8.8.7"}, nil},
		{addr("8.8.8.8/32"), []string{"8.8.8.8"}, nil},
		{addr("2606:4700:4700::2/64"), []string{"2606:4700:4700::2"}, nil},
		{addr("100.64.0.2/30"), []string{"100.64.0.2"}, []string{"100.64.0.1-100.64.0.2"}},
		{addr("fd00::2/64"), []string{"fd00::2"}, []string{"fd00::-fd00::ffff:ffff:ffff:ffff"}},
		{addr("fe80::1/64"), nil, []string{"fe80::-fe80::ffff:ffff:ffff:ffff"}},
	}
	for _, tt := range tests {
		var u uplink
		var b netipx.IPSetBuilder
		u.take(tt.addr, &b)
		set, err := b.IPSet()
		if err != nil {
			t.Fatal(err)
		}
		var own, got []string
		for _, a := range u.addrs {
			own = append(own, a.String())
		}
		for _, r := range set.Ranges() {
			got = append(got, r.String())
		}
		if diff := cmp.Diff([][]string{tt.own, tt.want}, [][]string{own, got}); diff != "" {
			t.Errorf("%v:\n%s", tt.addr, diff)
		}
	}
}

func TestTargets(t *testing.T) {
	mapped := netip.MustParseAddr("::ffff:192.0.2.1")
	var many []netip.Addr
	for i := range 100 {
		many = append(many, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
	}
	tests := []struct {
		name string
		in   []netip.Addr
		best netip.Addr
		want []netip.Addr
	}{
		{"in turns", []netip.Addr{addr4a, addr4b, addr6a, addr6b}, netip.Addr{}, []netip.Addr{addr6a, addr4a, addr6b, addr4b}},
		{"best first", []netip.Addr{addr4a, addr4b, addr6a}, addr4b, []netip.Addr{addr4b, addr6a, addr4a}},
		{"best is gone", []netip.Addr{addr4a}, addr4b, []netip.Addr{addr4a}},
		{"twice", []netip.Addr{addr4a, mapped, addr4a}, addr4a, []netip.Addr{addr4a}},
		{"none", nil, addr4a, nil},
		{"too many", many, netip.Addr{}, many[:16]},
	}
	for _, tt := range tests {
		if diff := cmp.Diff(tt.want, targets(tt.in, tt.best), byValue); diff != "" && len(tt.want)+len(targets(tt.in, tt.best)) > 0 {
			t.Errorf("%s:\n%s", tt.name, diff)
		}
	}
}

func TestQuiet(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	steps := []struct {
		now, heard float64
		waiting    bool
		want       time.Duration
	}{
		{10, 0, false, 0},                // idle
		{10.25, 0, true, 0},              // the question is new, however old the last word is
		{10.5, 0, true, time.Second / 4}, // and now owed
		{11.25, 0, true, time.Second},
		{11.5, 11.4, true, 0}, // answered, and asked again
		{11.75, 11.4, true, time.Second / 4},
		{12, 11.9, false, 0},
		{15, 11.9, true, 0},
	}
	var q quiet
	for _, s := range steps {
		if got := q.after(at(s.now), at(s.heard), s.waiting); got != s.want {
			t.Errorf("at %v: %v, want %v", s.now, got, s.want)
		}
	}
}

func TestRepeated(t *testing.T) {
	var r repeated
	now := time.Unix(1000, 0)
	var said []int
	for i := range 25 {
		if _, say := r.say(fmt.Sprintf("read udp 127.0.0.1:%d: no", 40000+i), now); say {
			said = append(said, i+1)
		}
		now = now.Add(time.Second)
	}
	if diff := cmp.Diff([]int{1, 10, 20}, said); diff != "" {
		t.Error(diff)
	}
	if n, say := r.say("read udp 127.0.0.1:1: no", now.Add(2*time.Minute)); !say || n != 26 {
		t.Errorf("after two minutes: %d, %t", n, say)
	}
	if n, say := r.say("something else", now.Add(2*time.Minute)); !say || n != 1 {
		t.Errorf("another text: %d, %t", n, say)
	}
	// Two that take turns are held back too.
	if n, say := r.say("read udp 127.0.0.1:1: no", now.Add(2*time.Minute)); say || n != 27 {
		t.Errorf("in turns: %d, %t", n, say)
	}
	for i := range 1000 {
		r.say(strings.Repeat("x", i), now)
	}
	if len(r.said) > 16 {
		t.Errorf("%d texts are remembered", len(r.said))
	}
}

type idle struct{}

func (idle) Error() string   { return "timeout: no recent network activity" }
func (idle) Timeout() bool   { return true }
func (idle) Temporary() bool { return false }

func TestExplain(t *testing.T) {
	c := &connector{host: "gateway.example", port: 443}
	tests := []struct {
		err  error
		want []string
	}{
		{fmt.Errorf("connect: %w", tunnel.ErrPin), []string{"not the one in the token"}},
		{fmt.Errorf("connect: %w", tunnel.ErrNotYetValid), []string{"not yet valid", "clock"}},
		{fmt.Errorf("connect: %w", tunnel.ErrExpired), []string{"expired", "clock"}},
		{&tunnel.RefusedError{Code: "token-revoked", Text: "ask for another"}, []string{"token-revoked", "ask for another"}},
		{fmt.Errorf("connect: %w", idle{}), []string{"UDP to it seems blocked", "gateway.example:443 (192.0.2.1)"}},
		{context.DeadlineExceeded, []string{"UDP to it seems blocked"}},
		{fmt.Errorf("send: %w", unix.ENETUNREACH), []string{"no way to gateway.example:443", "network is unreachable"}},
		{fmt.Errorf("send: %w", unix.EPERM), []string{"a firewall in this namespace"}},
		{fmt.Errorf("send: %w", unix.ECONNREFUSED), []string{"nothing listens"}},
		{errors.New("something new"), []string{"something new"}},
	}
	for _, tt := range tests {
		got := c.explain(addr4a, tt.err)
		for _, want := range tt.want {
			if !strings.Contains(got.Error(), want) {
				t.Errorf("%v: got %q, want it to contain %q", tt.err, got, want)
			}
		}
		if !errors.Is(got, tt.err) {
			t.Errorf("%v: the cause is lost", tt.err)
		}
	}
	// A no says more than no answer, and that more than no way.
	no, blocked := c.explain(addr4a, tunnel.ErrPin), c.explain(addr4a, idle{})
	noway, noname := c.explain(addr4a, unix.ENETUNREACH), c.unresolved(errNoAddress)
	if got := worst([]error{noway, blocked, no, noname, context.Canceled}); got != no {
		t.Errorf("worst: %v", got)
	}
	if got := worst([]error{noway, blocked, noname}); got != blocked {
		t.Errorf("worst: %v", got)
	}
	if got := worst([]error{noway, noname}); got != noname {
		t.Errorf("worst: %v", got)
	}
}

// TestPolicyEqual: a part that equal forgot would never be updated.
func TestPolicyEqual(t *testing.T) {
	whole := policy{
		tun: "quicvpn0", own: []netip.Addr{addr4a}, peers: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
		gatewaySelf: []netip.Addr{addr4b}, gateways: []netip.AddrPort{netip.AddrPortFrom(addr4a, 1)},
		resolvers: []netip.AddrPort{netip.AddrPortFrom(addr4b, 53)},
		uplinks: []uplink{{
			name: "eth0", onLink: []netipx.IPRange{linkMulticast}, subnets: []netip.Prefix{netip.MustParsePrefix("2606:4700::/64")},
		}},
	}
	if !whole.equal(whole) {
		t.Error("not equal to itself")
	}
	rendered := func(p policy) string { return fmt.Sprint(describe(p.chains())) }
	for name, change := range map[string]func(*policy){
		"tun":         func(p *policy) { p.tun = "other" },
		"own":         func(p *policy) { p.own = nil },
		"peers":       func(p *policy) { p.peers = nil },
		"gatewaySelf": func(p *policy) { p.gatewaySelf = nil },
		"gateways":    func(p *policy) { p.gateways = nil },
		"resolvers":   func(p *policy) { p.resolvers = nil },
		"onLink":      func(p *policy) { p.uplinks = []uplink{{name: "eth0", subnets: p.uplinks[0].subnets}} },
		"subnets":     func(p *policy) { p.uplinks = []uplink{{name: "eth0", onLink: p.uplinks[0].onLink}} },
	} {
		p := whole
		change(&p)
		if p.equal(whole) {
			t.Errorf("%s does not count", name)
		}
		if name != "tun" && rendered(p) == rendered(whole) {
			t.Errorf("%s is not in the rules", name)
		}
	}
}

// TestInboxWritesRuns is about what a peer's packets are passed on as.
func TestInboxWritesRuns(t *testing.T) {
	var drops packet.Drops
	in := &inbox{device: func() *device { return nil }, own: []netip.Addr{toyOwn4}, drops: &drops}
	in.WritePackets(0, make([]packet.Packet, 3))
	if diff := cmp.Diff(map[string]uint64{"device": 3}, drops.Snapshot()); diff != "" {
		t.Errorf("without a device:\n%s", diff)
	}
	for _, p := range []packet.Packet{
		{Data: tcpSYN(toyPeer4, toyOwn4, 1, 2)},
		{Data: tcpSYN(toyPeer4, toyOwn4, 1, 2), Segment: 100},
		{Data: tcpSYN(toyPeer4, toyPeer4, 1, 2)},
		{Data: nil},
	} {
		in.accepts(&p)
	}
	if diff := cmp.Diff(map[string]uint64{"device": 3, "malformed": 2, "destination": 1}, drops.Snapshot()); diff != "" {
		t.Error(diff)
	}
}
