package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Dialer opens sessions to one gateway.
type Dialer struct {
	// Key is the client's identity. Required.
	Key ed25519.PrivateKey
	// Pin is the fingerprint of the gateway's key. Required.
	Pin Fingerprint
	// Secret is the join token's secret. It enrols Key at the first join and is
	// not looked at afterwards.
	Secret string
	// Block asks for a block of addresses: Grant.Block.
	Block bool
	// Announce are prefixes, at most 16, in which the network's other clients
	// may reach somebody through this one: Grant.Announced.
	Announce []netip.Prefix
	// Names asks the gateway to answer queries for names itself.
	Names Names
	// Mark is the SO_MARK of the UDP socket; zero sets none.
	Mark uint32
	// Queues is the number of streams for super-packets; zero means one.
	Queues int
	// MTU caps the tunnel's MTU; zero leaves it to the path.
	MTU int
	// Congestion decides how fast sessions send.
	Congestion Congestion
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// Paths remembers the paths to gateways; nil remembers them as long as the
	// Dialer lives.
	Paths *Paths
	// Drops counts what the sessions drop; nil counts nowhere.
	Drops *packet.Drops
	// Log is where the session speaks; nil discards.
	Log *slog.Logger
	// Now is the clock for certificates; nil is time.Now.
	Now func() time.Time
	// Reached is called when the gateway has been reached, before it is asked for a
	// session, which ends an older one. An error gives the attempt up. Nil goes on.
	Reached func(ctx context.Context) error

	warn  sync.Once
	paths Paths // where there are no others
	mu    sync.Mutex
	mtus  map[netip.Addr]int // what paths were seen to carry, by gateway
}

// Dial opens a session and returns it with its grant.
func (d *Dialer) Dial(ctx context.Context, gateway netip.AddrPort) (*Session, error) {
	if err := d.Congestion.Check(); err != nil {
		return nil, fmt.Errorf("congestion control %w", err)
	}
	a, err := d.handshake(ctx, gateway)
	if err != nil {
		return nil, err
	}
	var s *Session
	if d.Reached != nil {
		err = d.Reached(ctx)
	}
	if err == nil {
		s, err = d.connectIP(ctx, a)
	}
	if err != nil {
		a.close()
		return nil, err
	}
	a.session.Store(s)
	return s, nil
}

// connectIP asks for a tunnel (RFC 9484, section 4) and waits for the grant.
func (d *Dialer) connectIP(ctx context.Context, a *attempt) (*Session, error) {
	conn := a.conn
	own := isOwn(conn)
	transport := &http3.Transport{EnableDatagrams: !own, MaxResponseHeaderBytes: maxHeaderBytes, DisableCompression: true}
	if own {
		transport.AdditionalSettings = map[uint64]uint64{settingOwn: settingOwnVersion}
	}
	client := transport.NewRawClientConn(conn)
	incoming := make(chan *quic.ReceiveStream, 1)
	go acceptUniStreams(conn, own, client.HandleUnidirectionalStream, deliver(conn, incoming))

	// Extended CONNECT waits for the peer's settings (RFC 9220, section 3).
	select {
	case <-client.ReceivedSettings():
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the gateway's settings: %w", context.Cause(ctx))
	case <-conn.Context().Done():
		return nil, fmt.Errorf("wait for the gateway's settings: %w", context.Cause(conn.Context()))
	}
	if largestDatagram(conn) < minDatagram {
		return nil, errors.New("the gateway takes no QUIC datagrams (RFC 9221) in which packets fit")
	}
	if v := client.Settings().Other[settingOwn]; own && v != settingOwnVersion {
		return nil, fmt.Errorf("the gateway speaks version %d of the quicvpn framing, this client version %d: install the same release on both", v, settingOwnVersion)
	}
	stream, err := client.OpenRequestStream(ctx)
	if err != nil {
		return nil, fmt.Errorf("open a request: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodConnect, "https://"+serverName+pathConnectIP, nil)
	if err != nil {
		return nil, err
	}
	request.Proto = protoConnectIP
	request.Header.Set(http3.CapsuleProtocolHeader, "?1")
	if d.Secret != "" {
		request.Header.Set("Authorization", "Bearer "+d.Secret)
	}
	d.wishToHeader(request.Header)
	// What follows reads from a stream, which knows no contexts.
	stop := context.AfterFunc(ctx, func() { stream.SetDeadline(time.Unix(1, 0)) })
	grant, err := requestGrant(stream, request, own)
	if !stop() || err != nil {
		if err == nil || ctx.Err() != nil {
			err = fmt.Errorf("ask for a tunnel: %w", context.Cause(ctx))
		}
		return nil, err
	}
	grant.Announced = slices.DeleteFunc(grant.Announced, func(p netip.Prefix) bool { return !slices.Contains(d.Announce, p) })
	return newSession(sessionConfig{
		conn: conn, control: &control{requestStream: stream}, grant: grant, queues: d.Queues, maxMTU: d.MTU,
		drops: orNew(d.Drops), log: orDiscard(d.Log), incoming: incoming, onClose: a.release, requests: client.ClientConn, steering: a.steering, paths: d.memory(), saved: a.saved,
	}), nil
}

// requestGrant sends the request and reads the answer up to the first addresses and
// routes.
func requestGrant(stream *http3.RequestStream, request *http.Request, own bool) (Grant, error) {
	if err := stream.SendRequestHeader(request); err != nil {
		return Grant{}, fmt.Errorf("ask for a tunnel: %w", err)
	}
	response, err := stream.ReadResponse()
	if err != nil {
		return Grant{}, fmt.Errorf("ask for a tunnel: %w", err)
	}
	if response.StatusCode < 200 || response.StatusCode > 299 {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10))
		return Grant{}, &RefusedError{
			Status: response.StatusCode,
			Code:   printable(response.Header.Get(headerError)),
			Text:   printable(strings.TrimSpace(string(text))),
		}
	}
	grant, err := grantFromHeader(response.Header)
	if err != nil {
		return Grant{}, fmt.Errorf("the gateway's answer: %w", err)
	}
	if err := readGrant(stream, &grant); err != nil {
		return Grant{}, fmt.Errorf("wait for addresses and routes: %w", err)
	}
	return grant, nil
}

func (d *Dialer) memory() *Paths {
	if d.Paths != nil {
		return d.Paths
	}
	return &d.paths
}

func unspecified(like netip.Addr) netip.Addr {
	if like.Unmap().Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func orNew(d *packet.Drops) *packet.Drops {
	if d == nil {
		return new(packet.Drops)
	}
	return d
}

func orDiscard(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}
