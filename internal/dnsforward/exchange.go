package dnsforward

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

// past is a deadline that ends what waits.
var past = time.Unix(1, 0)

// askOne asks one name server, by a socket that is of this query alone: a port
// and an ID of its own are what somebody who forges answers has to guess (RFC
// 5452, section 4).
func (f *Forwarder) askOne(ctx context.Context, network string, server netip.AddrPort, query []byte, q question) ([]byte, error) {
	conn, err := f.cfg.Dial(ctx, network, server.String())
	if err != nil {
		return nil, fmt.Errorf("ask name server: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(past) })()
	ours := bytes.Clone(query)
	rand.Read(ours[:2])
	answer, err := exchange(conn, network, ours, q)
	if err != nil {
		return nil, fmt.Errorf("ask name server %s: %w", server, err)
	}
	copy(answer, query[:2])
	return answer, nil
}

func exchange(conn net.Conn, network string, query []byte, q question) ([]byte, error) {
	if network == "tcp" {
		if err := writeMessage(conn, query); err != nil {
			return nil, err
		}
		answer, err := readMessage(conn)
		if err == nil && !isAnswer(answer, query, q) {
			err = errors.New("its answer is to another question")
		}
		return answer, err
	}
	if _, err := conn.Write(query); err != nil {
		return nil, err
	}
	buf := datagrams.Get().(*[maxDatagram]byte)
	defer datagrams.Put(buf)
	for {
		n, err := conn.Read(buf[:])
		if err != nil {
			return nil, err
		}
		// What is something else may be forged: the true answer may still come.
		if isAnswer(buf[:n], query, q) {
			return bytes.Clone(buf[:n]), nil
		}
	}
}

// maxDatagram is more than is passed on of an answer. The end of a longer one is
// lost, which does not matter.
const maxDatagram = 4096

var datagrams = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// Messages on a stream have their length before them (RFC 1035, section 4.2.2).

func readMessage(r io.Reader) ([]byte, error) {
	var n [2]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(n[:]))
	_, err := io.ReadFull(r, b)
	return b, err
}

// writeMessage writes length and message at once: some that read them expect
// them in one piece.
func writeMessage(w io.Writer, b []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(b)), uint16(len(b))), b...))
	return err
}

// idle is how long a stream may take to bring a query, or to take its answer
// (RFC 7766, section 6.2.3).
const idle = 10 * time.Second

// ServeStream answers the queries of a client's TCP connection, one after the
// other, until the client closes it, is idle, sends what is no query, or ctx
// ends. It leaves the connection open.
func (f *Forwarder) ServeStream(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(past) })()
	for {
		conn.SetDeadline(time.Now().Add(idle))
		if ctx.Err() != nil {
			return
		}
		query, err := readMessage(conn)
		if err != nil {
			return
		}
		answer := f.Exchange(ctx, "tcp", query)
		conn.SetDeadline(time.Now().Add(idle))
		if answer == nil || ctx.Err() != nil || writeMessage(conn, answer) != nil {
			return
		}
	}
}
