package tunnel

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/binary"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/yosida95/uritemplate/v3"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A client that knows nothing of quicvpn joins by the standards alone.
func TestForeignClient(t *testing.T) {
	g := startGateway(t, ServerConfig{})
	cert, err := newCertificate(newKey(t), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	conn, err := quic.DialAddr(ctx, g.Addr().String(), &tls.Config{
		InsecureSkipVerify: true, NextProtos: []string{"h3"}, Certificates: []tls.Certificate{*cert},
	}, &quic.Config{EnableDatagrams: true, InitialPacketSize: 1350})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseWithError(0, "")
	peer, err := new(connectip.Transport).NewClientConn(conn)
	if err != nil {
		t.Fatal(err)
	}
	request, err := connectip.NewRequest(ctx, uritemplate.MustNew("https://gateway"+pathConnectIP))
	if err != nil {
		t.Fatal(err)
	}
	request.Header().Set("Authorization", "Bearer s3cret")
	foreign, response, err := peer.Dial(request)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("Dial = %v, %v", response, err)
	}
	defer foreign.Close()
	addresses, err := foreign.ReceiveAddressAssignment(ctx)
	if err != nil || len(addresses) != 2 || addresses[0].IPPrefix != netip.PrefixFrom(client4, 32) || addresses[1].IPPrefix != netip.PrefixFrom(client6, 128) {
		t.Errorf("addresses = %v, %v", addresses, err)
	}
	routes, err := foreign.Routes(ctx)
	if err != nil || len(routes) != 2 || routes[0].StartIP != netip.IPv4Unspecified() || routes[1].EndIP != netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff") {
		t.Errorf("routes = %v, %v", routes, err)
	}
	if j := <-g.joins; j.Secret != "s3cret" {
		t.Error("the secret did not come through")
	}

	server := <-g.serve
	atServer := receive(t, server)
	foreignToOwn(t, foreign, atServer, client4, far4)
	ownToForeign(t, server, foreign, far4, client4)

	// An address that is asked for again is the same one.
	if _, err := foreign.RequestAddresses([]netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 32)}); err != nil {
		t.Fatal(err)
	}
	again, err := foreign.ReceiveAddressAssignment(ctx)
	if err != nil || len(again) != 2 || again[0].IPPrefix != netip.PrefixFrom(client4, 32) || again[0].RequestID == 0 {
		t.Errorf("addresses = %v, %v", again, err)
	}
}

// A gateway that knows nothing of quicvpn serves our client.
func TestForeignGateway(t *testing.T) {
	key := newKey(t)
	cert, err := newCertificate(key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	served := make(chan *connectip.Conn, 1)
	template := uritemplate.MustNew("https://" + serverName + pathConnectIP)
	mux := http.NewServeMux()
	mux.HandleFunc(pathConnectIP, func(w http.ResponseWriter, r *http.Request) {
		request, err := connectip.ParseProxyRequest(r, template)
		if err != nil {
			t.Error(err)
			return
		}
		c, err := new(connectip.Proxy).Proxy(w, request)
		if err != nil {
			t.Error(err)
			return
		}
		c.AssignAddresses([]netip.Prefix{netip.PrefixFrom(client4, 32)})
		c.AdvertiseRoute([]connectip.IPRoute{{StartIP: netip.IPv4Unspecified(), EndIP: netip.MustParseAddr("255.255.255.255")}})
		served <- c
	})
	h3 := http3.Server{Handler: mux, EnableDatagrams: true,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{*cert}}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		h3.Serve(udp)
	}()
	defer func() {
		h3.Close()
		<-done
	}()

	d := &Dialer{Key: newKey(t), Pin: KeyFingerprint(key.Public().(ed25519.PublicKey))}
	client := dial(t, d, addrPort(udp.LocalAddr()))
	if g := client.Grant(); len(g.Addresses) != 1 || g.Addresses[0] != client4 || len(g.Routes) != 1 || g.Routes[0] != netip.MustParsePrefix("0.0.0.0/0") {
		t.Errorf("grant = %+v", g)
	}
	foreign := <-served
	foreignToOwn(t, foreign, receive(t, client), far4, client4)
	ownToForeign(t, client, foreign, client4, far4)
}

func foreignToOwn(t *testing.T, from *connectip.Conn, to *collector, src, dst netip.Addr) {
	t.Helper()
	sent := []packet.Packet{{Data: udpPacket(src, dst, 900)}, {Data: tcpPacket(src, dst, 4000, 1000)}}
	for _, p := range sent {
		if _, err := from.WritePacket(p.Data); err != nil { // decrements the hop limit in place
			t.Fatal(err)
		}
	}
	samePackets(t, sent, to.wait(t, len(sent)))
}

func ownToForeign(t *testing.T, from *Session, to *connectip.Conn, src, dst netip.Addr) {
	t.Helper()
	// A super-packet becomes segments with whole checksums, a SYN's MSS fits.
	super := packet.Packet{Data: tcpPacket(src, dst, 4001, 40+3*1000), Segment: 1000}
	h, err := packet.Parse(super.Data)
	if err != nil {
		t.Fatal(err)
	}
	super.SetPartial(h)
	syn := tcpPacket(src, dst, 4002, 44)
	syn[32], syn[33] = 6<<4, 0x02
	copy(syn[40:], []byte{2, 4, 0xff, 0xff})
	from.Send(0, []packet.Packet{super, {Data: syn}}, nil)
	b := make([]byte, 2000)
	syns := 0
	for i := range 4 { // the two flows take turns
		n, err := to.ReadPacket(b)
		if err != nil {
			t.Fatal(err)
		}
		if n == len(syn) {
			syns++
			if mss := int(binary.BigEndian.Uint16(b[42:])); mss != from.MTU()-40 {
				t.Errorf("MSS = %d through a tunnel of %d", mss, from.MTU())
			}
		} else if n != 1040 || !transportSumIsRight(b[:n]) {
			t.Errorf("packet %d: %d bytes, checksum right: %v", i, n, transportSumIsRight(b[:n]))
		}
	}
	if syns != 1 {
		t.Errorf("%d packets are the SYN", syns)
	}
}

func transportSumIsRight(b []byte) bool {
	sum := uint32(packet.TCP) + uint32(len(b)-20)
	for i := 12; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return sum == 0xffff
}
