package tunnel

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What a client asks for comes to the gateway, and what it gets to the client.
func TestWish(t *testing.T) {
	announce := parsePrefixes([]string{"172.18.0.0/16", "fd12:3456::/48"})
	want := testGrant
	want.Block = parsePrefixes([]string{"10.91.255.0/24", "fd00::ff00/120"})
	want.Announced = announce[1:]
	want.AnnounceRefused = "172.18.0.0/16 overlaps 172.18.0.0/16 of another host of the network: take another --subnet"
	joins := make(chan Join, 1)
	g := startGateway(t, ServerConfig{Authorize: func(_ context.Context, j Join) (Grant, error) {
		joins <- j
		return want, nil
	}})
	d := g.dialer(t)
	d.Block, d.Announce = true, announce
	s := dial(t, d, g.Addr())
	if j := <-joins; !j.Block || !slices.Equal(j.Announce, announce) {
		t.Errorf("the gateway heard %+v", j)
	}
	if d := cmp.Diff(want, s.Grant(), compareNetip); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(want.Peers, s.Peers(), compareNetip); d != "" {
		t.Error("the first peers are not those of the grant:", d)
	}

	// Who asks for nothing looks as ever, and believes nothing that it did not
	// ask for.
	plain := dial(t, g.dialer(t), g.Addr())
	if j := <-joins; j.Block || j.Announce != nil {
		t.Errorf("the gateway heard %+v", j)
	}
	if got := plain.Grant().Announced; len(got) > 0 {
		t.Errorf("announced %v", got)
	}
}

// A text for people cannot make another header.
func TestRefusalIsPrintable(t *testing.T) {
	h := http.Header{}
	grantToHeader(Grant{AnnounceRefused: "no\r\nQuicvpn-Network: evil\x1b[2J"}, h)
	if got := h.Get(headerAnnounceRefused); strings.ContainsAny(got, "\r\n\x1b") {
		t.Errorf("%q", got)
	}
}

func TestWishHeaders(t *testing.T) {
	many := func(n int) string {
		var ps []string
		for i := range n {
			ps = append(ps, fmt.Sprintf("10.%d.0.0/16", i))
		}
		return strings.Join(ps, ", ")
	}
	for name, tc := range map[string]struct {
		block, announce []string
		names           []string
		wantBlock       bool
		want            int    // prefixes
		refused         string // what the refusal says
	}{
		"nothing":          {},
		"block":            {block: []string{"?1"}, wantBlock: true},
		"no block":         {block: []string{"?0"}},
		"block is a word":  {block: []string{"true"}, refused: "RFC 9651"},
		"block is empty":   {block: []string{""}, refused: "RFC 9651"},
		"block twice":      {block: []string{"?1", "?1"}, refused: "RFC 9651"},
		"one":              {announce: []string{"172.18.0.0/16"}, want: 1},
		"two lines":        {announce: []string{"172.18.0.0/16,fd00::/64", "10.0.0.0/8"}, want: 3},
		"as many as may":   {announce: []string{many(16)}, want: 16},
		"too many":         {announce: []string{many(17)}, refused: "more than 16"},
		"too many lines":   {announce: slices.Repeat([]string{"10.0.0.0/8"}, 17), refused: "more than 16"},
		"empty":            {announce: []string{""}, refused: "as in"},
		"comma at the end": {announce: []string{"10.0.0.0/8,"}, refused: "as in"},
		"an address":       {announce: []string{"10.0.0.1"}, refused: "as in"},
		"a name":           {announce: []string{strings.Repeat("x", 1000)}, refused: "as in"},
		"mapped":           {announce: []string{"::ffff:10.0.0.0/104"}, refused: "as in"},
		"a zone":           {announce: []string{"fe80::%eth0/64"}, refused: "as in"},
		"too long":         {announce: []string{"10.0.0.0/33"}, refused: "as in"},
		"unmasked":         {announce: []string{"172.18.0.1/16"}, refused: "announce 172.18.0.0/16"},
		"twice":            {announce: []string{"10.0.0.0/8, 10.0.0.0/8"}, refused: "overlap"},
		"one in another":   {announce: []string{"10.1.0.0/16, 10.0.0.0/8"}, refused: "overlap"},
		"names":            {names: []string{"all"}},
		"no names":         {names: []string{"off"}},
		"some names":       {names: []string{"some"}, refused: "neither all nor off"},
		"names twice":      {names: []string{"all", "all"}, refused: "neither all nor off"},
		"empty names":      {names: []string{""}, refused: "neither all nor off"},
	} {
		t.Run(name, func(t *testing.T) {
			h := http.Header{headerBlock: tc.block, headerAnnounce: tc.announce, headerNames: tc.names}
			var j Join
			err := wishFromHeader(h, &j)
			if tc.refused == "" {
				if tc.names != nil && string(j.Names) != tc.names[0] {
					t.Errorf("names %q", j.Names)
				}
				if err != nil || j.Block != tc.wantBlock || len(j.Announce) != tc.want {
					t.Errorf("%+v, %v", j, err)
				}
				return
			}
			refused, ok := err.(*RefusedError)
			if !ok || refused.Status != http.StatusBadRequest || !strings.Contains(refused.Text, tc.refused) || len(refused.Text) > 300 {
				t.Errorf("error %v, want one with %q", err, tc.refused)
			}
		})
	}
}

