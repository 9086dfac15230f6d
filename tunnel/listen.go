package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"golang.org/x/time/rate"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/tunnel/internal/congestion/install"
)

// A Join is a client's wish to join, authenticated by its TLS key.
type Join struct {
	// Client is the fingerprint of the key that the client proved to hold.
	Client Fingerprint
	// Secret is the token secret that it presented; empty if none.
	Secret string
	// Block says that it asks for a block of addresses.
	Block bool
	// Announce are prefixes, at most 16 and none within another, in which the
	// network's other clients may reach somebody through it.
	Announce []netip.Prefix
	// Names says which of its queries for names the gateway is to answer.
	Names Names
	// Remote is where it comes from.
	Remote netip.AddrPort
}

// A ServerConfig says how a Server listens and who may join.
type ServerConfig struct {
	// Listen is the UDP address; an unspecified IP listens on IPv4 and IPv6.
	Listen netip.AddrPort
	// Key is the gateway's identity, which clients pin. The stateless reset key
	// and the address validation key are derived from it. Required.
	Key ed25519.PrivateKey
	// Authorize answers a join with a grant, or with a *RefusedError that is
	// sent to the client. Required.
	Authorize func(ctx context.Context, join Join) (Grant, error)
	// Serve owns a session that was granted, until it returns; the session is
	// then closed. Required.
	Serve func(ctx context.Context, s *Session)
	// Leave forgets a client that says that it does not come back; its session
	// then ends. After an error the client is told to try again. Nil ignores
	// what it says.
	Leave func(client Fingerprint) error
	// DialTCP opens what a client's flow leads to: address is "host:port", where the
	// host may be a name. ctx ends when the client gives up. The client is told of the
	// errors that a dial has, and of a *DialError as it is; of others only that there
	// was one. The connection should have CloseWrite, as *net.TCPConn has. Nil refuses.
	DialTCP func(ctx context.Context, s *Session, address string) (net.Conn, error)
	// DialUDP is DialTCP for a UDP socket: each Read and Write of the connection is
	// one datagram. The flow ends with its first error. Nil refuses.
	DialUDP func(ctx context.Context, s *Session, address string) (net.Conn, error)
	// Queues is the number of streams for super-packets; zero means one.
	Queues int
	// MTU caps the tunnels' MTU; zero leaves it to the path.
	MTU int
	// Congestion decides how fast sessions send.
	Congestion Congestion
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// Drops counts what the sessions drop; nil counts nowhere.
	Drops *packet.Drops
	// Log is where the server speaks; nil discards.
	Log *slog.Logger
	// Now is the clock for certificates; nil is time.Now.
	Now func() time.Time
}

// A Server accepts sessions on one UDP socket.
type Server struct {
	cfg       ServerConfig
	sock      *socket
	transport *quic.Transport
	listener  *quic.Listener
	sizes     initialSizes
	paths     Paths // to clients
	strangers strangers
	refusals  *rate.Limiter // of what is logged

	mu       sync.Mutex
	sessions map[*Session]struct{} // that the socket's news may be for
}

const (
	// joinTimeout is how long a connection may live without a session, and
	// maxStrangers how many such connections there may be.
	joinTimeout  = 10 * time.Second
	maxStrangers = 1024

	// maxHeaderBytes bounds the headers of requests and answers, of which
	// hundreds of peers are the most.
	maxHeaderBytes = 32 << 10

	// Above so many new connections a second, clients first prove that their
	// address is theirs (RFC 9000, section 8.1.2).
	unverifiedRate  = 100
	unverifiedBurst = 200
)

