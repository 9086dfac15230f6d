package dnsforward

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

var networks = []string{"udp", "tcp"}

// What is asked reaches the name server as it was, but for its ID.
func TestExchangePassesOn(t *testing.T) {
	s := newNameServer(t)
	f := newForwarder(t, s.addr)
	edns := about("a.test.", dns.TypeA)
	edns.SetEdns0(4096, true)
	edns.IsEdns0().Option = append(edns.IsEdns0().Option,
		&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0011223344556677"},
		&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("ours")})
	bits := about("a.test.", dns.TypeA)
	bits.CheckingDisabled, bits.AuthenticatedData, bits.RecursionDesired = true, true, false
	for name, m := range map[string]*dns.Msg{
		"IPv4": about("a.test.", dns.TypeA), "IPv6": about("a.test.", dns.TypeAAAA),
		"HTTPS": about("a.test.", dns.TypeHTTPS), "a type of nobody's": about("a.test.", 65280),
		"any": about("a.test.", dns.TypeANY), "the root": about(".", dns.TypeNS),
		"a mixed case": about("A.tEsT.", dns.TypeA), "EDNS": edns, "bits": bits,
		"another class": {MsgHdr: dns.MsgHdr{Id: 7}, Question: []dns.Question{{Name: "version.bind.", Qtype: dns.TypeTXT, Qclass: dns.ClassCHAOS}}},
	} {
		for _, network := range networks {
			t.Run(name+" "+network, func(t *testing.T) {
				r := ask(t, f, network, m)
				if r.Id != m.Id || r.Rcode != dns.RcodeSuccess || len(r.Answer) != 1 || r.Question[0] != m.Question[0] {
					t.Errorf("the answer is\n%v\nto\n%v", r, m)
				}
				got := s.queries()
				if len(got) != 1 {
					t.Fatalf("the name server saw %d queries", len(got))
				}
				got[0].Id = m.Id
				if diff := cmp.Diff(m.String(), got[0].String()); diff != "" {
					t.Errorf("the name server saw (-asked +seen):\n%s", diff)
				}
			})
		}
	}
}

func TestExchangeChoosesIDs(t *testing.T) {
	s := newNameServer(t)
	f := newForwarder(t, s.addr)
	m := about("a.test.", dns.TypeA)
	ids := make(map[uint16]bool)
	for range 20 {
		ask(t, f, "udp", m)
		ids[s.queries()[0].Id] = true
	}
	if len(ids) < 18 {
		t.Errorf("20 queries with the same ID went on with %d", len(ids))
	}
}

