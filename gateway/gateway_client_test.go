package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A clientConfig is what a clientChild dials with.
type clientConfig struct {
	Gateway netip.AddrPort
	Token   string
	Seed    byte // of its key
	// Block and Announce are those of the dialer.
	Block    bool
	Announce []netip.Prefix
}

// A greeting is a clientChild's first line.
type greeting struct {
	Grant   tunnel.Grant
	Refused *tunnel.RefusedError
}

// clientChild is a process that carries packets between its standard input and
// output and a session: frames of a 16-bit length and a packet. A frame "leave"
// leaves. How that went, what the peers are now, and at last how the session
// ended, are frames of its own.
func clientChild(args string) error {
	var c clientConfig
	if err := json.Unmarshal([]byte(args), &c); err != nil {
		return err
	}
	tok, err := token.Parse(c.Token)
	if err != nil {
		return err
	}
	d := &tunnel.Dialer{Key: ed25519.NewKeyFromSeed(bytes.Repeat([]byte{c.Seed}, ed25519.SeedSize)),
		Pin: tok.Pin, Secret: tok.SecretText(), Queues: 2, Block: c.Block, Announce: c.Announce}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var hello greeting
	s, err := d.Dial(ctx, c.Gateway)
	if refused, ok := err.(*tunnel.RefusedError); ok {
		hello.Refused = refused
	} else if err != nil {
		return err
	} else {
		hello.Grant = s.Grant()
	}
	if err := json.NewEncoder(os.Stdout).Encode(hello); err != nil || s == nil {
		return err
	}
	sink := &frameSink{w: os.Stdout}
	go func() {
		for {
			select {
			case <-s.PeersChanged():
				sink.write(fmt.Appendf(nil, "peers: %v", s.Peers()))
			case <-s.Context().Done():
				return
			}
		}
	}()
	go func() {
		for {
			b, err := readFrame(os.Stdin)
			if err != nil {
				s.Close("the test is over")
				return
			}
			if string(b) == "leave" {
				sink.write(fmt.Appendf(nil, "left: %v", s.Leave(context.Background())))
				continue
			}
			s.Send(0, []packet.Packet{{Data: b}}, nil)
		}
	}()
	return sink.write(fmt.Appendf(nil, "ended: %v", s.Receive(sink)))
}

type frameSink struct {
	mu sync.Mutex
	w  io.Writer
}

func (s *frameSink) WritePackets(_ int, pkts []packet.Packet) {
	for _, p := range pkts {
		if h, err := packet.Parse(p.Data); err == nil {
			p.CompleteChecksum(h)
		}
		if err := s.write(p.Data); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

func (s *frameSink) write(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.w.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	return err
}

func readFrame(r io.Reader) ([]byte, error) {
	var n [2]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(n[:]))
	_, err := io.ReadFull(r, b)
	return b, err
}

// A testClient is a clientChild seen from the test.
type testClient struct {
	greeting
	t  *testing.T
	in io.WriteCloser
	wg sync.WaitGroup

	mu  sync.Mutex
	got [][]byte
	end string
	// peers is what was last told of them, and left how a leave went.
	peers, left string
}

// join starts a client in a namespace and waits for the gateway's answer.
func newTestClient(t *testing.T, ns *netlab.NS, cfg clientConfig) *testClient {
	t.Helper()
	args, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := ns.Command(t.Context(), self)
	cmd.Env = append(os.Environ(), childEnv+"=client "+string(args))
	out, write := io.Pipe()
	cmd.Stdout = write
	c := &testClient{t: t}
	if c.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		<-cmd.Done()
		write.Close()
	}()
	r := bufio.NewReader(out)
	line, err := r.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &c.greeting)
	}
	if err != nil {
		t.Fatalf("a client says %q: %v", line, err)
	}
	c.wg.Go(func() {
		for {
			b, err := readFrame(r)
			if err != nil {
				return
			}
			c.mu.Lock()
			kind, rest, _ := strings.Cut(string(b), ": ")
			switch kind {
			case "ended":
				c.end = rest
			case "peers":
				c.peers = rest
			case "left":
				c.left = rest
			default:
				c.got = append(c.got, b)
			}
			c.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		c.in.Close()
		c.wg.Wait()
	})
	return c
}

func (c *testClient) send(b []byte) {
	c.t.Helper()
	if err := (&frameSink{w: c.in}).write(b); err != nil {
		c.t.Fatal(err)
	}
}

// wait waits for a packet that ends with a text.
func (c *testClient) wait(text string) (h packet.Header, b []byte) {
	c.t.Helper()
	within(c.t, patience, "packet "+text, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, b = range c.got {
			if bytes.HasSuffix(b, []byte(text)) {
				return true
			}
		}
		return false
	})
	h, err := packet.Parse(b)
	if err != nil {
		c.t.Fatal(err)
	}
	return h, b
}

// ended waits for the session's end and returns its reason.
func (c *testClient) ended(limit time.Duration) string {
	c.t.Helper()
	return c.waitText(limit, "the end of a session", &c.end, func(end string) bool { return end != "" })
}

// waitPeers waits until the client has been told of these peers.
func (c *testClient) waitPeers(peers ...string) {
	c.t.Helper()
	want := fmt.Sprint(peers)
	c.waitText(patience, "to hear of the peers "+want, &c.peers, func(now string) bool { return now == want })
}

// leave leaves and returns what came of it.
func (c *testClient) leave() string {
	c.t.Helper()
	c.send([]byte("leave"))
	return c.waitText(patience, "leaving", &c.left, func(left string) bool { return left != "" })
}

func (c *testClient) waitText(limit time.Duration, what string, text *string, ok func(string) bool) (now string) {
	c.t.Helper()
	within(c.t, limit, what, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		now = *text
		return ok(now)
	})
	return now
}