// Listen binds the socket, so that a port in use is an error here.
func Listen(cfg ServerConfig) (*Server, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if err := cfg.Congestion.Check(); err != nil {
		return nil, fmt.Errorf("congestion control %w", err)
	}
	cfg.Log = orDiscard(cfg.Log)
	cfg.Drops = orNew(cfg.Drops)
	reset, token, err := resetKeys(cfg.Key)
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, sessions: make(map[*Session]struct{}), refusals: rate.NewLimiter(1, 10)}
	s.sock, err = listenUDP(socketConfig{
		Listen: cfg.Listen, OnTooBig: s.onTooBig, DisableGRO: cfg.DisableOffload, DisableGSO: cfg.DisableOffload,
	})
	if err != nil {
		return nil, err
	}
	warnOfBuffers(s.sock, cfg.Log)
	limit := rate.NewLimiter(unverifiedRate, unverifiedBurst)
	s.transport = &quic.Transport{
		Conn: sizingSocket{s.sock, &s.sizes}, StatelessResetKey: &reset, TokenGeneratorKey: &token,
		VerifySourceAddress: func(net.Addr) bool { return !limit.Allow() },
	}
	conf := s.quicConfig(minPacketSize)
	conf.GetConfigForClient = func(info *quic.ClientInfo) (*quic.Config, error) {
		remote := addrPort(info.RemoteAddr)
		conf := s.quicConfig(s.sizes.of(remote))
		windows.admit(conf, s.paths.get(remote.Addr(), time.Now()))
		return conf, nil
	}
	s.listener, err = s.transport.Listen(serverTLS(cfg.Key, cfg.Now), conf)
	if err != nil {
		s.sock.Close()
		return nil, fmt.Errorf("listen for QUIC: %w", err)
	}
	return s, nil
}

func (s *Server) quicConfig(size int) *quic.Config {
	conf := quicConfig(size)
	conf.MaxIncomingStreams = maxFlows
	conf.Tracer = s.cfg.Congestion.tracer()
	return conf
}

// Addr returns the address that the server is bound to.
func (s *Server) Addr() netip.AddrPort { return addrPort(s.sock.LocalAddr()) }

// Close lets go of the socket. It is for servers that do not run: Run closes
// its own.
func (s *Server) Close() error {
	return errors.Join(s.listener.Close(), s.transport.Close(), s.sock.Close())
}

// Run accepts sessions until ctx ends, then closes them all, and the server, and
// returns nil.
func (s *Server) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer func() {
		s.listener.Close()
		wg.Wait()
		s.Close()
	}()
	for {
		conn, err := s.listener.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept connections: %w", err)
		}
		wg.Go(func() { s.serveConn(ctx, conn) })
	}
}

// serveConn serves one connection, which holds one session.
func (s *Server) serveConn(ctx context.Context, conn *quic.Conn) {
	own := isOwn(conn)
	h := &handler{
		server: s, conn: conn, ctx: ctx, known: s.strangers.add(conn), incoming: make(chan *quic.ReceiveStream, 1),
		saved: s.paths.get(addrPort(conn.RemoteAddr()).Addr(), time.Now()),
	}
	h.steering = s.cfg.Congestion.steer(conn, install.Options{Saved: h.saved.saved(), MaxPTO: gatewayMaxPTO}, s.cfg.Log)
	defer h.known()
	h3 := &http3.Server{Handler: h, EnableDatagrams: !own, MaxHeaderBytes: maxHeaderBytes}
	if own {
		h3.AdditionalSettings = map[uint64]uint64{settingOwn: settingOwnVersion}
	}
	raw, err := h3.NewRawServerConn(conn)
	if err != nil {
		conn.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeInternalError), "")
		return
	}
	stop := context.AfterFunc(ctx, func() {
		raw.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "the gateway shuts down")
	})
	defer stop()
	toSession := deliver(conn, h.incoming)
	go acceptUniStreams(conn, own, raw.HandleUnidirectionalStream, func(stream *quic.ReceiveStream) {
		if h.granted.Load() {
			toSession(stream)
		} else {
			stream.CancelRead(quic.StreamErrorCode(http3.ErrCodeStreamCreationError))
		}
	})
	var wg sync.WaitGroup
	defer wg.Wait()
	early := make(chan struct{}, maxEarlyRequests)
	for {
		stream, err := conn.AcceptStream(conn.Context())
		if err != nil {
			return
		}
		if h.granted.Load() {
			wg.Go(func() { raw.HandleRequestStream(stream) })
			continue
		}
		select {
		case early <- struct{}{}:
			wg.Go(func() {
				defer func() { <-early }()
				raw.HandleRequestStream(stream)
			})
		default:
			cancelStream(stream, http3.ErrCodeRequestRejected)
		}
	}
}