// What is no question, or asks for more than an answer, is not passed on.
func TestExchangeRefuses(t *testing.T) {
	s := newNameServer(t)
	f := newForwarder(t, s.addr)
	update := new(dns.Msg).SetUpdate("test.")
	two := about("a.test.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	none := about("a.test.", dns.TypeA)
	none.Question = nil
	pack := func(m *dns.Msg) []byte {
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	whole := pack(about("a.test.", dns.TypeA))
	for name, tt := range map[string]struct {
		query []byte
		code  int // -1 means no answer
	}{
		"nothing":                {nil, -1},
		"half a header":          {whole[:11], -1},
		"an answer":              {pack(new(dns.Msg).SetReply(about("a.test.", dns.TypeA))), -1},
		"an update":              {pack(update), dns.RcodeNotImplemented},
		"a notification":         {pack(new(dns.Msg).SetNotify("test.")), dns.RcodeNotImplemented},
		"a transfer":             {pack(new(dns.Msg).SetAxfr("test.")), dns.RcodeRefused},
		"an incremental one":     {pack(new(dns.Msg).SetIxfr("test.", 1, "ns.test.", "mb.test.")), dns.RcodeRefused},
		"two questions":          {pack(two), dns.RcodeFormatError},
		"no question":            {pack(none), dns.RcodeFormatError},
		"a header alone":         {whole[:12], dns.RcodeFormatError},
		"half a name":            {whole[:15], dns.RcodeFormatError},
		"half a question":        {whole[:len(whole)-1], dns.RcodeFormatError},
		"a name that is a loop":  {append(bytes.Clone(whole[:12]), 0xc0, 12, 0, 1, 0, 1), dns.RcodeFormatError},
		"a name without an end":  {append(bytes.Clone(whole[:12]), bytes.Repeat([]byte("\x3faaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"), 9)...), dns.RcodeFormatError},
		"a label that is no one": {append(bytes.Clone(whole[:12]), 0x80, 0, 0, 1, 0, 1), dns.RcodeFormatError},
	} {
		for _, network := range networks {
			t.Run(name+" "+network, func(t *testing.T) {
				got := f.Exchange(t.Context(), network, tt.query)
				if tt.code < 0 {
					if got != nil {
						t.Errorf("answered with % x", got)
					}
					return
				}
				r := new(dns.Msg)
				if err := r.Unpack(got); err != nil {
					t.Fatal(err)
				}
				if !r.Response || r.Rcode != tt.code || !bytes.Equal(got[:2], tt.query[:2]) {
					t.Errorf("answered with\n%v\nwant code %s", r, dns.RcodeToString[tt.code])
				}
			})
		}
	}
	if n := len(s.queries()); n > 0 {
		t.Errorf("%d of them were passed on", n)
	}
	if got := f.Counters(); got["refused"] == 0 || got["refused"] != got["queries"] {
		t.Errorf("counters: %v", got)
	}
}

// A query goes to the next name server if one does not know, or is not there.
func TestExchangeTriesTheNext(t *testing.T) {
	s, other := newNameServer(t), newNameServer(t)
	for name, tt := range map[string]struct {
		first    netip.AddrPort
		question string
		code     int
		answers  int
	}{
		"nobody there":                       {closedServer(t), "a.test.", dns.RcodeSuccess, 1},
		"no answer":                          {deadServer(t), "a.test.", dns.RcodeSuccess, 1},
		"an answer to another question":      {other.addr, "other.test.", dns.RcodeServerFailure, 0},
		"refused by all":                     {other.addr, "refuse.test.", dns.RcodeRefused, 0},
		"failed by all":                      {other.addr, "fail.test.", dns.RcodeServerFailure, 0},
		"refused by one that is there alone": {closedServer(t), "refuse.test.", dns.RcodeRefused, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newForwarder(t, tt.first, s.addr)
			network := "udp"
			if tt.question == "other.test." {
				network = "tcp"
			}
			r := ask(t, f, network, about(tt.question, dns.TypeA))
			if r.Rcode != tt.code || len(r.Answer) != tt.answers {
				t.Errorf("the answer is\n%v", r)
			}
		})
	}
}

func TestExchangeFailsInTime(t *testing.T) {
	one, two := netip.MustParseAddrPort("192.0.2.1:53"), netip.MustParseAddrPort("192.0.2.2:53")
	query, err := about("a.test.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	silent := func([]byte) []byte { return nil }
	late := func(after time.Duration) func(query []byte) []byte {
		return func(query []byte) []byte {
			time.Sleep(after)
			return reply(query, dns.RcodeNameError)
		}
	}
	for name, tt := range map[string]struct {
		servers pipeDialer
		code    int
		after   time.Duration
	}{
		"nobody answers":           {pipeDialer{one: silent, two: silent}, dns.RcodeServerFailure, timeLimit},
		"one server, no answer":    {pipeDialer{one: silent}, dns.RcodeServerFailure, timeLimit},
		"the second answers":       {pipeDialer{one: silent, two: late(time.Millisecond)}, dns.RcodeNameError, patience + time.Millisecond},
		"the first, after all":     {pipeDialer{one: late(2 * time.Second), two: silent}, dns.RcodeNameError, 2 * time.Second},
		"the only one, in no time": {pipeDialer{one: late(0)}, dns.RcodeNameError, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, err := New(Config{Servers: []netip.AddrPort{one, two}[:len(tt.servers)], Dial: tt.servers.dial})
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				r := unpack(t, f.Exchange(t.Context(), "udp", query))
				if took := time.Since(start); r.Rcode != tt.code || took != tt.after {
					t.Errorf("%s after %v, want %s after %v", dns.RcodeToString[r.Rcode], took, dns.RcodeToString[tt.code], tt.after)
				}
			})
		})
	}
}

