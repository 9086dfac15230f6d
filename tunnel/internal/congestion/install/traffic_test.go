package install

import (
	"context"
	"encoding/binary"
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

// pingSize is that of a datagram that comes back.
const pingSize = 8

// receiveDatagrams counts what comes, and sends pings back.
func receiveDatagrams(ctx context.Context, conn *quic.Conn, received *atomic.Int64) {
	for {
		b, err := conn.ReceiveDatagram(ctx)
		if err != nil {
			return
		}
		received.Add(int64(len(b)))
		if len(b) == pingSize && conn.SendDatagram(b) != nil {
			return
		}
	}
}

// pingDatagrams measures round trips of datagrams, which wait where the others do,
// until ctx is done. One that is lost is given up after a while, and not counted.
func pingDatagrams(ctx context.Context, conn *quic.Conn) (rtts []time.Duration) {
	for n := uint64(1); ; n++ {
		sent := time.Now()
		if conn.SendDatagram(binary.BigEndian.AppendUint64(nil, n)) != nil {
			return rtts
		}
		lost, cancel := context.WithTimeout(ctx, 3*time.Second)
		for {
			b, err := conn.ReceiveDatagram(lost)
			if err != nil {
				break
			}
			if binary.BigEndian.Uint64(b) == n {
				rtts = append(rtts, time.Since(sent))
				break
			}
		}
		cancel()
		if ctx.Err() != nil {
			return rtts
		}
		time.Sleep(100 * time.Millisecond)
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
	for b := make([]byte, pingSize); ; time.Sleep(100 * time.Millisecond) {
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
