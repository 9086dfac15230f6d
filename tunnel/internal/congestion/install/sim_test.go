package install

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/quicvpn/quicvpn/internal/linksim"
	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// control says which congestion control a flow has.
type control int

const (
	model control = iota // a Controller
	stock                // quic-go's NewReno
	cubic                // CUBIC (RFC 9438), of the tests
)

// A scenario is a bottleneck and the flows through it.
type scenario struct {
	forward  linksim.Config
	back     linksim.Config // only its Clump and Jitter are used
	flows    []flow
	duration time.Duration
	seed     uint64
	change   map[time.Duration]float64 // the rate from then on, in bytes a second
	trace    func(at time.Duration, flows []*result)
}

type flow struct {
	control   control
	start     time.Duration
	saved     congestion.Path
	datagrams bool // instead of a stream
	ping      bool // an echo every 100 ms, once the connection is loaded
}

// A result is what became of a flow.
type result struct {
	connected atomic.Bool
	received  atomic.Int64

	share   float64 // of the link, from its start to the end
	late    float64 // likewise, in the last third of the run
	err     error   // that ended the connection
	handle  *Handle
	lost    uint64 // packets
	sent    uint64
	pings   []time.Duration
	dropped int64           // packets by the queue, all flows
	startup int64           // likewise, in the first three seconds
	queue   []time.Duration // queueing delays every 10 ms
}

func (r *result) p95() time.Duration {
	q := slices.Sorted(slices.Values(r.queue))
	return q[len(q)*95/100]
}

// simulate runs s in virtual time.
func simulate(t *testing.T, s scenario) (results []*result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		results = s.run(t)
	})
	return results
}

func (s scenario) run(t *testing.T) []*result {
	s.forward.Seed = s.seed
	there := linksim.New(s.forward)
	back := linksim.New(linksim.Config{Rate: s.forward.Rate, Delay: s.forward.Delay, Queue: 1 << 30, Clump: s.back.Clump, Jitter: s.back.Jitter, Seed: s.seed + 1})
	defer there.Close()
	defer back.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var results []*result
	for i, f := range s.flows {
		r := &result{}
		results = append(results, r)
		running.Go(func() { s.flow(ctx, t, f, uint64(i), r, there, back) })
	}
	for i, f := range s.flows {
		for f.start == 0 && !results[i].connected.Load() {
			time.Sleep(time.Millisecond)
		}
	}
	s.watch(results, there)
	cancel()
	running.Wait()
	return results
}

// watch lets time pass and fills in the results.
func (s scenario) watch(results []*result, there *linksim.Link) {
	begin := time.Now()
	marks := make([]int64, len(results))
	var queue []time.Duration
	var startup int64
	for time.Since(begin) < s.duration {
		time.Sleep(10 * time.Millisecond)
		at := time.Since(begin)
		queue = append(queue, there.Wait())
		if rate, ok := s.change[at]; ok {
			there.SetRate(rate)
		}
		if at <= s.duration*2/3 {
			for i, r := range results {
				marks[i] = r.received.Load()
			}
		}
		if at <= 3*time.Second {
			_, startup = there.Packets()
		}
		if s.trace != nil {
			s.trace(at, results)
		}
	}
	_, dropped := there.Packets()
	for i, r := range results {
		time := s.duration - s.flows[i].start
		r.share = float64(r.received.Load()) / (s.forward.Rate * time.Seconds())
		r.late = float64(r.received.Load()-marks[i]) / (s.forward.Rate * s.duration.Seconds() / 3)
		r.queue, r.dropped, r.startup = queue, dropped, startup
	}
}

var config = &quic.Config{
	InitialStreamReceiveWindow: 256 << 20, MaxStreamReceiveWindow: 256 << 20,
	InitialConnectionReceiveWindow: 256 << 20, MaxConnectionReceiveWindow: 256 << 20,
	InitialPacketSize:       1280, // with any other size quic-go's own pacer spins
	DisablePathMTUDiscovery: true, MaxIdleTimeout: time.Minute,
}

