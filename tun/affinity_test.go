package tun

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A flow's packets come from one queue and stay in their order, in both
// directions, with several readers at work.
func TestFlowsKeepTheirQueue(t *testing.T) {
	const queues, udpFlows, tcpFlows, datagrams, window = 4, 32, 8, 400, 8
	type key struct {
		from int
		flow uint32
	}
	var mu sync.Mutex
	queueOf := map[key]int{}
	used := map[int]bool{}
	changes := 0
	cfg := Config{Queues: queues}
	p := newPair(t, [2]Config{cfg, cfg}, false, func(from, queue int, pkt packet.Packet, h packet.Header) {
		if h.Proto != packet.TCP && h.Proto != packet.UDP {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		k := key{from, packet.FlowHash(h, pkt.Data)}
		if was, ok := queueOf[k]; ok && was != queue {
			changes++
		}
		queueOf[k] = queue
		used[queue] = true
	})

	var wg sync.WaitGroup
	for i := range udpFlows {
		addr := []netip.Addr{pair4[1], pair6[1]}[i%2]
		server, err := p.ns[1].ListenPacket("udp", netip.AddrPortFrom(addr, 0).String())
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		client, err := p.ns[0].DialContext(deadline(t), "udp", server.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		wg.Go(func() { numberedEcho(t, server, datagrams) })
		wg.Go(func() { numberedSend(t, client, datagrams, window) })
	}
	for i := range tcpFlows {
		addr := []netip.Addr{pair4[1], pair6[1]}[i%2]
		wg.Go(func() { p.echo(t, addr, 4<<20, nil) })
	}
	wg.Wait()

	mu.Lock()
	defer mu.Unlock()
	if len(queueOf) < 2*(udpFlows+tcpFlows) || len(used) != queues {
		t.Errorf("%d flows on %d queues: the test is too small", len(queueOf), len(used))
	}
	if changes != 0 {
		t.Errorf("flows changed their queue %d times", changes)
	}
	for i, ns := range p.ns {
		for _, name := range []string{"TCPOFOQueue", "TCPSACKReorder", "TCPTSReorder"} {
			if n := counter(t, ns, "netstat", "TcpExt", name); n != 0 {
				t.Errorf("end %d: %s is %d", i, name, n)
			}
		}
	}
}

// numberedEcho sends datagrams back and fails for one that was overtaken.
func numberedEcho(t *testing.T, c net.PacketConn, n uint32) {
	buf := make([]byte, 2000)
	next := uint32(0)
	for next < n {
		if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Error(err)
		}
		k, from, err := c.ReadFrom(buf)
		if err != nil {
			t.Errorf("server, after datagram %d: %v", next, err)
			return
		}
		got := binary.BigEndian.Uint32(buf)
		if got < next {
			t.Errorf("datagram %d came after %d", got, next-1)
		}
		next = got + 1
		if _, err := c.WriteTo(buf[:k], from); err != nil {
			t.Errorf("server: %v", err)
			return
		}
	}
}

// numberedSend sends datagrams, some at a time, and expects them back in order.
func numberedSend(t *testing.T, c net.Conn, n, window uint32) {
	buf := make([]byte, 1000)
	sent, next := uint32(0), uint32(0)
	for next < n {
		for ; sent < n && sent < next+window; sent++ {
			binary.BigEndian.PutUint32(buf, sent)
			if _, err := c.Write(buf); err != nil {
				t.Errorf("client: %v", err)
				return
			}
		}
		if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Error(err)
		}
		if _, err := c.Read(buf); err != nil {
			t.Errorf("client, after datagram %d: %v", next, err)
			return
		}
		got := binary.BigEndian.Uint32(buf)
		if got < next {
			t.Errorf("datagram %d came back after %d", got, next-1)
		}
		next = got + 1
	}
}
