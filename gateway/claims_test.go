package gateway

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/tunnel"
)

// A claim stays for five minutes when its session has ended, and without one.
func TestClaimsExpire(t *testing.T) {
	l := newRouterLab(t)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- l.expire(ctx) }()
		p := prefix("172.18.0.0/16")
		a, _ := l.attachAs(t, hostA, p)
		time.Sleep(time.Hour) // while its session is there
		other := func() bool {
			accepted, _, _ := l.claim(hostB, []netip.Prefix{p})
			return len(accepted) == 1
		}
		if other() {
			t.Fatal("another host took a prefix that is in use")
		}
		l.detach(a)
		time.Sleep(claimTime - time.Second)
		if other() {
			t.Fatal("another host took a prefix after a short outage")
		}
		// The others are told when it is over.
		told, _ := l.sa.news()
		time.Sleep(claimTime / 30)
		synctest.Wait()
		if now, peers := l.sa.news(); now != told+1 || len(peers) != 2 {
			t.Errorf("told %d times, peers %v", now-told, peers)
		}
		if !other() {
			t.Fatal("another host did not get a prefix that is free")
		}
		// A join that never came to a session holds it as long.
		time.Sleep(claimTime - time.Second)
		if accepted, _, _ := l.claim(hostA, []netip.Prefix{p}); len(accepted) > 0 {
			t.Error("the prefix was taken from a join that may come to a session")
		}
		time.Sleep(2 * time.Second)
		if accepted, _, _ := l.claim(hostA, []netip.Prefix{p}); len(accepted) != 1 {
			t.Error("a join that came to nothing keeps the prefix")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A network's claims are bounded, and what a client is told of the most there
// can be fits the answer's headers and a capsule.
func TestClaimsAreBounded(t *testing.T) {
	l := newRouterLab(t)
	for i := range maxClaims / 16 {
		var announce []netip.Prefix
		for j := range 16 {
			announce = append(announce, prefix(fmt.Sprintf("fd99:9999:9999:9999:9999:9999:%x:1230/124", 0x9000+i*16+j)))
		}
		if accepted, refused, _ := l.claim(Client{ID: tunnel.Fingerprint{1, byte(i)}, Network: "one"}, announce); len(accepted) != 16 {
			t.Fatal(refused)
		}
	}
	accepted, refused, peers := l.claim(hostA, []netip.Prefix{prefix("172.18.0.0/16")})
	if len(accepted) > 0 || !strings.Contains(refused, "256") || len(peers) != 2+maxClaims {
		t.Errorf("accepted %v, refused %q, %d peers", accepted, refused, len(peers))
	}
	if accepted, _, _ := l.claim(hostC, []netip.Prefix{prefix("172.18.0.0/16")}); len(accepted) != 1 {
		t.Error("one network's claims bound another's")
	}
}

// TestClaimsAgainstModel does random things to claims and sessions of two
// networks beside a plain model, and compares who is found where.
func TestClaimsAgainstModel(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 3))
		l := newRouterLab(t)
		type claim struct {
			id   tunnel.Fingerprint
			port *port
		}
		model := map[string]map[netip.Prefix]claim{"red": {}, "blue": {}}
		ports := make(map[tunnel.Fingerprint]*port)
		random := func() netip.Prefix {
			if r.IntN(4) == 0 {
				return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0x77, 15: byte(r.IntN(256))}), 118+r.IntN(9)).Masked()
			}
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, 0, byte(r.IntN(256))}), 22+r.IntN(9)).Masked()
		}
		for range 300 {
			n := r.IntN(8)
			network := []string{"red", "blue"}[n%2]
			c := Client{ID: tunnel.Fingerprint{0xff, byte(n)}, Network: network,
				Addr4: netip.AddrFrom4([4]byte{10, 91, 1, byte(n)}), Addr6: netip.AddrFrom16([16]byte{0xfd, 0x12, 14: 1, 15: byte(n)})}
			all := model[network]
			switch r.IntN(5) {
			case 0:
				if p := ports[c.ID]; p != nil {
					l.detach(p)
					for prefix, cl := range all {
						if cl.id == c.ID {
							all[prefix] = claim{c.ID, nil}
						}
					}
					delete(ports, c.ID)
				}
			case 1:
				l.forget([]tunnel.Fingerprint{c.ID})
				for prefix, cl := range all {
					if cl.id == c.ID {
						delete(all, prefix)
					}
				}
				delete(ports, c.ID)
			default:
				var announce []netip.Prefix
				for range r.IntN(4) {
					if p := random(); !slices.ContainsFunc(announce, p.Overlaps) {
						announce = append(announce, p)
					}
				}
				p, _ := l.attachAs(t, c, announce...)
				ports[c.ID] = p
				for prefix, cl := range all {
					if cl.id == c.ID {
						delete(all, prefix)
					}
				}
				var want []netip.Prefix
				for _, a := range announce {
					free := true
					for prefix := range all {
						free = free && !prefix.Overlaps(a)
					}
					if free {
						want = append(want, a)
					}
				}
				for _, a := range want {
					all[a] = claim{c.ID, p}
				}
				slices.SortFunc(want, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
				if diff := cmp.Diff(want, p.announced, byText); diff != "" {
					t.Fatalf("seed %d: announced %v: %s", seed, announce, diff)
				}
			}
			for range 20 {
				ip := random().Addr()
				for network, all := range model {
					var want *port
					known := false
					for prefix, cl := range all {
						if prefix.Contains(ip) {
							want, known = cl.port, true
						}
					}
					l.mu.Lock()
					n := l.networkLocked(network)
					l.mu.Unlock()
					if got, ok := n.lookup(ip); got != want || ok != known {
						t.Fatalf("seed %d: %v in %s is %p, %v; want %p, %v", seed, ip, network, got, ok, want, known)
					}
				}
			}
		}
	}
}
