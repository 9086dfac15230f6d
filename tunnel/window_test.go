package tunnel

import (
	"context"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// settles waits until a budget has so much in use.
func (b *windowBudget) settles(t *testing.T, want int64) {
	t.Helper()
	for deadline := time.Now().Add(patience); b.used.Load() != want; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are in use, want %d", b.used.Load(), want)
		}
	}
}

func TestWindowBudget(t *testing.T) {
	b := windowBudget{limit: 1000}
	ctx, cancel := context.WithCancel(t.Context())
	grab := func(n int64) bool {
		ok := b.take(n, b.limit)
		if ok {
			b.giveBack(ctx, n)
		}
		return ok
	}
	for _, step := range []struct {
		n    int64
		want bool
	}{
		{251, false}, {250, true}, {188, false}, {187, true}, {140, true}, {106, false}, {105, true},
	} {
		if got := grab(step.n); got != step.want {
			t.Errorf("%d bytes with %d in use: %t", step.n, b.used.Load(), got)
		}
	}
	for n := int64(0); n < 10000; n++ {
		grab(n % 64)
	}
	if used := b.used.Load(); used > b.limit {
		t.Errorf("%d bytes in use of %d", used, b.limit)
	}
	cancel()
	b.settles(t, 0)
}

// Whoever opens a connection gets wide windows only while there is plenty.
func TestFirstWindows(t *testing.T) {
	const more = wideConnectionWindow - smallConnectionWindow
	b := windowBudget{limit: 2 * 5 * more}
	ctx, cancel := context.WithCancel(t.Context())
	wide := 0
	for range 100 {
		conf := quicConfig(minPacketSize)
		b.admit(conf, Path{})
		switch conf.InitialConnectionReceiveWindow {
		case wideConnectionWindow:
			wide++
			if tr := conf.Tracer(ctx, false, quic.ConnectionID{}); tr != nil {
				t.Errorf("a trace for nobody: %v", tr)
			}
		case smallConnectionWindow:
		default:
			t.Fatalf("a window of %d bytes", conf.InitialConnectionReceiveWindow)
		}
	}
	if wide != 2 || b.used.Load() != 2*more {
		t.Errorf("%d of 100 are wide, %d bytes in use", wide, b.used.Load())
	}
	cancel()
	b.settles(t, 0)
}

// A connection that had its windows grow gives all back when it ends.
func TestWindowsAreGivenBack(t *testing.T) {
	windows.settles(t, 0) // earlier tests' connections have ended
	g := startGateway(t, ServerConfig{})
	client := dial(t, g.dialer(t), g.Addr())
	server := <-g.serve
	if used := windows.used.Load(); used != wideConnectionWindow-smallConnectionWindow {
		t.Errorf("a connection takes %d bytes", used)
	}
	atServer := receive(t, server)
	if !windows.allow(server.conn, 1<<20) || windows.used.Load() < 1<<20 {
		t.Errorf("no growth with %d bytes in use", windows.used.Load())
	}
	client.Send(0, []packet.Packet{{Data: tcpPacket(client4, far4, 1, 1000)}}, nil)
	atServer.wait(t, 1)
	client.Close("")
	windows.settles(t, 0)
}