// Who does not see the query cannot answer it.
func TestExchangeIgnoresForgeries(t *testing.T) {
	server := netip.MustParseAddrPort("192.0.2.1:53")
	m := about("a.test.", dns.TypeA)
	query, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	forge := func(change func(r *dns.Msg)) func(query []byte) []byte {
		return func(query []byte) []byte {
			q := unpack(t, query)
			r := new(dns.Msg).SetReply(q)
			change(r)
			b, err := r.Pack()
			if err != nil {
				t.Error(err)
			}
			return b
		}
	}
	for name, answer := range map[string]func(query []byte) []byte{
		"another ID":         forge(func(r *dns.Msg) { r.Id++ }),
		"another name":       forge(func(r *dns.Msg) { r.Question[0].Name = "b.test." }),
		"another type":       forge(func(r *dns.Msg) { r.Question[0].Qtype = dns.TypeAAAA }),
		"another class":      forge(func(r *dns.Msg) { r.Question[0].Qclass = dns.ClassCHAOS }),
		"another operation":  forge(func(r *dns.Msg) { r.Opcode = dns.OpcodeNotify }),
		"no question":        forge(func(r *dns.Msg) { r.Question = nil }),
		"two questions":      forge(func(r *dns.Msg) { r.Question = append(r.Question, r.Question[0]) }),
		"a query":            forge(func(r *dns.Msg) { r.Response = false }),
		"less than a header": func(query []byte) []byte { return query[:2] },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, err := New(Config{Servers: []netip.AddrPort{server}, Dial: pipeDialer{server: answer}.dial})
				if err != nil {
					t.Fatal(err)
				}
				if r := unpack(t, f.Exchange(t.Context(), "udp", query)); r.Rcode != dns.RcodeServerFailure {
					t.Errorf("believed:\n%v", r)
				}
			})
		})
	}
}

// An answer that a packet does not carry is cut, and whole by TCP.
func TestExchangeLargeAnswers(t *testing.T) {
	s := newNameServer(t)
	f := newForwarder(t, s.addr)
	for _, size := range []uint16{0, 512, MaxUDP, 4096, 65535} {
		m := about("large.test.", dns.TypeTXT)
		if size > 0 {
			m.SetEdns0(size, true)
		}
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		answer := f.Exchange(t.Context(), "udp", b)
		r := unpack(t, answer)
		if !r.Truncated || len(answer) > MaxUDP || r.Id != m.Id || r.Question[0] != m.Question[0] {
			t.Errorf("EDNS %d: an answer of %d bytes:\n%v", size, len(answer), r)
		}
		if opt := r.IsEdns0(); (opt != nil) != (size > 0) || opt != nil && !opt.Do() {
			t.Errorf("EDNS %d: the answer has %v", size, opt)
		}
		if r := ask(t, f, "tcp", m); r.Truncated || len(r.Answer) != 40 {
			t.Errorf("EDNS %d, by TCP: %d records, truncated: %t", size, len(r.Answer), r.Truncated)
		}
	}
}

func TestExchangeManyAtOnce(t *testing.T) {
	s := newNameServer(t)
	f := newForwarder(t, s.addr)
	var all sync.WaitGroup
	for i := range 1000 {
		all.Go(func() {
			name := fmt.Sprintf("n%d.test.", i)
			b, err := about(name, dns.TypeA).Pack()
			if err != nil {
				t.Error(err)
				return
			}
			r := new(dns.Msg)
			if err := r.Unpack(f.Exchange(t.Context(), networks[i%2], b)); err != nil || r.Question[0].Name != name || len(r.Answer) != 1 {
				t.Errorf("%s: %v\n%v", name, err, r)
			}
		})
	}
	all.Wait()
	if diff := cmp.Diff(map[string]uint64{"queries": 1000}, f.Counters()); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
}

func TestExchangeEndsWithItsContext(t *testing.T) {
	f := newForwarder(t, deadServer(t))
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	b, err := about("a.test.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	for _, network := range networks {
		start := time.Now()
		f.Exchange(ctx, network, b)
		if took := time.Since(start); took > patience {
			t.Errorf("%s: ended after %v", network, took)
		}
	}
}

// The log says that nobody answers, and not about which name.
func TestComplains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		server := netip.MustParseAddrPort("192.0.2.1:53")
		f, err := New(Config{Servers: []netip.AddrPort{server}, Log: slog.New(slog.NewTextHandler(&log, nil)),
			Dial: pipeDialer{server: func([]byte) []byte { return nil }}.dial})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			for range 5 {
				ask(t, f, "udp", about("secret.test.", dns.TypeA))
			}
			time.Sleep(complaints)
		}
		if n := strings.Count(log.String(), "no name server answers"); n != 3 || !strings.Contains(log.String(), "192.0.2.1:53") {
			t.Errorf("said %d times:\n%s", n, &log)
		}
		if strings.Contains(log.String(), "secret") {
			t.Errorf("the log tells who asked for what:\n%s", &log)
		}
	})
}
