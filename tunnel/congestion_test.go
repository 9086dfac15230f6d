package tunnel

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel/internal/congestion/install"
)

// Each end decides for itself what it sends by.
func TestCongestion(t *testing.T) {
	for _, tt := range []struct{ gateway, client, wantGateway, wantClient Congestion }{
		{"", "", BBR, BBR},
		{BBR, NewReno, BBR, NewReno},
		{NewReno, BBR, NewReno, BBR},
	} {
		t.Run(fmt.Sprintf("gateway %q client %q", tt.gateway, tt.client), func(t *testing.T) {
			g := startGateway(t, ServerConfig{Congestion: tt.gateway})
			d := g.dialer(t)
			d.Congestion = tt.client
			client := dial(t, d, g.Addr())
			server := <-g.serve
			if client.Congestion() != tt.wantClient || server.Congestion() != tt.wantGateway {
				t.Errorf("client by %s, gateway by %s, want %s and %s", client.Congestion(), server.Congestion(), tt.wantClient, tt.wantGateway)
			}
			atClient, atServer := receive(t, client), receive(t, server)
			const n = 10
			for i := range n {
				client.Send(0, []packet.Packet{{Data: tcpPacket(client4, far4, uint16(i), 10<<10), Segment: 1000}}, nil)
				server.Send(0, []packet.Packet{{Data: tcpPacket(far4, client4, uint16(i), 10<<10), Segment: 1000}}, nil)
			}
			atClient.wait(t, n)
			atServer.wait(t, n)
			for _, s := range []*Session{client, server} {
				if s.Congestion() == NewReno {
					continue
				}
				if s.steering.Installed() != 1 || s.steering.Err() != nil || s.steering.Snapshot() == nil {
					t.Errorf("installed %d times, %v, knows %+v", s.steering.Installed(), s.steering.Err(), s.steering.Snapshot())
				}
			}
		})
	}
}

func TestCongestionUnknown(t *testing.T) {
	if _, err := Listen(ServerConfig{Key: newKey(t), Congestion: "cubic"}); err == nil || !strings.Contains(err.Error(), `"cubic": use bbr or newreno`) {
		t.Errorf("Listen = %v", err)
	}
	d := &Dialer{Key: newKey(t), Congestion: "cubic"}
	if _, err := d.Dial(t.Context(), netip.MustParseAddrPort("127.0.0.1:1")); err == nil || !strings.Contains(err.Error(), `"cubic": use bbr or newreno`) {
		t.Errorf("Dial = %v", err)
	}
}

// Where a controller cannot be put in there is a session all the same.
func TestCongestionCannotBeReplaced(t *testing.T) {
	g := startGateway(t, ServerConfig{Congestion: NewReno})
	d := g.dialer(t)
	d.Congestion = NewReno // and so without a tracer
	client := dial(t, d, g.Addr())
	<-g.serve
	if h := BBR.steer(client.conn, install.Options{}, client.log); h != nil || client.Congestion() != NewReno {
		t.Errorf("steered: %v, by %s", h != nil, client.Congestion())
	}
}

func TestStockWarningIsGivenOnce(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	var w stockWarning
	for range 3 {
		w.warn(log, errors.New("another version"))
	}
	if n := strings.Count(out.String(), "level=WARN"); n != 1 || !strings.Contains(out.String(), "another version") {
		t.Errorf("warned %d times:\n%s", n, out.String())
	}
}
