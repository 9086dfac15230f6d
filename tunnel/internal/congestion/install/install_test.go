package install

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlog"
	"github.com/quic-go/quic-go/qlogwriter"
	"go.uber.org/goleak"

	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// ends are two transports on loopback.
type ends struct {
	dialer, acceptor *quic.Transport
	listener         *quic.Listener
	conf             *quic.Config
}

func newEnds(t *testing.T, tracer TracerFunc) *ends {
	t.Helper()
	e := &ends{conf: config.Clone()}
	e.conf.Tracer = Tracer(tracer)
	e.dialer = newTransport(t)
	e.acceptor = newTransport(t)
	var err error
	if e.listener, err = e.acceptor.Listen(testTLS(t), e.conf); err != nil {
		t.Fatal(err)
	}
	return e
}

func newTransport(t *testing.T) *quic.Transport {
	t.Helper()
	sock, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	tr := &quic.Transport{Conn: sock}
	t.Cleanup(func() { tr.Close(); sock.Close() })
	return tr
}

func (e *ends) connect(t *testing.T) (client, server *quic.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	client, err := e.dialer.Dial(ctx, e.acceptor.Conn.LocalAddr(), clientTLS, e.conf)
	if err != nil {
		t.Fatal(err)
	}
	if server, err = e.listener.Accept(ctx); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// transfer sends n bytes and waits until all arrived.
func transfer(t *testing.T, from, to *quic.Conn, n int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		s, err := from.OpenUniStreamSync(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := io.CopyN(s, zeros{}, n); err != nil {
			t.Error(err)
		}
		s.Close()
	})
	s, err := to.AcceptUniStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s.SetReadDeadline(time.Now().Add(20 * time.Second))
	if got, err := io.Copy(io.Discard, s); got != n || err != nil {
		t.Fatalf("%d of %d bytes arrived: %v", got, n, err)
	}
}

