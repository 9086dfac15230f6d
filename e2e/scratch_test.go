package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

func TestScratch(t *testing.T) {
	w := newWorld(t, options{address: "198.51.100.1:443"})
	cc := os.Getenv("CC_ALG")
	if cc == "" {
		cc = "bbr"
	}
	var rate, delay, limit int
	var mode string
	fmt.Sscanf(os.Getenv("SCRATCH"), "%d %d %d %s", &rate, &delay, &limit, &mode)
	relay(t, w.Uplink, rate, delay, limit)
	w.startGateway("--congestion", cc)
	c := w.client0()
	c.join(w.token, "--congestion", cc)
	w.Internet.ServeIperf(w.ctx, 5201)
	run := netlab.Iperf{Server: netip.AddrPortFrom(netlab.ServerAddr4, 5201), Duration: 12 * time.Second, Warmup: 3 * time.Second, Reverse: len(mode) > 3 && mode[3] == 'd'}
	if mode[:3] == "udp" {
		run.UDP, run.Rate = 1200, uint64(rate)*1e6*3/2
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		r, err := c.ns.Iperf(w.ctx, run)
		t.Logf("%s %s: %.2f Mbit/s (%.1f %%) lost %.3f %v", os.Getenv("SCRATCH"), cc, r.Bits/1e6, r.Bits/1e4/float64(rate), r.Lost, err)
	})
	time.Sleep(5 * time.Second)
	rtts, err := c.ns.Ping(w.ctx, netlab.Ping{To: netlab.ServerAddr4, Count: 80, Interval: 100 * time.Millisecond})
	if err == nil {
		n := len(rtts)
		t.Logf("ping: %d of 80 answered, p50 %v p95 %v max %v", n, rtts[n/2], rtts[n*95/100], rtts[n-1])
	}
	wg.Wait()
	c.w.stopRole(c.sidecar)
	t.Log(w.gateway.Log())
	t.Log(c.sidecar.Log())
}

func relay(t *testing.T, ns *netlab.NS, mbps, ms, limit int) {
	var front, back *net.UDPConn
	if err := ns.Do(func() (err error) {
		if front, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(198, 51, 100, 1), Port: 443}); err != nil {
			return err
		}
		back, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(198, 51, 100, 1)})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*net.UDPConn{front, back} {
		c.SetReadBuffer(16 << 20)
		c.SetWriteBuffer(16 << 20)
	}
	client := make(chan netip.AddrPort, 1)
	type late struct {
		b  []byte
		at time.Time
	}
	pipe := func(name string, from, by *net.UDPConn, dst func(netip.AddrPort) netip.AddrPort) {
		way := make(chan late, 1<<16)
		var qs []time.Duration
		var target netip.AddrPort
		drops := 0
		go func() {
			free := time.Now()
			begin := free
			for {
				b := make([]byte, 2000)
				n, src, err := from.ReadFromUDPAddrPort(b)
				if err != nil {
					close(way)
					return
				}
				if !target.IsValid() {
					target = dst(src)
				}
				now := time.Now()
				if free.Before(now) {
					free = now
				}
				if int(free.Sub(now).Seconds()*float64(mbps)*1e6/8/1400) > limit {
					drops++
					continue
				}
				if d := free.Sub(now); now.Sub(begin) > 5*time.Second {
					qs = append(qs, d)
				}
				free = free.Add(time.Duration(float64(n+28) * 8 / float64(mbps) * 1e3))
				way <- late{b[:n], free.Add(time.Duration(ms) * time.Millisecond)}
			}
		}()
		go func() {
			for p := range way {
				if d := time.Until(p.at); d > 200*time.Microsecond {
					time.Sleep(d)
				}
				by.WriteToUDPAddrPort(p.b, target)
			}
		}()
		t.Cleanup(func() {
			slices.Sort(qs)
			if n := len(qs); n > 0 {
				fmt.Println("relay", name, "dropped", drops, "queue p50", qs[n/2], "p95", qs[n*95/100])
			}
		})
	}
	pipe("up", front, back, func(src netip.AddrPort) netip.AddrPort {
		client <- src
		return netip.AddrPortFrom(netlab.GatewayAddr4, 443)
	})
	pipe("down", back, front, func(netip.AddrPort) netip.AddrPort { return <-client })
	t.Cleanup(func() { front.Close(); back.Close() })
}
