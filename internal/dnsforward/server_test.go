package dnsforward

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A nameServer is a real one on this machine. It knows names of its own:
//
//	large.test.    an answer that no datagram of a packet takes
//	refuse.test., fail.test.    refused, a failure
//	silent.test.   no answer
//	other.test.    an answer to another question
//	*              an address, and what else was asked for as text
type nameServer struct {
	addr netip.AddrPort

	mu   sync.Mutex
	seen []*dns.Msg
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	// A port that is free for both.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pc, err := net.ListenPacket("udp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s := &nameServer{addr: ln.Addr().(*net.TCPAddr).AddrPort()}
	for _, server := range []*dns.Server{{Listener: ln, Handler: s}, {PacketConn: pc, Handler: s}} {
		var running sync.WaitGroup
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		running.Go(func() {
			if err := server.ActivateAndServe(); err != nil {
				t.Errorf("serve names: %v", err)
			}
		})
		<-started
		t.Cleanup(func() {
			if err := server.Shutdown(); err != nil {
				t.Errorf("end serving names: %v", err)
			}
			running.Wait()
		})
	}
	return s
}

// queries returns what was asked since the last time.
func (s *nameServer) queries() []*dns.Msg {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := s.seen
	s.seen = nil
	return seen
}

func (s *nameServer) ServeDNS(w dns.ResponseWriter, m *dns.Msg) {
	s.mu.Lock()
	s.seen = append(s.seen, m.Copy())
	s.mu.Unlock()
	if r := s.answer(m); r != nil {
		if _, tcp := w.RemoteAddr().(*net.TCPAddr); !tcp {
			size := dns.MinMsgSize
			if opt := m.IsEdns0(); opt != nil {
				size = int(opt.UDPSize())
			}
			r.Truncate(size)
		}
		// Who has asked may be gone.
		_ = w.WriteMsg(r)
	}
}

func (s *nameServer) answer(m *dns.Msg) *dns.Msg {
	r := new(dns.Msg).SetReply(m)
	q := m.Question[0]
	switch strings.ToLower(q.Name) {
	case "large.test.":
		for i := range 40 {
			r.Answer = append(r.Answer, &dns.TXT{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 60},
				Txt: []string{strings.Repeat(string(rune('a'+i%26)), 80)}})
		}
	case "refuse.test.":
		r.Rcode = dns.RcodeRefused
	case "fail.test.":
		r.Rcode = dns.RcodeServerFailure
	case "silent.test.":
		return nil
	case "other.test.":
		r.Question[0].Name = "another.test."
	default:
		r.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(192, 0, 2, 1)}}
	}
	if opt := m.IsEdns0(); opt != nil {
		r.SetEdns0(opt.UDPSize(), opt.Do())
	}
	return r
}

func newForwarder(t *testing.T, servers ...netip.AddrPort) *Forwarder {
	t.Helper()
	f, err := New(Config{Servers: servers})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// ask passes a message on and reads the answer.
func ask(t *testing.T, f *Forwarder, network string, m *dns.Msg) *dns.Msg {
	t.Helper()
	query, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return unpack(t, f.Exchange(t.Context(), network, query))
}

func unpack(t *testing.T, b []byte) *dns.Msg {
	t.Helper()
	r := new(dns.Msg)
	if err := r.Unpack(b); err != nil {
		t.Fatalf("the answer % x: %v", b, err)
	}
	return r
}

func about(name string, kind uint16) *dns.Msg { return new(dns.Msg).SetQuestion(name, kind) }

// deadServer returns the address of one that takes queries and keeps them.
func deadServer(t *testing.T) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// closedServer returns an address where nobody listens.
func closedServer(t *testing.T) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// A pipeDialer connects to functions instead of name servers, for tests with a
// clock of their own.
type pipeDialer map[netip.AddrPort]func(query []byte) (answer []byte)

func (d pipeDialer) dial(_ context.Context, network, address string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	answer := d[netip.MustParseAddrPort(address)]
	go func() {
		defer theirs.Close()
		buf := make([]byte, 1<<16)
		for {
			n, err := theirs.Read(buf)
			if err != nil {
				return
			}
			if b := answer(buf[:n]); b != nil {
				if _, err := theirs.Write(b); err != nil {
					return
				}
			}
		}
	}()
	return ours, nil
}
