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

// TestPoolAgainstModel does random things to small pools beside a plain map of
// who has a number: nobody, a client, or a block.
func TestPoolAgainstModel(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 0))
		v4 := netip.PrefixFrom(netip.MustParseAddr("10.20.32.0"), 20+r.IntN(11))
		p := newPool(v4, netip.MustParsePrefix("fd00::/64"))
		end := uint32(1<<(32-v4.Bits()) - 1)
		model := make(map[uint32]bool) // whether it is one of a block
		room := func(run uint32) bool {
			for host := run * blockSize; host < (run+1)*blockSize; host++ {
				if _, taken := model[host]; taken || host <= gatewayHost || host >= end {
					return false
				}
			}
			return true
		}
		anyRoom := func() bool {
			for run := range end/blockSize + 1 {
				if room(run) {
					return true
				}
			}
			return false
		}
		setRun := func(run uint32) {
			for host := run * blockSize; host < (run+1)*blockSize; host++ {
				model[host] = true
			}
		}
		for range 3000 {
			switch r.IntN(8) {
			case 0, 1, 2, 3:
				host, ok := p.allocate()
				if _, taken := model[host]; taken || ok != (len(model) < int(end)-gatewayHost-1) {
					t.Fatalf("seed %d: allocate gave %d, %v with %d of %d taken", seed, host, ok, len(model), end)
				}
				if ok {
					model[host] = false
				}
			case 4:
				host := uint32(r.IntN(int(end) + 3))
				if _, taken := model[host]; p.take(host) != (!taken && host > gatewayHost && host < end) {
					t.Fatalf("seed %d: take(%d) with %v", seed, host, taken)
				} else if !taken && host > gatewayHost && host < end {
					model[host] = false
				}
			case 5:
				want := anyRoom()
				run, ok := p.allocateBlock()
				if ok != want || ok && !room(run) {
					t.Fatalf("seed %d: allocateBlock gave %d, %v, want one: %v", seed, run, ok, want)
				}
				if ok {
					setRun(run)
				}
			case 6:
				run := uint32(r.IntN(int(end/blockSize) + 2))
				want := room(run)
				if p.takeBlock(run) != want {
					t.Fatalf("seed %d: takeBlock(%d) is not %v", seed, run, want)
				}
				if want {
					setRun(run)
				}
			case 7:
				for host, block := range model {
					if !block {
						p.free(host)
						delete(model, host)
						continue
					}
					if run := host / blockSize; r.IntN(2) == 0 {
						p.freeBlock(run)
						for host := run * blockSize; host < (run+1)*blockSize; host++ {
							delete(model, host)
						}
					}
					break
				}
			}
		}
	}
}

// Numbers stay together at the bottom and blocks at the top, also where much
// was freed, so that each finds room to the end.
func TestPoolBlocks(t *testing.T) {
	p := newPool(netip.MustParsePrefix("10.91.0.0/20"), netip.MustParsePrefix("fd00::/64"))
	// Of 16 runs the first is no block, because of the gateway's address in it,
	// and the last because of the broadcast address.
	var hosts []uint32
	for range 300 {
		host, ok := p.allocate()
		if !ok || host >= 2*blockSize {
			t.Fatalf("%d, %v", host, ok)
		}
		hosts = append(hosts, host)
	}
	for want := uint32(14); want >= 2; want-- {
		run, ok := p.allocateBlock()
		if !ok || run != want {
			t.Fatalf("block %d, %v; want %d", run, ok, want)
		}
		v4, v6 := p.block(run)
		if back, ok := p.run(v4, v6); !ok || back != run || v4 != v4.Masked() || v6 != v6.Masked() {
			t.Errorf("block %d is %v and %v, which is block %d, %v", run, v4, v6, back, ok)
		}
		last4, last6 := p.addresses(run*blockSize + blockSize - 1)
		if !v4.Contains(last4) || !v6.Contains(last6) || v4.Contains(last4.Next()) || v6.Contains(last6.Next()) {
			t.Errorf("block %d is %v and %v, and its last address %v and %v", run, v4, v6, last4, last6)
		}
	}
	if run, ok := p.allocateBlock(); ok {
		t.Fatalf("block %d out of nothing", run)
	}
	// One client keeps a whole run from being a block.
	for _, host := range hosts {
		if host != hosts[254] {
			p.free(host)
		}
	}
	if run, ok := p.allocateBlock(); ok {
		t.Fatalf("block %d although client %d is there", run, hosts[254])
	}
	p.free(hosts[254])
	if run, ok := p.allocateBlock(); !ok || run != 1 {
		t.Fatalf("block %d, %v; want 1", run, ok)
	}
	p.freeBlock(7)
	p.freeBlock(3)
	if run, ok := p.allocateBlock(); !ok || run != 7 { // after run 1 it goes around
		t.Errorf("block %d, %v; want 7", run, ok)
	}
	count := 0
	for _, ok := p.allocate(); ok; _, ok = p.allocate() {
		count++
	}
	if want := 254 + 255 + 256; count != want { // the first run, the last, and run 3
		t.Errorf("%d numbers beside the blocks, want %d", count, want)
	}
}

func TestPoolsWithoutBlocks(t *testing.T) {
	for _, pools := range [][2]string{{"10.91.0.0/24", "fd00::/64"}, {"10.91.0.0/23", "fd00::/64"}, {"10.91.0.0/16", "fd00::/120"}, {"10.91.0.0/30", "fd00::/64"}} {
		p := newPool(netip.MustParsePrefix(pools[0]), netip.MustParsePrefix(pools[1]))
		if run, ok := p.allocateBlock(); ok {
			t.Errorf("%v: block %d", pools, run)
		}
	}
	p := newPool(netip.MustParsePrefix("10.91.0.0/22"), netip.MustParsePrefix("fd00::/119"))
	if run, ok := p.allocateBlock(); !ok || run != 1 {
		t.Errorf("block %d, %v; want 1", run, ok)
	}
}

func TestNumbersOf(t *testing.T) {
	n := newNumbers(netip.MustParsePrefix("10.91.0.0/16"), netip.MustParsePrefix("fd12:3456::/48"))
	for text, want := range map[string]int{
		"10.91.0.0": 0, "10.91.2.3": 515, "10.91.255.255": 65535, "10.92.0.0": -1, "10.90.255.255": -1,
		"fd12:3456::": 0, "fd12:3456::203": 515, "fd12:3456::ffff:ffff": 1<<32 - 1, "fd12:3456::1:0:0": -1,
		"fd12:3456:0:1::203": -1, "fd12:3457::203": -1, "::ffff:10.91.2.3": -1,
	} {
		host, ok := n.of(netip.MustParseAddr(text))
		if ok != (want >= 0) || ok && host != uint32(want) {
			t.Errorf("%s is %d, %v; want %d", text, host, ok, want)
		}
	}
	v4, v6 := n.block(2)
	for _, pair := range [][2]netip.Prefix{
		{v4, netip.PrefixFrom(v6.Addr(), 119)}, {netip.PrefixFrom(v4.Addr(), 25), v6}, {v4, netip.MustParsePrefix("fd12:3456::300/120")},
		{netip.MustParsePrefix("10.91.2.128/24"), netip.MustParsePrefix("fd12:3456::280/120")}, {{}, {}}, {v6, v4},
	} {
		if run, ok := n.run(pair[0], pair[1]); ok {
			t.Errorf("%v is run %d", pair, run)
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
