package tunnel

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/quicvpn/quicvpn/tunnel/internal/congestion"
)

// A Path is what a session has learned of the way to its peer.
type Path struct {
	RTT     time.Duration // without queues
	Send    float64       // bytes a second that it takes; zero is not known
	Receive float64       // most bytes a second that came
}

// saved is the path as the congestion control starts from it.
func (p Path) saved() congestion.Path {
	if p.Send == 0 {
		return congestion.Path{}
	}
	return congestion.Path{RTT: p.RTT, Bandwidth: p.Send}
}

// streamWindow is the receive window of streams at first: two bandwidth-delay
// products, in bounds.
func (p Path) streamWindow() uint64 {
	return uint64(min(max(2*p.Receive*p.RTT.Seconds(), firstStreamWindow), wideConnectionWindow*2/3))
}

const (
	// maxPaths bounds Paths: the one that was learned first makes way.
	maxPaths = 1024
	// pathLifetime is how long a path is held for what it was.
	pathLifetime = 7 * 24 * time.Hour

	// What no path is.
	maxPathRTT  = time.Minute
	maxPathRate = 1e12
)

// Paths remembers what the ways to peers are like, by the peer's IP address, so
// that later sessions start from there (Careful Resume,
// draft-ietf-tsvwg-careful-resume). All of it are hints: whoever uses one finds out
// if it is wrong. The zero value is empty. As JSON it can be kept on disk.
type Paths struct {
	mu    sync.Mutex
	known map[netip.Addr]knownPath
}

type knownPath struct {
	Peer    netip.Addr    `json:"peer"`
	RTT     time.Duration `json:"rtt_ns"`
	Send    float64       `json:"send_bytes_per_second,omitempty"`
	Receive float64       `json:"receive_bytes_per_second,omitempty"`
	Learned time.Time     `json:"learned"`
}

// get returns the zero Path for a peer that is not known.
func (p *Paths) get(peer netip.Addr, now time.Time) Path {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, ok := p.known[peer]
	if !ok || now.Sub(k.Learned) > pathLifetime {
		return Path{}
	}
	return Path{RTT: k.RTT, Send: k.Send, Receive: k.Receive}
}

// learn replaces what is known of a peer.
func (p *Paths) learn(peer netip.Addr, path Path, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known == nil {
		p.known = make(map[netip.Addr]knownPath)
	}
	if _, ok := p.known[peer]; !ok && len(p.known) >= maxPaths {
		oldest := peer
		for a, k := range p.known {
			if oldest == peer || k.Learned.Before(p.known[oldest].Learned) {
				oldest = a
			}
		}
		delete(p.known, oldest)
	}
	p.known[peer] = knownPath{peer, path.RTT, path.Send, path.Receive, now.UTC().Truncate(time.Second)}
}

// MarshalJSON lists the paths, by the peer's address.
func (p *Paths) MarshalJSON() ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := make([]knownPath, 0, len(p.known))
	for _, k := range p.known {
		list = append(list, k)
	}
	slices.SortFunc(list, func(a, b knownPath) int { return a.Peer.Compare(b.Peer) })
	return json.Marshal(list)
}

// UnmarshalJSON takes over what MarshalJSON wrote, and nothing after an error.
func (p *Paths) UnmarshalJSON(b []byte) error {
	var list []knownPath
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	if len(list) > maxPaths {
		return fmt.Errorf("%d paths are more than %d", len(list), maxPaths)
	}
	known := make(map[netip.Addr]knownPath)
	for _, k := range list {
		if !k.Peer.IsValid() || k.Peer.Is4In6() || k.RTT <= 0 || k.RTT > maxPathRTT ||
			k.Send < 0 || k.Send > maxPathRate || k.Receive < 0 || k.Receive > maxPathRate {
			return errors.New("a path that there cannot be")
		}
		known[k.Peer] = k
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = known
	return nil
}

// A learner notes in Paths what a session finds out. It belongs to the session's
// watch.
type learner struct {
	paths *Paths
	saved Path // that the session started from
	peer  netip.Addr
	told  Path // last

	fastest float64 // bytes a second that came
	bytes   uint64  // that had come at the last look
	at      time.Time
}

// look is called now and then, and at the session's end.
func (l *learner) look(s *Session, stats quic.ConnectionStats, now time.Time) {
	if peer := s.Remote().Addr(); peer != l.peer {
		*l = learner{paths: l.paths, peer: peer, bytes: l.bytes, at: l.at} // after a migration it is another path
	}
	if past := now.Sub(l.at); past >= 100*time.Millisecond {
		l.fastest = max(l.fastest, float64(stats.BytesReceived-l.bytes)/past.Seconds())
	}
	l.bytes, l.at = stats.BytesReceived, now
	p := l.saved
	if s.steering != nil {
		if news := s.steering.Snapshot(); news != nil && news.PathKnown {
			p.RTT, p.Send = news.Path.RTT, news.Path.Bandwidth
		} else if news != nil && news.ResumeFailed {
			p = Path{}
		}
	}
	if p.RTT == 0 {
		p.RTT = stats.MinRTT
	}
	p.Receive = max(p.Receive, l.fastest)
	if p != l.saved && p != l.told && p.RTT > 0 && p.RTT <= maxPathRTT {
		l.told = p
		l.paths.learn(l.peer, p, now)
	}
}
