package dnsforward

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

func TestServeStream(t *testing.T) {
	s := newNameServer(t)
	f := newForwarder(t, s.addr)
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.ServeStream(t.Context(), theirs)
		theirs.Close()
	}()
	// More than one query before an answer, in pieces.
	names := []string{"one.test.", "two.test.", "large.test."}
	go func() {
		var b []byte
		for _, name := range names {
			m, err := about(name, dns.TypeTXT).Pack()
			if err != nil {
				t.Error(err)
			}
			b = append(binary.BigEndian.AppendUint16(b, uint16(len(m))), m...)
		}
		for _, c := range b {
			if _, err := ours.Write([]byte{c}); err != nil {
				t.Error(err)
			}
		}
	}()
	for _, name := range names {
		b, err := readMessage(ours)
		if err != nil {
			t.Fatal(err)
		}
		if r := unpack(t, b); r.Question[0].Name != name || len(r.Answer) == 0 {
			t.Errorf("the answer is\n%v\nwant one about %s", r, name)
		}
	}
	ours.Close()
	<-done
}

// Who brings no query, or takes no answer, does not keep a connection.
func TestServeStreamEnds(t *testing.T) {
	query, err := about("a.test.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	frame := append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	server := netip.MustParseAddrPort("192.0.2.1:53")
	for name, tt := range map[string]struct {
		send  []byte
		reads bool
		after time.Duration
	}{
		"nothing":            {nil, true, idle},
		"half a query":       {frame[:7], true, idle},
		"a query":            {frame, true, idle},
		"an answer not read": {frame, false, idle},
		"no query":           {[]byte{0, 3, 1, 2, 3}, true, 0},
		"an empty one":       {[]byte{0, 0}, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				answer := func(frame []byte) []byte {
					r := reply(frame[2:], dns.RcodeSuccess)
					return append(binary.BigEndian.AppendUint16(nil, uint16(len(r))), r...)
				}
				f, err := New(Config{Servers: []netip.AddrPort{server}, Dial: pipeDialer{server: answer}.dial})
				if err != nil {
					t.Fatal(err)
				}
				ours, theirs := net.Pipe()
				go func() {
					if _, err := ours.Write(tt.send); err != nil {
						t.Error(err)
					}
					if tt.reads {
						_, _ = io.Copy(io.Discard, ours) // until it is closed
					}
				}()
				start := time.Now()
				f.ServeStream(t.Context(), theirs)
				if took := time.Since(start); took != tt.after {
					t.Errorf("ended after %v, want %v", took, tt.after)
				}
				theirs.Close()
				ours.Close()
			})
		})
	}
}
