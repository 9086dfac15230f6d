package tunnel

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/yosida95/uritemplate/v3"
)

// All three capsules go to and come from connect-ip-go, which has code of its own
// for them.
func TestCapsuleInterop(t *testing.T) {
	noLeaks(t)
	serverTLS, clientTLS := socketTLS(t)
	serverTLS.NextProtos, clientTLS.NextProtos = []string{http3.NextProtoH3}, []string{http3.NextProtoH3}
	streams := make(chan *http3.Stream, 1)
	release := make(chan struct{})
	server := &http3.Server{EnableDatagrams: true, TLSConfig: serverTLS, Logger: slog.New(slog.DiscardHandler),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(http3.CapsuleProtocolHeader, "?1")
			w.WriteHeader(http.StatusOK)
			stream, err := w.(http3.HTTPStreamer).HTTPStream()
			if err != nil {
				t.Errorf("take over the stream: %v", err)
				return
			}
			streams <- stream
			<-release
		})}
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(pc) }()
	defer func() { server.Close(); pc.Close(); <-served }()
	defer close(release)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	qc, err := quic.DialAddr(ctx, pc.LocalAddr().String(), clientTLS, &quic.Config{EnableDatagrams: true})
	if err != nil {
		t.Fatal(err)
	}
	defer qc.CloseWithError(0, "")
	peer, err := new(connectip.Transport).NewClientConn(qc)
	if err != nil {
		t.Fatal(err)
	}
	request, err := connectip.NewRequest(ctx, uritemplate.MustNew("https://socket.test/ip"))
	if err != nil {
		t.Fatal(err)
	}
	theirs, _, err := peer.Dial(request)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	ours := <-streams
	parser := http3.NewCapsuleParser(ours)
	read := func(want capsule) {
		t.Helper()
		got, err := readCapsule(parser)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got, compareNetip); d != "" {
			t.Error(d)
		}
	}
	write := func(c capsule) {
		t.Helper()
		if err := writeCapsule(ours, c); err != nil {
			t.Fatal(err)
		}
	}

	// They ask, we answer.
	wanted := parsePrefixes([]string{"0.0.0.0/32", "2001:db8::/64"})
	ids, err := theirs.RequestAddresses(wanted)
	if err != nil {
		t.Fatal(err)
	}
	id4, id6 := uint64(ids[0]), uint64(ids[1])
	read(addressRequest{{id4, wanted[0]}, {id6, wanted[1]}})
	write(addressAssign{address(id4, "10.88.0.7/32"), address(id6, "::/128"), address(0, "fd00::/56")})
	assigned, err := theirs.ReceiveAddressAssignment(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]connectip.AssignedAddress{
		{RequestID: ids[0], IPPrefix: netip.MustParsePrefix("10.88.0.7/32")},
		{RequestID: ids[1], IPPrefix: netip.MustParsePrefix("::/128")},
		{IPPrefix: netip.MustParsePrefix("fd00::/56")},
	}, assigned, compareNetip); d != "" {
		t.Error(d)
	}
	if !assigned[1].Rejected() {
		t.Error("they do not see the refusal")
	}

	// We ask, they answer.
	write(addressRequest{address(70000, "0.0.0.0/32"), address(3, "::/128")})
	asked, err := theirs.ReceiveAddressRequest(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := asked.Respond([]netip.Prefix{netip.MustParsePrefix("192.0.2.9/32"), {}}, wanted[1:]); err != nil {
		t.Fatal(err)
	}
	answer := addressAssign{address(70000, "192.0.2.9/32"), address(3, "::/128"), address(0, "2001:db8::/64")}
	read(answer)
	if answer[0].refused() || !answer[1].refused() || answer[2].refused() {
		t.Error("we do not see the refusal")
	}

	// Routes of either side.
	routes := routeAdvertisement{ipRange("10.0.0.0", "10.0.0.9", 0), ipRange("10.0.1.0", "10.0.1.255", 6),
		ipRange("10.0.1.0", "10.0.1.255", 17), ipRange("::", "fe00::", 0)}
	write(routes)
	got, err := theirs.Routes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var back []connectip.IPRoute
	for _, r := range routes {
		back = append(back, connectip.IPRoute{StartIP: r.Start, EndIP: r.End, IPProtocol: r.Protocol})
	}
	if d := cmp.Diff(back, got, compareNetip); d != "" {
		t.Error(d)
	}
	if err := theirs.AdvertiseRoute(back); err != nil {
		t.Fatal(err)
	}
	read(routes)
}
