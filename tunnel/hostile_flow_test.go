package tunnel

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// ask sends a request and returns its stream with the answer's status.
func (h *hostile) ask(r *http.Request) (*http3.RequestStream, int) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), 5*time.Second)
	defer cancel()
	s, err := h.client.OpenRequestStream(ctx)
	if err != nil {
		h.t.Fatal(err)
	}
	if err := s.SendRequestHeader(r); err != nil {
		h.t.Fatal(err)
	}
	s.SetReadDeadline(time.Now().Add(5 * time.Second))
	response, err := s.ReadResponse()
	if err != nil {
		return s, 0
	}
	return s, response.StatusCode
}

func connectRequest(authority string) *http.Request {
	return &http.Request{Method: http.MethodConnect, Host: authority, URL: &url.URL{Host: authority}, Header: make(http.Header)}
}

func connectUDPRequest(path string) *http.Request {
	return &http.Request{Method: http.MethodConnect, Proto: protoConnectUDP, Host: serverName,
		URL: &url.URL{Scheme: "https", Host: serverName, Path: path}, Header: make(http.Header)}
}

// Without a session there are no flows, and few requests at all.
func TestHostileFlowsBeforeASession(t *testing.T) {
	dialed := make(chan string, 100)
	g := startGateway(t, ServerConfig{
		Authorize: func(ctx context.Context, _ Join) (Grant, error) { <-ctx.Done(); return Grant{}, ctx.Err() },
		DialTCP: func(_ context.Context, _ *Session, address string) (net.Conn, error) {
			dialed <- address
			return nil, io.EOF
		},
	})
	h := newHostile(t, g, &quic.Config{EnableDatagrams: true, InitialPacketSize: 1350})
	h.client = new(http3.Transport).NewRawClientConn(h.conn)
	go acceptUniStreams(h.conn, true, h.client.HandleUnidirectionalStream, func(*quic.ReceiveStream) {})
	<-h.client.ReceivedSettings()
	if _, status := h.ask(connectRequest("192.0.2.1:80")); status != http.StatusForbidden {
		t.Errorf("a flow is answered by %d", status)
	}
	// Requests for a session that hang: those beyond a few are turned down at once.
	refused := 0
	for range 2 * maxEarlyRequests {
		s, err := h.client.OpenRequestStream(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		r := connectUDPRequest(pathConnectIP)
		r.Proto = protoConnectIP
		if err := s.SendRequestHeader(r); err != nil {
			t.Fatal(err)
		}
		s.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		if _, err := s.ReadResponse(); err != nil && context.Cause(s.Context()) != nil {
			refused++
		}
	}
	if refused == 0 {
		t.Error("all of them are waited for")
	}
	select {
	case address := <-dialed:
		t.Errorf("it has dialled %s", address)
	default:
	}
}

// Requests that mean nothing are refused, and capsules that promise too much end
// their flow alone.
func TestHostileFlows(t *testing.T) {
	var drops packet.Drops
	g := startGateway(t, ServerConfig{
		Drops: &drops,
		DialTCP: func(context.Context, *Session, string) (net.Conn, error) {
			c, _ := net.Pipe()
			return c, nil
		},
		DialUDP: func(context.Context, *Session, string) (net.Conn, error) {
			c, other := net.Pipe()
			go io.Copy(io.Discard, other)
			return c, nil
		},
	})
	h := newHostile(t, g, &quic.Config{EnableDatagrams: true, InitialPacketSize: 1350})
	if r := h.join(); r.StatusCode != http.StatusOK {
		t.Fatal(r.Status)
	}
	receive(t, <-g.serve)
	for _, r := range []*http.Request{
		connectRequest("192.0.2.1"), connectRequest("192.0.2.1:0"), connectRequest(":80"), connectRequest("[::1:80"),
		connectUDPRequest(pathConnectUDP), connectUDPRequest(pathConnectUDP + "192.0.2.1/53"),
		connectUDPRequest(pathConnectUDP + "192.0.2.1/x/"), connectUDPRequest(pathConnectUDP + "a%2Fb/53/"),
	} {
		if _, status := h.ask(r); status != http.StatusBadRequest && status != 0 {
			t.Errorf("%s %s is answered by %d", r.Host, r.URL.Path, status)
		}
	}
	if _, status := h.ask(&http.Request{Method: http.MethodGet, Host: "a.test", URL: &url.URL{Scheme: "https", Host: "a.test", Path: "/"}}); status != http.StatusNotImplemented {
		t.Errorf("GET is answered by %d", status)
	}

	s, status := h.ask(connectUDPRequest(pathConnectUDP + "192.0.2.1/53/"))
	if status != http.StatusOK {
		t.Fatal(status)
	}
	capsule := quicvarint.Append(nil, uint64(capsuleDatagram))
	capsule = quicvarint.Append(capsule, 1<<40)
	if _, err := s.Write(append(capsule, 0)); err != nil {
		t.Fatal(err)
	}
	s.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.Copy(io.Discard, s); err != nil {
		if _, isTimeout := err.(net.Error); isTimeout {
			t.Errorf("a capsule of a terabyte is waited for: %v", err)
		}
	}
	// A datagram of no flow is dropped, and counted.
	if err := h.conn.SendDatagram(append(quicvarint.Append(nil, 4000), 0, 1, 2)); err != nil {
		t.Fatal(err)
	}
	// The session is none the worse.
	if _, status := h.ask(connectUDPRequest(pathConnectUDP + "192.0.2.1/53/")); status != http.StatusOK {
		t.Errorf("the next flow is answered by %d", status)
	}
	for deadline := time.Now().Add(patience); drops.Snapshot()[packet.DropNoSession.String()] != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("drops: %v", drops.Snapshot())
		}
	}
}
