package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/quicvpn/quicvpn/internal/linksim"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// farPort is where a path to the gateway begins.
const farPort = 4443

// farRate is the rate of the path, in bits a second.
const farRate = 100e6

// A far is a gateway behind an emulated path, and a client.
type far struct {
	ctx     context.Context
	tb      netlab.TB
	top     *netlab.Topology
	program string
	token   string
	dir     string
}

// measureFar prints what one TCP connection of a program carries to a gateway that
// is far away: ended beside the program, and as packets. The path is emulated in
// real time, so that its delay is a millisecond more or less.
func measureFar(ctx context.Context, tb netlab.TB, program string, d time.Duration, quick bool) {
	f := &far{ctx: ctx, tb: tb, top: netlab.NewTopology(tb, netlab.LinkConfig{}), program: program, dir: tb.TempDir()}
	f.top.Internet.ServeIperf(ctx, iperfPort)
	f.token = filepath.Join(f.dir, "token")
	state := filepath.Join(f.dir, "gateway")
	out, err := f.top.Gateway.Command(ctx, program, "gateway", "init", "--state-dir", state,
		"--address", netip.AddrPortFrom(netlab.GatewayAddr4, farPort).String()).Output()
	check(tb, err)
	check(tb, os.WriteFile(f.token, out, 0o600))
	f.top.Gateway.Start(ctx, program, "gateway", "run", "--state-dir", state, "--listen", "127.0.0.1:443")

	fmt.Printf("| %.0f Mbit/s, ms one way | loss %% | TCP of the program | --tcp flow: Mbit/s | --tcp packet: Mbit/s | ratio |\n| --- | --- | --- | --- | --- | --- |\n", farRate/1e6)
	for _, delay := range []time.Duration{20 * time.Millisecond, 200 * time.Millisecond} {
		for _, loss := range []float64{0, 0.01} {
			for _, control := range []string{"cubic", "bbr"} {
				if quick && (delay < 100*time.Millisecond || loss == 0 || control != "cubic") {
					continue
				}
				flow, packets := f.run("flow", delay, loss, control, d), f.run("packet", delay, loss, control, d)
				fmt.Printf("| %d | %.0f | %s | %.1f | %.1f | %.1f |\n", delay.Milliseconds(), 100*loss, control, flow, packets, flow/packets)
			}
		}
	}
	fmt.Printf("\nOne connection that uploads for %v, its beginning included, one run each; the path is emulated in real time.\n", d)
}

// run returns what one connection carries, in Mbit/s.
func (f *far) run(mode string, delay time.Duration, loss float64, control string, d time.Duration) float64 {
	p := f.path(delay, loss)
	defer p.close()
	ctx, cancel := context.WithTimeout(f.ctx, d+time.Minute)
	defer cancel()
	sidecar := f.top.Client.Start(ctx, f.program, "sidecar", "--token-file", f.token, "--state-dir", filepath.Join(f.dir, "client"),
		"--tcp", mode, "--tcp-open", "strict")
	check(f.tb, sidecar.WaitLog(ctx, "msg=connected"))
	check(f.tb, f.top.Client.WaitRoute(ctx, netlab.ServerAddr4, "quicvpn0"))
	time.Sleep(2 * time.Second) // it finds out what the path carries
	r, err := f.top.Client.Iperf(ctx, netlab.Iperf{
		Server: netip.AddrPortFrom(netlab.ServerAddr4, iperfPort), Congestion: control, Duration: d,
	})
	check(f.tb, err)
	check(f.tb, sidecar.Stop(10*time.Second))
	check(f.tb, os.RemoveAll(filepath.Join(f.dir, "client", "paths.json"))) // each begins afresh
	return r.Bits / 1e6
}

// A path forwards the datagrams between clients and the gateway, with delay, loss
// and a rate.
type path struct {
	front       net.PacketConn
	there, back *linksim.Link
	running     sync.WaitGroup

	mu    sync.Mutex
	conns []interface{ Close() error }
}

func (f *far) path(delay time.Duration, loss float64) *path {
	rate := farRate / 8
	conf := linksim.Config{Rate: rate, Delay: delay, Queue: rate * 2 * delay.Seconds(), Loss: loss, Seed: 3}
	p := &path{there: linksim.New(conf)}
	conf.Loss, conf.Seed = 0, 4
	p.back = linksim.New(conf)
	var err error
	p.front, err = f.top.Gateway.ListenPacket("udp4", netip.AddrPortFrom(netlab.GatewayAddr4, farPort).String())
	check(f.tb, err)
	p.running.Go(func() {
		ends := make(map[string]*linksim.Conn) // by client
		b := make([]byte, 1<<16)
		for {
			n, from, err := p.front.ReadFrom(b)
			if err != nil {
				return
			}
			end := ends[from.String()]
			if end == nil {
				near, far := linksim.Connect(p.there, p.back, byte(len(ends)+1))
				to, err := f.top.Gateway.DialContext(f.ctx, "udp4", "127.0.0.1:443")
				check(f.tb, err)
				end = near
				ends[from.String()] = near
				p.mu.Lock()
				p.conns = append(p.conns, near, far, to)
				p.mu.Unlock()
				p.running.Go(func() { copyPackets(to.Write, read(far)) })
				p.running.Go(func() { copyPackets(func(b []byte) (int, error) { return far.WriteTo(b, nil) }, to.Read) })
				p.running.Go(func() { copyPackets(func(b []byte) (int, error) { return p.front.WriteTo(b, from) }, read(near)) })
			}
			end.WriteTo(b[:n], nil)
		}
	})
	return p
}

func read(c *linksim.Conn) func([]byte) (int, error) {
	return func(b []byte) (int, error) {
		n, _, err := c.ReadFrom(b)
		return n, err
	}
}

// copyPackets copies until one of both has been closed.
func copyPackets(write, read func([]byte) (int, error)) {
	b := make([]byte, 1<<16)
	for {
		n, err := read(b)
		if err == nil {
			_, err = write(b[:n])
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

func (p *path) close() {
	p.front.Close()
	p.mu.Lock()
	for _, c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.there.Close()
	p.back.Close()
	p.running.Wait()
}