// flow sends over a connection of its own until ctx is done.
func (s scenario) flow(ctx context.Context, t *testing.T, f flow, n uint64, r *result, there, back *linksim.Link) {
	client, server := linksim.Connect(there, back, byte(n))
	defer client.Close()
	defer server.Close()
	dialer := &quic.Transport{Conn: client}
	defer dialer.Close()
	acceptor := &quic.Transport{Conn: server}
	defer acceptor.Close()
	conf := config.Clone()
	conf.Tracer = Tracer(nil)
	conf.EnableDatagrams = f.datagrams
	listener, err := acceptor.Listen(testTLS(t), conf)
	if err != nil {
		t.Error(err)
		return
	}
	time.Sleep(f.start)
	dialed := time.Now()
	conn, err := dialer.Dial(ctx, server.LocalAddr(), clientTLS, conf)
	if err != nil {
		t.Error(err)
		return
	}
	rtt := time.Since(dialed)
	accepted, err := listener.Accept(ctx)
	if err != nil {
		t.Error(err)
		return
	}
	switch f.control {
	case model:
		if r.handle, err = Install(conn, Options{Seed: s.seed + n, RTT: rtt, Saved: f.saved}); err != nil {
			t.Error(err)
			return
		}
	case cubic:
		installCubic(conn)
	}
	if f.control != stock { // whose pacer would hold up the receiver's window updates
		if _, err := Install(accepted, Options{}); err != nil {
			t.Error(err)
			return
		}
	}
	r.connected.Store(true)
	var beside sync.WaitGroup
	switch {
	case f.ping && f.datagrams:
		beside.Go(func() { time.Sleep(time.Second); r.pings = pingDatagrams(ctx, conn) })
	case f.ping:
		beside.Go(func() { echo(ctx, accepted) })
		beside.Go(func() { time.Sleep(time.Second); r.pings = ping(ctx, t, conn) })
	}
	if f.datagrams {
		beside.Go(func() { receiveDatagrams(ctx, accepted, &r.received) })
		sendDatagrams(ctx, t, conn)
	} else {
		beside.Go(func() {
			if stream, err := accepted.AcceptUniStream(ctx); err == nil {
				io.Copy(counter{&r.received}, stream)
			}
		})
		stream, err := conn.OpenUniStream()
		if err != nil {
			t.Error(err)
			return
		}
		stop := context.AfterFunc(ctx, func() { stream.CancelWrite(0) })
		defer stop()
		if _, err := io.Copy(stream, zeros{}); ctx.Err() == nil {
			r.err = err
		}
	}
	stats := conn.ConnectionStats()
	r.lost, r.sent = stats.PacketsLost, stats.PacketsSent
	conn.CloseWithError(0, "")
	accepted.CloseWithError(0, "")
	beside.Wait()
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

type counter struct{ n *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return len(b), nil
}

var clientTLS = &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"test"}}

var serverTLS = sync.OnceValues(func() (*tls.Config, error) {
	public, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)}
	cert, err := x509.CreateCertificate(nil, template, template, public, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}, NextProtos: []string{"test"}}, nil
})

func testTLS(t *testing.T) *tls.Config {
	t.Helper()
	c, err := serverTLS()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// path returns a link of mbps and one-way milliseconds with a queue of a share of
// the bandwidth-delay product.
func path(mbps, ms, queue, loss float64) linksim.Config {
	rate := mbps * 1e6 / 8
	delay := time.Duration(ms * 1e6)
	return linksim.Config{Rate: rate, Delay: delay, Loss: loss, Queue: max(queue*rate*2*delay.Seconds(), 16*1500)}
}

func (r *result) String() string {
	return fmt.Sprintf("%.1f%% late %.1f%% lost %d/%d queue p95 %v dropped %d, start-up %d", 100*r.share, 100*r.late, r.lost, r.sent, r.p95().Round(time.Millisecond), r.dropped, r.startup)
}
