package gateway

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A session whose grant is of an enrolment that is over gets nothing, also where
// the same key is welcome by another token.
func TestClientOfAnOldGrant(t *testing.T) {
	dir, first := newState(t, InitOptions{})
	second := newToken(t, dir, TokenOptions{Name: "second", Network: "other"})
	third := newToken(t, dir, TokenOptions{Name: "third", Network: "other", Allow: prefixes("10.20.0.0/16")})
	s := reopen(t, dir)
	pool4, pool6 := s.Pools()
	g := &Gateway{state: s, router: newRouter(routerConfig{pool4: pool4, pool6: pool6, admitted: s.Admitted, drops: new(packet.Drops)})}
	revoked := make(chan []tunnel.Fingerprint)
	defer watch(t, s, func(ids []tunnel.Fingerprint) { revoked <- ids })()

	if _, ok := g.clientOf(key(1), tunnel.Grant{}); ok {
		t.Error("a key that never came is a client")
	}
	old := mustJoin(t, s, join(1, first), start)
	for i, tok := range []struct {
		name string
		next tunnel.Join
	}{{"first", join(1, second)}, {"second", join(1, third)}} {
		if c, ok := g.clientOf(key(1), g.grant(old)); !ok || cmp.Diff(old, c, byText) != "" {
			t.Errorf("%d: got %+v, %v", i, c, ok)
		}
		if _, err := RevokeToken(dir, tok.name, start); err != nil {
			t.Fatal(err)
		}
		<-revoked
		if _, ok := g.clientOf(key(1), g.grant(old)); ok {
			t.Errorf("%d: a revoked key is a client", i)
		}
		var now Client
		within(t, patience, "enrolment anew", func() bool {
			c, err := s.Authorize(tok.next, start)
			now = c
			return err == nil
		})
		if _, ok := g.clientOf(key(1), g.grant(old)); ok {
			t.Errorf("%d: the old grant holds", i)
		}
		// The router asks again, when it gives the addresses.
		pol, err := newPolicy(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			client Client
			want   bool
		}{{old, false}, {now, true}, {Client{ID: key(1), TokenID: now.TokenID, Addr4: netip.MustParseAddr("10.91.9.9")}, false}} {
			if p := g.router.attach(tt.client, &fakeSession{}, pol, tunnel.Grant{}); (p != nil) != tt.want {
				t.Errorf("%d: attach of %+v gave %v", i, tt.client, p)
			}
		}
		old = now
	}
}