// A handler answers the requests of one connection.
type handler struct {
	server   *Server
	conn     *quic.Conn
	ctx      context.Context // the server's
	known    func()          // says that the client is no stranger
	incoming chan *quic.ReceiveStream
	busy     atomic.Bool // the one session that a connection holds is asked for or there
	granted  atomic.Bool // it is there
	session  atomic.Pointer[Session]
	saved    Path            // what was known of the path
	steering *install.Handle // of the congestion control
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodConnect && (r.Proto == protoConnectUDP || r.Proto == protoConnect):
		h.serveFlow(w, r)
		return
	case r.Method != http.MethodConnect || r.Proto != protoConnectIP:
		refuse(w, &RefusedError{Status: http.StatusNotImplemented, Code: "not-implemented",
			Text: "this gateway speaks CONNECT-IP (RFC 9484), CONNECT and CONNECT-UDP (RFC 9298) only"})
		return
	case r.URL.Path != pathConnectIP:
		refuse(w, &RefusedError{Status: http.StatusNotFound, Code: "not-found",
			Text: "the gateway serves " + pathConnectIP})
		return
	case !h.busy.CompareAndSwap(false, true):
		refuse(w, &RefusedError{Status: http.StatusTooManyRequests, Code: "one-session",
			Text: "a connection holds one session: open another connection"})
		return
	}
	if err := h.serve(w, r); err != nil {
		h.busy.Store(false)
		refused, ok := errors.AsType[*RefusedError](err)
		if !ok {
			h.server.cfg.Log.Error("a join failed", "remote", addrPort(h.conn.RemoteAddr()), "err", err)
			refused = &RefusedError{Status: http.StatusInternalServerError, Code: "internal",
				Text: "the gateway failed to answer; its log says why"}
		} else if h.server.refusals.Allow() {
			h.server.cfg.Log.Info("a join was refused", "why", refused.Code, "key", peerFingerprint(h.conn), "from", addrPort(h.conn.RemoteAddr()))
		}
		refuse(w, refused)
	}
}

// serve answers a request for a tunnel and serves the session. An error is the
// answer.
func (h *handler) serve(w http.ResponseWriter, r *http.Request) error {
	join := Join{Client: peerFingerprint(h.conn), Remote: addrPort(h.conn.RemoteAddr())}
	if join.Client == (Fingerprint{}) {
		return &RefusedError{Status: http.StatusUnauthorized, Code: "no-certificate",
			Text: "show a TLS client certificate: its key is the client's identity"}
	}
	if largestDatagram(h.conn) < minDatagram {
		return &RefusedError{Status: http.StatusBadRequest, Code: "no-datagrams",
			Text: "take QUIC datagrams (RFC 9221) in which packets fit"}
	}
	if err := wishFromHeader(r.Header, &join); err != nil {
		return err
	}
	join.Secret, _ = strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	grant, err := h.server.cfg.Authorize(r.Context(), join)
	if err != nil {
		return err
	}
	h.known()
	h.granted.Store(true)
	grantToHeader(grant, w.Header())
	w.Header().Set(http3.CapsuleProtocolHeader, "?1")
	w.WriteHeader(http.StatusOK)
	stream, err := w.(http3.HTTPStreamer).HTTPStream()
	if err != nil {
		return err
	}
	cfg := &h.server.cfg
	session := newSession(sessionConfig{
		conn: h.conn, control: &control{requestStream: stream}, grant: grant, queues: cfg.Queues, maxMTU: cfg.MTU,
		drops: cfg.Drops, log: cfg.Log, incoming: h.incoming, leave: h.server.leave(),
		steering: h.steering, paths: &h.server.paths, saved: h.saved,
	})
	h.session.Store(session)
	h.server.track(session, true)
	defer h.server.track(session, false)
	defer session.Close("")
	if err := session.control.sendGrant(grant); err != nil {
		return nil // the client is gone
	}
	cfg.Serve(h.ctx, session)
	return nil
}

func refuse(w http.ResponseWriter, e *RefusedError) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set(headerError, e.Code)
	w.WriteHeader(e.Status)
	fmt.Fprintln(w, e.Text)
}

// track remembers a session for what the socket hears about its path.
func (s *Server) track(session *Session, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if on {
		s.sessions[session] = struct{}{}
	} else {
		delete(s.sessions, session)
	}
}

// onTooBig looks for the session of an address: clients move.
func (s *Server) onTooBig(remote netip.AddrPort, mtu int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for session := range s.sessions {
		if session.Remote() == netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port()) {
			go session.onTooBig(mtu)
		}
	}
}
