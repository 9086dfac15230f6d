package e2e

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// noTooBig makes the uplink silent about packets that are too large.
const noTooBig = `table inet silent { chain out {
	type filter hook output priority 0
	icmp type destination-unreachable drop
	icmpv6 type packet-too-big drop
}; }`

// TestPathMTU fetches pages over paths that carry less than the links at their
// ends. A TLS page takes a ClientHello and certificates of several packets.
func TestPathMTU(t *testing.T) {
	for _, tt := range []struct {
		name   string
		mtu    int
		silent bool
		ipv6   bool // whether the path can carry IPv6's 1280 bytes in the tunnel
	}{
		{"1400", 1400, false, true},
		{"1400, silent", 1400, true, true},
		{"1280", 1280, false, false},
		{"1280, silent", 1280, true, false},
	} {
		for _, address := range []string{gatewayEnd4.String(), gatewayEnd6.String()} {
			t.Run(tt.name+" to "+address, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, options{address: address})
				w.SetPathMTU(tt.mtu)
				if tt.silent {
					w.Uplink.Nft(noTooBig)
				}
				w.startGateway()
				c := w.client0()
				if tt.ipv6 {
					c.join(w.token)
					c.checkPages()
				} else {
					c.start(w.token)
					c.waitFor(netlab.ServerAddr4)
					if err := c.sidecar.WaitLog(w.ctx, "IPv6"); err != nil {
						t.Errorf("no reason for the loss of IPv6: %v", err)
					}
					if seen, err := c.page("https", netlab.ServerAddr4); err != nil || seen != netlab.EgressAddr4.String() {
						t.Errorf("TLS page: seen as %q (%v)", seen, err)
					}
				}
				c.download()
				c.checkTunnel()
			})
		}
	}
}

// download fetches a page of many packets.
func (c *client) download() {
	c.w.t.Helper()
	const size = 3 << 20
	ctx, cancel := context.WithTimeout(c.w.ctx, 20*time.Second)
	defer cancel()
	page, err := c.ns.Get(ctx, pageURL("https", netlab.ServerAddr4)+"bytes/3145728")
	if err != nil || len(page) != size {
		c.w.t.Errorf("download: %d bytes (%v), want %d", len(page), err, size)
	}
}

// swallow makes the path lose what is too large, without a word.
const swallow = `table inet swallow { chain forward {
	type filter hook forward priority 0
	meta length > 1400 drop
}; }`

// TestPathShrinks takes bytes from the path of a session that is open.
func TestPathShrinks(t *testing.T) {
	for name, shrink := range map[string]func(w *world){
		"and says so": func(w *world) { w.SetPathMTU(1400) },
		"in silence":  func(w *world) { w.Uplink.Nft(swallow) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, options{})
			w.startGateway()
			c := w.client0()
			c.join(w.token)
			c.download()
			shrink(w)
			deadline := time.Now().Add(patience)
			for {
				ctx, cancel := context.WithTimeout(w.ctx, 3*time.Second)
				page, err := c.ns.Get(ctx, pageURL("https", netlab.ServerAddr4)+"bytes/100000")
				cancel()
				if err == nil && len(page) == 100000 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("no page after the path shrank: %v\nsidecar:\n%s", err, c.sidecar.Log())
				}
			}
			c.waitUp()
			c.checkPages()
			c.checkTunnel()
		})
	}
}

// TestSizes sends packets of every size from 1200 to 1500 through the tunnel:
// each arrives, or its sender learns that it is too large.
func TestSizes(t *testing.T) {
	for _, tt := range []struct {
		name string
		tun  int // MTU that somebody gives the client's TUN device; 0 leaves it
	}{
		{"as it comes", 0},
		{"with a TUN device that promises too much", 1500},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, options{})
			w.startGateway()
			c := w.client0()
			c.join(w.token)
			for _, version := range []int{4, 6} {
				for _, df := range []bool{false, true} {
					if tt.tun != 0 {
						c.ns.Iface("quicvpn0").SetMTU(tt.tun)
					}
					up, down := udpPaths(c, version, df)
					for _, p := range []*path{up, down, icmpPath(c, version, df)} {
						p.sweep(t)
						p.close()
					}
				}
			}
			c.checkTunnel()
		})
	}
}

// sweep sends a packet of every size.
func (p *path) sweep(t *testing.T) {
	const tries = 3 // the first may be the one whose ICMP answer is learnt from
	var arrived, tooLarge int
	for size := 1200; size <= 1500; size++ {
		var got outcome
		for range tries {
			if got = p.try(size); got != silence {
				break
			}
		}
		switch {
		case got == silence:
			t.Errorf("%s: %d bytes vanished in silence, %d times", p.name, size, tries)
		case got == delivered:
			arrived++
		case !p.df:
			t.Errorf("%s: %d bytes were refused as too large though they may be fragmented", p.name, size)
		default:
			tooLarge++
		}
		if size <= 1300 && got == refused {
			t.Errorf("%s: %d bytes were refused, which the path can carry", p.name, size)
		}
		if t.Failed() && size%10 == 0 {
			return // one of each kind is enough to see
		}
	}
	if arrived < 101 || p.df != (tooLarge > 0) {
		t.Errorf("%s: %d sizes arrived and %d were too large", p.name, arrived, tooLarge)
	}
	t.Logf("%s: %d sizes arrived, %d were too large", p.name, arrived, tooLarge)
}

// An outcome is what became of a packet.
type outcome int

const (
	silence   outcome = iota // nothing was heard of it
	delivered                // it arrived whole
	refused                  // the sender's kernel says that it is too large
)

// A path is one way for packets of one kind.
type path struct {
	name string
	df   bool
	// send sends a packet of the size with a number in it.
	send func(size int, number uint32) error
	// arrivals are the numbers of what arrived, at its full size.
	arrivals <-chan uint32
	close    func()

	number uint32
}

func (p *path) try(size int) outcome {
	p.number++
	err := p.send(size, p.number)
	if errors.Is(err, syscall.EMSGSIZE) {
		return refused
	}
	if err != nil {
		panic(p.name + ": " + err.Error())
	}
	timeout := time.After(300 * time.Millisecond)
	for {
		select {
		case n := <-p.arrivals:
			if n == p.number {
				return delivered
			}
		case <-timeout:
			return silence
		}
	}
}
