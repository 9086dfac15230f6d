package dnsforward

import (
	"encoding/binary"
	"errors"

	"github.com/miekg/dns"
)

// MaxUDP is the longest answer over UDP: with its headers it fits a packet of
// 1,280 bytes, which every link carries whole. A longer one is cut, and who asked
// comes again by TCP (RFC 9715, appendix A).
const MaxUDP = 1232

// A message starts with a header (RFC 1035, section 4.1.1).
const (
	headerLen = 12

	atBits  = 2
	atCount = 4 // of questions

	bitResponse  = 1 << 15
	bitTruncated = 1 << 9
	maskOpcode   = 0xf << 11
	maskRcode    = 0xf
)

func bits(b []byte) uint16 { return binary.BigEndian.Uint16(b[atBits:]) }

// A question is what was asked.
type question struct {
	name        string // in lower case
	kind, class uint16
}

var errQuestion = errors.New("not one whole question")

// readQuestion reads the one question of a message (RFC 9619), and returns the
// offset behind it.
func readQuestion(b []byte) (q question, end int, err error) {
	if len(b) < headerLen || binary.BigEndian.Uint16(b[atCount:]) != 1 {
		return q, 0, errQuestion
	}
	name, end, err := dns.UnpackDomainName(b, headerLen)
	if err != nil || len(b) < end+4 {
		return q, 0, errQuestion
	}
	q = question{dns.CanonicalName(name), binary.BigEndian.Uint16(b[end:]), binary.BigEndian.Uint16(b[end+2:])}
	return q, end + 4, nil
}

// isQuery tells what may be answered: two that answer each other's answers never
// stop.
func isQuery(b []byte) bool { return len(b) >= headerLen && bits(b)&bitResponse == 0 }

// judge returns the question of a query that may be passed on. The code of
// another is not RcodeSuccess.
//
// A name server may trust the host's address with more than questions: updates
// and transfers of its zones. Clients do not inherit that.
func judge(query []byte) (q question, code int) {
	if bits(query)&maskOpcode != dns.OpcodeQuery<<11 {
		return q, dns.RcodeNotImplemented
	}
	q, _, err := readQuestion(query)
	switch {
	case err != nil:
		return q, dns.RcodeFormatError
	case q.kind == dns.TypeAXFR || q.kind == dns.TypeIXFR:
		return q, dns.RcodeRefused
	}
	return q, dns.RcodeSuccess
}

// isAnswer reports whether a message answers a query. One about an error may lack
// the question.
func isAnswer(b, query []byte, q question) bool {
	if len(b) < headerLen || b[0] != query[0] || b[1] != query[1] ||
		bits(b)&(bitResponse|maskOpcode) != bitResponse {
		return false
	}
	if binary.BigEndian.Uint16(b[atCount:]) == 0 {
		return bits(b)&maskRcode != dns.RcodeSuccess
	}
	got, _, err := readQuestion(b)
	return err == nil && got == q
}

// isBad reports an answer by which a name server says that it does not know.
// Another may.
func isBad(answer []byte) bool {
	switch int(bits(answer) & maskRcode) {
	case dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented:
		return true
	}
	return false
}

// reply returns an answer of the forwarder's own.
func reply(query []byte, code int) []byte {
	m := new(dns.Msg)
	if err := m.Unpack(query); err == nil && len(m.Question) == 1 {
		r := new(dns.Msg).SetRcode(m, code)
		r.RecursionAvailable = true
		if opt := m.IsEdns0(); opt != nil {
			r.SetEdns0(MaxUDP, opt.Do())
		}
		if b, err := r.Pack(); err == nil {
			return b
		}
	}
	// Of what cannot be read the header is all that an answer needs.
	r := make([]byte, headerLen)
	copy(r, query[:atCount])
	binary.BigEndian.PutUint16(r[atBits:], bits(query)&(maskOpcode|bitDesired)|bitResponse|bitAvailable|uint16(code))
	return r
}

// Of recursion.
const (
	bitDesired   = 1 << 8
	bitAvailable = 1 << 7
)

// truncate cuts an answer that is too long for a datagram down to its question.
// What is left of the records would be of no use: who asked has to come again by
// TCP (RFC 2181, section 9).
func truncate(answer, query []byte) []byte {
	if len(answer) <= MaxUDP {
		return answer
	}
	cut := reply(query, int(bits(answer)&maskRcode))
	binary.BigEndian.PutUint16(cut[atBits:], bits(answer)|bitTruncated)
	return cut
}