func install(t *testing.T, c *quic.Conn) *Handle {
	t.Helper()
	h, err := Install(c, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestBothEnds(t *testing.T) {
	e := newEnds(t, nil)
	client, server := e.connect(t)
	c, s := install(t, client), install(t, server)
	transfer(t, client, server, 4<<20)
	transfer(t, server, client, 4<<20)
	time.Sleep(publishEvery) // so that what comes next is published
	transfer(t, client, server, 1<<20)
	transfer(t, server, client, 1<<20)
	for name, h := range map[string]*Handle{"client": c, "server": s} {
		if h.Installed() != 1 || h.Err() != nil {
			t.Errorf("%s: installed %d times, %v", name, h.Installed(), h.Err())
		}
		if h.Delivered() < 4<<20 {
			t.Errorf("%s: %d bytes were delivered", name, h.Delivered())
		}
		n := h.Snapshot()
		if n == nil || n.MinRTT <= 0 || n.MinRTT > time.Second || n.Window <= 0 || n.Bandwidth <= 0 {
			t.Errorf("%s: snapshot %+v", name, n)
		}
	}
	if _, err := Install(client, Options{}); err == nil {
		t.Error("a second Install passed")
	}
}

type fixedRTT struct{ rttStats }

func (fixedRTT) PTO(bool) time.Duration { return 30 * time.Millisecond }

func TestMaxPTO(t *testing.T) {
	for maxPTO, want := range map[time.Duration]time.Duration{
		0:                      30 << 9 * time.Millisecond,
		250 * time.Millisecond: 240 * time.Millisecond,
		time.Millisecond:       60 * time.Millisecond,
	} {
		h, count := &Handle{}, uint32(0)
		a := &algorithm{c: congestion.New(congestion.Config{MaxDatagramSize: 1200}), news: &h.news, delivered: &h.delivered, maxPTO: maxPTO, ptoCount: &count, rtt: fixedRTT{}}
		for pn := range int64(10) {
			a.OnPacketSent(int64(time.Second), pn*1200, pn, 1200, true)
			if pn < 9 {
				count++ // as quic-go does when the timer fires
			}
		}
		if got := a.rtt.PTO(true) << count; got != want {
			t.Errorf("bound by %v: %v, want %v", maxPTO, got, want)
		}
	}
}

func TestAnotherTracer(t *testing.T) {
	e := newEnds(t, nil)
	e.conf.Tracer = nil
	client, server := e.connect(t)
	if _, err := Install(client, Options{}); !errors.Is(err, ErrUnsupported) {
		t.Errorf("Install says %v", err)
	}
	transfer(t, client, server, 1<<20)
}

// TestUnknownLayout keeps the stock control, and says why.
func TestUnknownLayout(t *testing.T) {
	e := newEnds(t, nil)
	client, server := e.connect(t)
	h := &Handle{}
	g := &target{conn: nil, handle: h} // not what it was tested with
	client.QlogTrace().(*trace).target.Store(g)
	transfer(t, client, server, 1<<20)
	if !errors.Is(h.Err(), ErrUnsupported) || h.Installed() != 0 {
		t.Errorf("installed %d times, %v", h.Installed(), h.Err())
	}
}

// events counts what a tracer beside ours gets.
type events struct{ sent, metrics, closed atomic.Int64 }

func (e *events) AddProducer() qlogwriter.Recorder { return e }
func (e *events) Close() error                     { e.closed.Add(1); return nil }
func (e *events) RecordEvent(ev qlogwriter.Event) {
	switch ev.(type) {
	case qlog.PacketSent:
		e.sent.Add(1)
	case qlog.MetricsUpdated:
		e.metrics.Add(1)
	}
}

func TestQlogStays(t *testing.T) {
	ev := &events{}
	e := newEnds(t, func(context.Context, bool, quic.ConnectionID) qlogwriter.Trace { return ev })
	client, server := e.connect(t)
	h := install(t, client)
	transfer(t, client, server, 1<<20)
	sent, metrics := ev.sent.Load(), ev.metrics.Load()
	transfer(t, client, server, 1<<20)
	if h.Installed() != 1 || ev.sent.Load() < sent+500 || ev.metrics.Load() < metrics+500 {
		t.Errorf("installed %d times; %d and %d packets, %d and %d metrics", h.Installed(), sent, ev.sent.Load(), metrics, ev.metrics.Load())
	}
	client.CloseWithError(0, "")
	server.CloseWithError(0, "")
	for deadline := time.Now().Add(30 * time.Second); ev.closed.Load() < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d recorders closed", ev.closed.Load())
		}
	}
}

// TestMigration switches the client to another socket while data flows both ways:
// both ends start afresh, and get a controller again.
func TestMigration(t *testing.T) {
	e := newEnds(t, nil)
	client, server := e.connect(t)
	c, s := install(t, client), install(t, server)
	transfer(t, client, server, 1<<20)
	transfer(t, server, client, 1<<20)

	path, err := client.AddPath(newTransport(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := path.Probe(ctx); err != nil {
		t.Fatal(err)
	}
	if err := path.Switch(); err != nil {
		t.Fatal(err)
	}
	for c.Installed() < 2 || s.Installed() < 2 {
		transfer(t, client, server, 1<<20)
		transfer(t, server, client, 1<<20)
		if ctx.Err() != nil {
			t.Fatalf("installed %d and %d times", c.Installed(), s.Installed())
		}
	}
	if c.Err() != nil || s.Err() != nil {
		t.Error(c.Err(), s.Err())
	}
	transfer(t, server, client, 4<<20)
}

func TestManyConnections(t *testing.T) {
	e := newEnds(t, nil)
	round := func(n int) {
		for range n {
			client, server := e.connect(t)
			c := install(t, client)
			install(t, server)
			transfer(t, client, server, 10<<10)
			if c.Installed() != 1 {
				t.Fatalf("installed %d times", c.Installed())
			}
			client.CloseWithError(0, "")
			<-client.Context().Done()
			<-server.Context().Done()
		}
	}
	round(50)
	before := goleak.IgnoreCurrent()
	heap := liveHeap()
	round(1000)
	goleak.VerifyNone(t, before)
	if grown := liveHeap() - heap; grown > 16<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
}

func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
