package gateway

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

func TestPoolFillsCompletely(t *testing.T) {
	tests := []struct {
		v4, v6 string
		want   int
	}{
		{"192.0.2.0/30", "fd00::/64", 1},
		{"192.0.2.0/29", "fd00::/64", 5},
		{"192.0.2.240/28", "2001:db8::/120", 13},
		{"10.91.0.0/16", "fd12:3456:789a::/64", 1<<16 - 3},
		{"10.91.0.0/16", "2001:db8::fffc/126", 2},
		{"10.91.0.0/24", "2001:db8::/122", 62},
		{"10.0.0.0/29", "2000::/16", 5},
	}
	for _, tt := range tests {
		t.Run(tt.v4+" "+tt.v6, func(t *testing.T) {
			v4, v6 := netip.MustParsePrefix(tt.v4), netip.MustParsePrefix(tt.v6)
			if err := checkPool4(v4); err != nil {
				t.Fatal(err)
			}
			if err := checkPool6(v6); err != nil {
				t.Fatal(err)
			}
			p := newPool(v4, v6)
			seen := make(map[netip.Addr]bool)
			var hosts []uint32
			for {
				host, ok := p.allocate()
				if !ok {
					break
				}
				a4, a6 := p.addresses(host)
				checkHost(t, v4, a4)
				checkHost(t, v6, a6)
				if seen[a4] || seen[a6] {
					t.Fatalf("%s or %s is given twice", a4, a6)
				}
				seen[a4], seen[a6] = true, true
				if back, ok := p.number(a4, a6); !ok || back != host {
					t.Fatalf("%s is number %d, %v; want %d", a4, back, ok, host)
				}
				hosts = append(hosts, host)
			}
			if len(hosts) != tt.want {
				t.Errorf("%d clients fit, want %d", len(hosts), tt.want)
			}
			p.free(hosts[0])
			if host, ok := p.allocate(); !ok || host != hosts[0] {
				t.Errorf("after one was freed: %d, %v; want %d", host, ok, hosts[0])
			}
		})
	}
}

// checkHost wants an address of a prefix that is neither the gateway's own, nor
// the network's, nor the broadcast address.
func checkHost(t *testing.T, p netip.Prefix, a netip.Addr) {
	t.Helper()
	if !p.Contains(a) || a == p.Addr() || a == p.Addr().Next() {
		t.Fatalf("%s in %s is not a client's", a, p)
	}
	if a.Is4() && !p.Contains(a.Next()) {
		t.Fatalf("%s in %s is the broadcast address", a, p)
	}
}

// TestPoolAgainstModel does random things to small pools beside a plain set.
func TestPoolAgainstModel(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 0))
		v4 := netip.PrefixFrom(netip.MustParseAddr("10.20.30.0"), 24+r.IntN(7))
		p := newPool(v4, netip.MustParsePrefix("fd00::/64"))
		size := 1<<(32-v4.Bits()) - 3
		model := make(map[uint32]bool)
		for range 2000 {
			if r.IntN(2) == 0 {
				host, ok := p.allocate()
				if ok != (len(model) < size) {
					t.Fatalf("seed %d: allocate with %d of %d taken: %v", seed, len(model), size, ok)
				}
				if ok && model[host] {
					t.Fatalf("seed %d: %d is given twice", seed, host)
				}
				if ok {
					model[host] = true
				}
				continue
			}
			host := uint32(r.IntN(size + 6))
			if want := host > gatewayHost && host < p.end && !model[host]; p.take(host) != want {
				t.Fatalf("seed %d: take(%d) is not %v", seed, host, want)
			} else if want {
				model[host] = true
			}
			for host := range model {
				if r.IntN(3) == 0 {
					p.free(host)
					delete(model, host)
				}
				break
			}
		}
	}
}

func TestPoolReusesLate(t *testing.T) {
	p := newPool(netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/64"))
	first, _ := p.allocate()
	p.free(first)
	for range 252 {
		if host, ok := p.allocate(); !ok || host == first {
			t.Fatalf("%d, %v: the freed number came back while others were free", host, ok)
		}
	}
	if host, ok := p.allocate(); !ok || host != first {
		t.Errorf("got %d, %v; want the freed number %d", host, ok, first)
	}
}

func TestPoolNumberRefuses(t *testing.T) {
	p := newPool(netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/48"))
	for _, pair := range [][2]string{
		{"10.0.0.5", "fd00::6"}, {"10.0.1.5", "fd00::5"}, {"10.0.0.5", "fd00:0:0:1::5"},
		{"10.0.0.5", "fd01::5"}, {"10.0.0.5", "10.0.0.5"}, {"fd00::5", "fd00::5"}, {"::ffff:10.0.0.5", "fd00::5"},
	} {
		if host, ok := p.number(netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1])); ok {
			t.Errorf("%v is number %d", pair, host)
		}
	}
}

func TestCheckPool(t *testing.T) {
	for in, want := range map[string]string{
		"10.91.0.1/16": "did you mean 10.91.0.0/16?", "10.91.0.0/31": "between", "0.0.0.0/4": "between",
		"127.0.0.0/8": "unicast", "169.254.0.0/16": "unicast", "224.0.0.0/8": "unicast", "240.0.0.0/8": "unicast", "fd00::/64": "not an IPv4 prefix",
	} {
		if err := checkPool4(netip.MustParsePrefix(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("IPv4 pool %s: got %v, want %q", in, err, want)
		}
	}
	for in, want := range map[string]string{
		"fd00::1/64": "did you mean fd00::/64?", "fd00::/127": "between", "fe80::/64": "unicast", "ff00::/16": "unicast",
		"::/64": "unicast", "10.0.0.0/16": "not an IPv6 prefix", "::ffff:10.0.0.0/112": "not an IPv6 prefix",
	} {
		if err := checkPool6(netip.MustParsePrefix(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("IPv6 pool %s: got %v, want %q", in, err, want)
		}
	}
	if checkPool4(netip.Prefix{}) == nil || checkPool6(netip.Prefix{}) == nil {
		t.Error("the zero prefix is a pool")
	}
}

func TestRandomULA(t *testing.T) {
	seen := make(map[netip.Prefix]bool)
	for range 100 {
		p := randomULA()
		if err := checkPool6(p); err != nil || !netip.MustParsePrefix("fd00::/8").Contains(p.Addr()) || p.Bits() != 64 || seen[p] {
			t.Fatal(fmt.Sprint(p, err, seen[p]))
		}
		seen[p] = true
	}
}
