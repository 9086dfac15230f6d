package dnsforward

import (
	"bytes"
	"testing"

	"github.com/miekg/dns"
)

// FuzzMessages holds what is made of any bytes, from a client or from a name
// server, to what both rely on.
func FuzzMessages(f *testing.F) {
	for _, m := range []*dns.Msg{about("a.test.", dns.TypeA), new(dns.Msg).SetReply(about("a.test.", dns.TypeA)), new(dns.Msg).SetAxfr("test.")} {
		m.SetEdns0(4096, true)
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, b, uint16(2000))
	}
	f.Add([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01"), []byte{}, uint16(0))
	f.Fuzz(func(t *testing.T, query, answer []byte, pad uint16) {
		if !isQuery(query) {
			return
		}
		q, code := judge(query)
		r := reply(query, code)
		if len(r) < headerLen || !bytes.Equal(r[:2], query[:2]) || bits(r)&bitResponse == 0 || int(bits(r)&maskRcode) != code&maskRcode {
			t.Errorf("% x is answered with % x", query, r)
		}
		if code == dns.RcodeSuccess && bits(r)&maskRcode == 0 && !isAnswer(r, query, q) && !bytes.Equal(r[atCount:headerLen], make([]byte, headerLen-atCount)) {
			t.Errorf("% x is no answer to % x", r, query)
		}
		isAnswer(answer, query, q)
		answer = append(answer, make([]byte, pad)...)
		if len(answer) < headerLen {
			return
		}
		isBad(answer)
		was := bytes.Clone(answer)
		cut := truncate(answer, query)
		switch {
		case len(was) <= MaxUDP && !bytes.Equal(cut, was):
			t.Errorf("% x was cut to % x", was, cut)
		case len(was) > MaxUDP && (len(cut) > MaxUDP || len(cut) < headerLen || !bytes.Equal(cut[:2], query[:2]) || bits(cut)&bitTruncated == 0):
			t.Errorf("% x was cut to % x", was, cut)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add("nameserver 192.0.2.1\n# nameserver\nnameserver fe80::1%eth0")
	f.Fuzz(func(t *testing.T, conf string) {
		for _, s := range parse(conf) {
			if err := check(s); err != nil {
				t.Error(err)
			}
		}
	})
}
