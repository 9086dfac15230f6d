package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"syscall"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/quicvpn/quicvpn/internal/packet"
)

// A Proxy opens flows by any HTTP/3 proxy that knows CONNECT (RFC 9114, section 4.4)
// and, for UDP, CONNECT-UDP (RFC 9298) at the default template. It has no session and
// carries no packets. It keeps one connection, which the first flow opens, and the
// next one after its end.
//
// Its fields must not be changed once it was used.
type Proxy struct {
	// Address is the proxy's "host:port". Required.
	Address string
	// RootCAs verify the proxy's certificate; nil are the system's.
	RootCAs *x509.CertPool
	// User and Password are sent as Proxy-Authorization if there is a User (RFC 7617).
	User, Password string
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// Drops counts what flows of UDP drop; nil counts nowhere.
	Drops *packet.Drops
	// Log is where the proxy speaks; nil discards.
	Log *slog.Logger

	mu   sync.Mutex // held while a connection is opened
	last *flows
	free func()
}

// DialTCP is Session.DialTCP.
func (p *Proxy) DialTCP(ctx context.Context, address string) (*Flow, error) {
	return throughProxy(ctx, p, func(f *flows) (*Flow, error) { return f.DialTCP(ctx, address) })
}

// OpenTCP is Session.OpenTCP.
func (p *Proxy) OpenTCP(ctx context.Context, address string) (*Flow, error) {
	return throughProxy(ctx, p, func(f *flows) (*Flow, error) { return f.OpenTCP(ctx, address) })
}

// DialUDP is Session.DialUDP.
func (p *Proxy) DialUDP(ctx context.Context, address string) (*UDPFlow, error) {
	return throughProxy(ctx, p, func(f *flows) (*UDPFlow, error) { return f.DialUDP(ctx, address) })
}

// Close ends the connection and all its flows.
func (p *Proxy) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked("")
	return nil
}

func (p *Proxy) dropLocked(reason string) {
	if p.last != nil {
		p.last.conn.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), reason)
		p.free()
		p.last = nil
	}
}

// throughProxy opens a flow on the connection, and once more on a new one where that
// was over.
func throughProxy[F any](ctx context.Context, p *Proxy, open func(*flows) (F, error)) (f F, err error) {
	for range 2 {
		on, err := p.connection(ctx)
		if err != nil {
			return f, err
		}
		if f, err = open(on); !errors.Is(err, syscall.ENETDOWN) {
			return f, err
		}
	}
	return f, err
}

// connection returns the one that is there, or opens it.
func (p *Proxy) connection(ctx context.Context) (*flows, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != nil && p.last.conn.Context().Err() == nil {
		return p.last, nil
	}
	p.dropLocked("")
	f, free, err := p.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to the proxy %s: %w", p.Address, err)
	}
	p.last, p.free = f, free
	orDiscard(p.Log).Info("connected to the proxy", "proxy", p.Address, "at", f.conn.RemoteAddr())
	return f, nil
}

// connect tries the proxy's addresses one after the other.
func (p *Proxy) connect(ctx context.Context) (f *flows, free func(), err error) {
	host, port, err := net.SplitHostPort(p.Address)
	if err != nil {
		return nil, nil, err
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 {
		return nil, nil, fmt.Errorf("the port %q must be 1 to 65535", port)
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, nil, err
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{alpnForeign}, ServerName: host, RootCAs: p.RootCAs}
	for _, a := range addrs {
		var conn *quic.Conn
		if conn, free, err = p.dial(ctx, netip.AddrPortFrom(a.Unmap(), uint16(number)), conf); err == nil {
			return p.flowsOn(conn), free, nil
		}
	}
	return nil, nil, err
}

func (p *Proxy) dial(ctx context.Context, to netip.AddrPort, conf *tls.Config) (*quic.Conn, func(), error) {
	sock, err := listenUDP(socketConfig{
		Listen: netip.AddrPortFrom(unspecified(to.Addr()), 0), DisableGRO: p.DisableOffload, DisableGSO: p.DisableOffload,
	})
	if err != nil {
		return nil, nil, err
	}
	transport := &quic.Transport{Conn: sock}
	free := func() {
		transport.Close()
		sock.Close()
	}
	quicConf := quicConfig(minPacketSize)
	quicConf.KeepAlivePeriod = keepAlive
	conn, err := transport.Dial(ctx, net.UDPAddrFromAddrPort(to), conf, quicConf)
	if err != nil {
		free()
		return nil, nil, err
	}
	return conn, free, nil
}

func (p *Proxy) flowsOn(conn *quic.Conn) *flows {
	transport := &http3.Transport{EnableDatagrams: true, MaxResponseHeaderBytes: maxHeaderBytes, DisableCompression: true}
	f := &flows{
		conn: conn, client: transport.NewClientConn(conn), authority: p.Address,
		header: make(http.Header), drops: orNew(p.Drops),
	}
	if p.User != "" {
		f.header.Set("Proxy-Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(p.User+":"+p.Password)))
	}
	return f
}
