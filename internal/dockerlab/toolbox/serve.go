package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
)

// serve says "ready" once all its sockets are there.
func serve(ctx context.Context, _ []string) error {
	web, err := net.Listen("tcp", ":80")
	if err != nil {
		return err
	}
	streams, err := net.Listen("tcp", ":7")
	if err != nil {
		return err
	}
	datagrams, err := net.ListenUDP("udp", &net.UDPAddr{Port: 7})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	context.AfterFunc(ctx, func() { web.Close(); streams.Close(); datagrams.Close() })
	var g errgroup.Group
	for _, f := range []func() error{
		func() error { return http.Serve(web, pages()) },
		func() error { return echoStreams(streams) },
		func() error { return echoDatagrams(datagrams) },
	} {
		g.Go(func() error {
			if err := f(); ctx.Err() == nil {
				return err
			}
			return nil
		})
	}
	return g.Wait()
}

func pages() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr) // a server's own, always well formed
		fmt.Fprintln(w, host)
	})
	mux.HandleFunc("GET /bytes/{n}", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
		if err != nil || n < 0 {
			http.Error(w, "bad number", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		_, _ = io.CopyN(w, zeros{}, n) // fails where the client went away
	})
	return mux
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func echoStreams(ln net.Listener) error {
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c) // fails where the client went away
		}()
	}
}

func echoDatagrams(pc *net.UDPConn) error {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := pc.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			time.Sleep(time.Millisecond) // an ICMP error about an answer
			continue
		}
		// A client that is gone by now is not this server's trouble.
		_, _ = pc.WriteToUDPAddrPort(buf[:n], from)
	}
}
