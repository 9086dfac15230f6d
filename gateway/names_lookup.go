package gateway

import (
	"context"
	"net"
	"net/netip"

	"github.com/miekg/dns"
)

// lookup resolves a name for the gateway's own dials, by the name servers that answer
// clients; files of the gateway's host and its search list have no say.
func (n *names) lookup(ctx context.Context, host string) (six, four []netip.Addr, err error) {
	type answer struct {
		addrs []netip.Addr
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		addrs, err := n.ask(ctx, host, dns.TypeAAAA)
		answers <- answer{addrs, err}
	}()
	four, err = n.ask(ctx, host, dns.TypeA)
	a := <-answers
	six = a.addrs
	switch {
	case len(six)+len(four) > 0:
		return six, four, nil
	case err == nil:
		err = a.err
	}
	if err == nil {
		err = &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	return nil, nil, err
}

// ask returns a name's addresses of one type, none where it has none.
func (n *names) ask(ctx context.Context, host string, kind uint16) (addrs []netip.Addr, err error) {
	if !n.begin() {
		return nil, net.ErrClosed
	}
	defer n.running.Done()
	m := new(dns.Msg).SetQuestion(dns.Fqdn(host), kind)
	m.SetEdns0(1232, false)
	query, err := m.Pack()
	if err != nil {
		return nil, &net.DNSError{Err: "not a name", Name: host, IsNotFound: true}
	}
	for _, network := range []string{"udp", "tcp"} {
		reply := new(dns.Msg)
		if b := n.forwarder.Exchange(ctx, network, query); b == nil || reply.Unpack(b) != nil {
			return nil, &net.DNSError{Err: "no answer that can be read", Name: host}
		}
		switch {
		case reply.Truncated && network == "udp":
			continue
		case reply.Rcode == dns.RcodeNameError:
			return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		case reply.Rcode != dns.RcodeSuccess:
			return nil, &net.DNSError{Err: dns.RcodeToString[reply.Rcode], Name: host, IsTemporary: true}
		}
		for _, rr := range reply.Answer { // of the name, or of what it is an alias for
			switch rr := rr.(type) {
			case *dns.A:
				addrs = appendAddr(addrs, rr.A)
			case *dns.AAAA:
				addrs = appendAddr(addrs, rr.AAAA)
			}
		}
		break
	}
	return addrs, nil
}

func appendAddr(addrs []netip.Addr, ip net.IP) []netip.Addr {
	if a, ok := netip.AddrFromSlice(ip); ok {
		return append(addrs, a.Unmap())
	}
	return addrs
}
