package sidecar

import (
	"crypto/ed25519"
	"log/slog"
	"net/netip"
	"time"

	"github.com/quicvpn/quicvpn/internal/packet"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/tunnel"
)

// A LinkConfig says which gateway a Link keeps a session to, as whom, and who
// hears of it.
//
// Connected, Changed and Disconnected are called one at a time, by Run; Check
// may be called by several goroutines. None of them may wait for Run to return.
type LinkConfig struct {
	// Token says where the gateway is and how to recognise it. Required.
	Token token.Token
	// Key is the client's identity. Required.
	Key ed25519.PrivateKey
	// Queues is the number of streams for super-packets; zero means one for each
	// CPU, at most 8.
	Queues int
	// MTU caps the tunnel's, 1280 to 1500; zero leaves it to the path.
	MTU int
	// PathFile is where it is kept what the paths to gateways are like, so that
	// sessions are fast sooner; empty keeps it for as long as the Link lives. What is
	// in it may get lost.
	PathFile string
	// Congestion decides how fast sessions send; empty means tunnel.BBR.
	Congestion tunnel.Congestion
	// DisableOffload turns off UDP GSO and GRO, for network cards that do them
	// badly.
	DisableOffload bool
	// Block asks the gateway for a block of addresses, beside the client's own.
	Block bool
	// Announce are the prefixes, at most 16, that other members of the network
	// shall reach through this client.
	Announce []netip.Prefix
	// Names says which queries for names the gateway answers itself.
	Names tunnel.Names
	// TCP says what EndsTCP answers.
	TCP TCPMode
	// TCPOpen says when Dial returns.
	TCPOpen TCPOpen
	// Drops counts what the sessions drop, and what comes while there is none; nil
	// counts nowhere.
	Drops *packet.Drops
	// Log is where the link speaks; nil discards.
	Log *slog.Logger

	// Check refuses a session whose grant cannot be used; nil takes any.
	Check func(tunnel.Grant) error
	// Connected is called when a session has taken over, before anything is sent
	// to it or received from it: what it receives goes to the sink. MTU and Peers
	// are already the session's. Required.
	Connected func(tunnel.Grant) tunnel.Sink
	// Disconnected is called when there is no session any more. A session that
	// another one replaces is not told of. Optional.
	Disconnected func()
	// Changed is called when MTU or Peers of the session in use have changed.
	// Optional.
	Changed func()
}

// A LinkStatus says how a Link is at the moment.
type LinkStatus struct {
	// Gateway is the address at the other end of the session; the zero AddrPort
	// while there is none.
	Gateway netip.AddrPort
	// Since is when the session began, or since when there is none.
	Since time.Time
	// Congestion is what decides how fast the latest session sends; empty before
	// the first.
	Congestion tunnel.Congestion
	// Err says, in words for people, why there is no session, or that the one in
	// use has fallen silent. It is nil while all is well, and before the first
	// attempt has failed.
	Err error
}
