package tunnel

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A hostile is a client of its own making.
type hostile struct {
	t       *testing.T
	conn    *quic.Conn
	client  *http3.RawClientConn
	request *http3.RequestStream
}

func newHostile(t *testing.T, g *testGateway, conf *quic.Config) *hostile {
	t.Helper()
	d := g.dialer(t)
	tlsConf, err := clientTLS(d.Key, d.Pin, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	conn, err := quic.DialAddr(ctx, g.Addr().String(), tlsConf, conf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.CloseWithError(0, "") })
	return &hostile{t: t, conn: conn}
}

// join asks for a tunnel as it should be and returns the answer.
func (h *hostile) join() *http.Response {
	h.t.Helper()
	transport := &http3.Transport{AdditionalSettings: map[uint64]uint64{settingOwn: settingOwnVersion}}
	client := transport.NewRawClientConn(h.conn)
	h.client = client
	go acceptUniStreams(h.conn, true, client.HandleUnidirectionalStream, func(*quic.ReceiveStream) {})
	select {
	case <-client.ReceivedSettings():
	case <-time.After(patience):
		h.t.Fatal("no settings")
	}
	var err error
	if h.request, err = client.OpenRequestStream(h.t.Context()); err != nil {
		h.t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(h.t.Context(), http.MethodConnect, "https://"+serverName+pathConnectIP, nil)
	if err != nil {
		h.t.Fatal(err)
	}
	r.Proto = protoConnectIP
	if err := h.request.SendRequestHeader(r); err != nil {
		h.t.Fatal(err)
	}
	response, err := h.request.ReadResponse()
	if err != nil {
		h.t.Fatal(err)
	}
	return response
}

// open starts a super-packet stream and writes b to it.
func (h *hostile) open(request uint64, queue uint64, b []byte) error {
	s, err := h.conn.OpenUniStream()
	if err != nil {
		return err
	}
	head := quicvarint.Append(nil, streamTypeSuper)
	head = quicvarint.Append(head, request)
	head = quicvarint.Append(head, queue)
	_, err = s.Write(append(head, b...))
	return err
}

// What breaks the protocol ends the session, and its owner learns why.
func TestHostileStreams(t *testing.T) {
	for name, test := range map[string]struct {
		request, queue uint64 // the request's is added
		want           string
	}{
		"of no request": {7, 0, "belongs to request 7"},
		"of no queue":   {0, maxStreams, "queue number 16"},
	} {
		t.Run(name, func(t *testing.T) {
			g := startGateway(t, ServerConfig{})
			h := newHostile(t, g, quicConfig(minPacketSize))
			h.join()
			server := <-g.serve
			ended := make(chan error, 1)
			go func() { ended <- server.Receive(newCollector()) }()
			if err := h.open(uint64(h.request.StreamID()/4)+test.request, test.queue, nil); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-ended:
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("Receive = %v, want %q", err, test.want)
				}
			case <-time.After(patience):
				t.Fatal("the session goes on")
			}
		})
	}
}

// Frames that are never finished hold buffers: of a bounded number of streams.
func TestHostileStreamsAreFew(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	h := newHostile(t, g, quicConfig(minPacketSize))
	h.join()
	receive(t, <-g.serve)
	var opened int
	var err error
	for ; opened < 3+maxStreams; opened++ { // HTTP/3 has three, of which we use one
		if err = h.open(uint64(h.request.StreamID()/4), 0, []byte{0xff}); err != nil {
			break
		}
	}
	if _, ok := errors.AsType[*quic.StreamLimitReachedError](err); !ok {
		t.Errorf("opened %d streams, then %v", opened, err)
	}
}

// Who has no session is not listened to, and cannot stay in any number.
func TestStrangers(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	h := newHostile(t, g, quicConfig(minPacketSize))
	s, err := h.conn.OpenUniStream()
	if err != nil {
		t.Fatal(err)
	}
	b := bytes.Repeat([]byte{0xff}, 4<<20)
	s.SetWriteDeadline(time.Now().Add(5 * time.Second))
	if _, err := s.Write(append(quicvarint.Append(nil, streamTypeSuper), b...)); err == nil {
		t.Error("4 MB were taken before a join")
	} else if _, ok := errors.AsType[*quic.StreamError](err); !ok {
		t.Errorf("Write = %v, want that the gateway refuses the stream", err)
	}

	var list strangers
	oldest := newHostile(t, g, quicConfig(minPacketSize)).conn
	leave := list.add(oldest)
	defer leave()
	for range maxStrangers {
		defer list.add(h.conn)()
	}
	select {
	case <-oldest.Context().Done():
	case <-time.After(patience):
		t.Errorf("the oldest of %d connections without a session stays", maxStrangers+1)
	}
	if n := list.conns.Len(); n != maxStrangers {
		t.Errorf("%d strangers, want %d", n, maxStrangers)
	}
}

func TestNoDatagrams(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	conf := quicConfig(minPacketSize)
	conf.EnableDatagrams = false
	if r := newHostile(t, g, conf).join(); r.StatusCode != http.StatusBadRequest || r.Header.Get(headerError) != "no-datagrams" {
		t.Errorf("answer %v, %v", r.Status, r.Header)
	}

	// The other way round: a gateway that takes none.
	cert, err := newCertificate(g.key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	tlsConf := http3.ConfigureTLSConfig(serverTLS(g.key, time.Now))
	server := http3.Server{TLSConfig: tlsConf}
	var wg sync.WaitGroup
	wg.Go(func() { server.Serve(udp) })
	defer wg.Wait()
	defer udp.Close()
	defer server.Close()
	d := g.dialer(t)
	d.Pin = certFingerprint(cert.Leaf)
	if _, err := d.Dial(t.Context(), addrPort(udp.LocalAddr())); err == nil || !strings.Contains(err.Error(), "no QUIC datagrams") {
		t.Errorf("Dial = %v", err)
	}
}

// Each list of addresses replaces the last, so that they cannot pile up.
func TestGrantDoesNotGrow(t *testing.T) {
	var b bytes.Buffer
	last := netip.MustParsePrefix("10.9.9.9/32")
	for _, p := range []netip.Prefix{netip.MustParsePrefix("10.9.9.8/32"), last} {
		if err := writeCapsule(&b, addressAssign{{Prefix: p}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeCapsule(&b, routeAdvertisement{}); err != nil {
		t.Fatal(err)
	}
	var g Grant
	if err := readGrant(&b, &g); err != nil || len(g.Addresses) != 1 || g.Addresses[0] != last.Addr() {
		t.Errorf("addresses %v, %v; want the last alone", g.Addresses, err)
	}
}

// A report of a path that QUIC cannot live on is not true (RFC 9000, section
// 14.2.1); one of a smaller path ends the session for a better one.
func TestReportsOfThePath(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	s := dial(t, g.dialer(t), g.Addr())
	ended := make(chan error, 1)
	go func() { ended <- s.Receive(newCollector()) }()
	for _, mtu := range []int{0, 68, minPacketSize + 27, 1500} {
		s.onTooBig(mtu)
	}
	server := <-g.serve
	atServer := receive(t, server)
	s.Send(0, []packet.Packet{{Data: udpPacket(client4, far4, 100)}}, nil)
	atServer.wait(t, 1)
	s.onTooBig(1300)
	if err := <-ended; !errors.Is(err, errPathShrank) {
		t.Errorf("Receive = %v, want %v", err, errPathShrank)
	}
}
