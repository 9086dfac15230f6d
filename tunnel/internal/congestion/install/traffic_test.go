package install

import (
	"context"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
)

// datagramSize fits a packet of config's size.
const datagramSize = 1235

// sendDatagrams offers as much as the connection takes, until ctx is done.
func sendDatagrams(ctx context.Context, t *testing.T, conn *quic.Conn) {
	stop := context.AfterFunc(ctx, func() { conn.CloseWithError(0, "") })
	defer stop()
	for b := make([]byte, datagramSize); ; {
		if err := conn.SendDatagram(b); err != nil {
			if ctx.Err() == nil {
				t.Errorf("send a datagram: %v", err)
			}
			return
		}
	}
}

func receiveDatagrams(ctx context.Context, conn *quic.Conn, received *atomic.Int64) {
	for {
		b, err := conn.ReceiveDatagram(ctx)
		if err != nil {
			return
		}
		received.Add(int64(len(b)))
	}
}

// ping measures round trips on a stream of its own until ctx is done.
func ping(ctx context.Context, t *testing.T, conn *quic.Conn) (rtts []time.Duration) {
	stream, err := conn.OpenStream()
	if err != nil {
		t.Errorf("open a stream for pings: %v", err)
		return nil
	}
	stop := context.AfterFunc(ctx, func() { stream.CancelRead(0); stream.CancelWrite(0) })
	defer stop()
	for b := make([]byte, 8); ; time.Sleep(100 * time.Millisecond) {
		sent := time.Now()
		if _, err := stream.Write(b); err != nil {
			return rtts
		}
		if _, err := io.ReadFull(stream, b); err != nil {
			return rtts
		}
		rtts = append(rtts, time.Since(sent))
	}
}

func echo(ctx context.Context, conn *quic.Conn) {
	stream, err := conn.AcceptStream(ctx)
	if err != nil {
		return
	}
	stop := context.AfterFunc(ctx, func() { stream.CancelRead(0); stream.CancelWrite(0) })
	defer stop()
	io.Copy(stream, stream)
}