// The gateway says no before anybody is asked.
func TestWishRefused(t *testing.T) {
	g := startGateway(t, ServerConfig{Authorize: func(context.Context, Join) (Grant, error) {
		t.Error("the gateway was asked")
		return testGrant, nil
	}})
	d := g.dialer(t)
	d.Announce = []netip.Prefix{netip.MustParsePrefix("10.1.2.3/8")}
	_, err := d.Dial(t.Context(), g.Addr())
	if refused, ok := err.(*RefusedError); !ok || refused.Status != http.StatusBadRequest || refused.Code != "bad-announce" {
		t.Errorf("Dial = %v", err)
	}
}

// The most that a gateway tells of peers and refusals comes through.
func TestWishWithManyPeers(t *testing.T) {
	grant := testGrant
	for i := range 256 {
		grant.Peers = append(grant.Peers, netip.MustParsePrefix(fmt.Sprintf("fd99:9999:9999:9999:9999:9999:%x:1230/124", 0x9000+i)))
	}
	grant.AnnounceRefused = strings.Repeat(grant.Peers[9].String()+" overlaps "+grant.Peers[9].String()+
		" of another host of the network: create the network with another --subnet there or here; ", maxAnnounce)
	g := startGateway(t, ServerConfig{Authorize: func(context.Context, Join) (Grant, error) { return grant, nil }})
	s := dial(t, g.dialer(t), g.Addr())
	if d := cmp.Diff(grant.Peers, s.Peers(), compareNetip); d != "" {
		t.Error(d)
	}
	receive(t, s)
	server := <-g.serve
	receive(t, server)
	if err := server.SetPeers(grant.Peers[1:]); err != nil {
		t.Fatal(err)
	}
	want := slices.Clone(grant.Peers[1:])
	slices.SortFunc(want, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	waitPeers(t, s, want)
}

// FuzzGrantHeader reads what a gateway tells, and writes it again.
func FuzzGrantHeader(f *testing.F) {
	f.Add("10.91.0.0/16, fd00::/64", "172.18.0.0/16", "172.17.0.0/16 overlaps", "10.91.0.1")
	f.Add(",", "x", "\x1b[2J", "::1%eth0")
	f.Fuzz(func(t *testing.T, peers, announced, refused, gateway string) {
		g, err := grantFromHeader(http.Header{headerPeers: {peers}, headerAnnounced: {announced}, headerAnnounceRefused: {refused}, headerGateway: {gateway}})
		if err != nil {
			return
		}
		h := http.Header{}
		grantToHeader(g, h)
		again, err := grantFromHeader(h)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(g, again, compareNetip); d != "" {
			t.Error(d)
		}
	})
}

func FuzzWish(f *testing.F) {
	f.Add("?1", "172.18.0.0/16, fd00::/64")
	f.Add("?0", "10.0.0.0/8,10.0.0.0/8")
	f.Add("", "::ffff:0:0/96")
	f.Fuzz(func(t *testing.T, block, announce string) {
		var j Join
		if wishFromHeader(http.Header{headerBlock: {block}, headerAnnounce: {announce}}, &j) != nil {
			return
		}
		if len(j.Announce) == 0 || len(j.Announce) > maxAnnounce {
			t.Fatalf("%d prefixes from %q", len(j.Announce), announce)
		}
		for i, p := range j.Announce {
			if p != p.Masked() || p.Addr().Is4In6() || slices.ContainsFunc(j.Announce[:i], p.Overlaps) {
				t.Errorf("%v of %v", p, j.Announce)
			}
		}
		again := http.Header{}
		(&Dialer{Block: j.Block, Announce: j.Announce}).wishToHeader(again)
		var k Join
		if err := wishFromHeader(again, &k); err != nil || k.Block != j.Block || !slices.Equal(k.Announce, j.Announce) {
			t.Errorf("%+v became %+v, %v", j, k, err)
		}
	})
}
