package gateway

import (
	"net/netip"
	"strings"
	"testing"
)

func prefixes(s string) []netip.Prefix {
	var out []netip.Prefix
	for f := range strings.FieldsSeq(s) {
		out = append(out, netip.MustParsePrefix(f))
	}
	return out
}

func TestPolicy(t *testing.T) {
	const (
		public = "1.1.1.1 8.8.8.8 192.0.2.1 198.51.100.7 203.0.113.200 100.63.255.255 100.128.0.0 172.15.255.255 " +
			"172.32.0.0 11.0.0.0 9.255.255.255 128.0.0.1 223.255.255.255 192.167.255.255 192.169.0.0 198.17.255.255 " +
			"198.20.0.0 126.255.255.255 169.253.255.255 169.255.0.0 1.0.0.0 192.0.1.0 " +
			"2606:4700::1111 2001:db8::1 2001:1::1 2003::1 3fff::1 2000::"
		private4 = "10.0.0.0 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 192.168.255.255 " +
			"100.64.0.0 100.127.255.255 192.0.0.8 198.18.0.1 198.19.255.255"
		private6 = "fc00::1 fd00::1 fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff fd00:ec2::253"
		never    = "0.0.0.0 0.1.2.3 127.0.0.1 127.255.255.255 169.254.0.1 169.254.169.254 169.254.170.2 192.88.99.1 " +
			"224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 100.100.100.200 168.63.129.16 192.0.0.192 " +
			":: ::1 ::127.0.0.1 ::10.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 64:ff9b::a00:1 64:ff9b::808:808 " +
			"64:ff9b:1::a00:1 64:ff9b:1:ffff::1 100::1 2002:a00:1:: 2002:808:808::1 2001::1 2001:0:808:808::1 " +
			"fe80::1 febf::1 fec0::1 feff::1 ff02::1 ff0e::1 fd00:ec2::254 fd00:ec2::23 fd20:ce::254 " +
			"1fff::1 4000::1 5f00::1 8000::1 c000::1 e000::1 f000::1 f800::1 fbff::1 fe00::1"
	)
	tests := []struct {
		name, allow  string
		open, closed string
	}{
		{name: "no list", open: public, closed: private4 + " " + private6 + " " + never},
		{
			name:   "everything does not open private space",
			allow:  "0.0.0.0/0 ::/0",
			open:   public,
			closed: private4 + " " + private6 + " " + never,
		},
		{
			name:   "IPv4 only",
			allow:  "0.0.0.0/0",
			open:   "1.1.1.1 192.0.2.1",
			closed: "2606:4700::1111 2001:db8::1 " + private4 + " " + private6 + " " + never,
		},
		{
			name:   "one public prefix",
			allow:  "203.0.113.0/24",
			open:   "203.0.113.0 203.0.113.255",
			closed: "203.0.112.255 203.0.114.0 1.1.1.1 2001:db8::1 " + private4 + " " + private6 + " " + never,
		},
		{
			name:   "a private prefix opens itself",
			allow:  "10.1.0.0/16",
			open:   "10.1.0.0 10.1.255.255",
			closed: "10.0.255.255 10.2.0.0 1.1.1.1 172.16.0.1 " + private6 + " " + never,
		},
		{
			name:   "beside a wide prefix it still does",
			allow:  "0.0.0.0/0 10.1.0.0/16 ::/0 fd12::/16",
			open:   "10.1.2.3 fd12::1 " + public,
			closed: "10.2.0.0 fd13::1 " + never,
		},
		{
			name:   "a prefix that reaches out of private space opens its public part only",
			allow:  "8.0.0.0/6 fc00::/6",
			open:   "8.8.8.8 11.0.0.1 9.255.255.255",
			closed: private4 + " " + private6 + " " + never,
		},
		{
			name:   "all of private space, and still no metadata service",
			allow:  "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 192.0.0.0/24 198.18.0.0/15 fc00::/7",
			open:   private4 + " " + private6,
			closed: public + " " + never,
		},
		{
			name:   "by its exact name neither",
			allow:  "127.0.0.1/32 169.254.169.254/32 100.100.100.200/32 192.0.0.192/32 ::1/128 fe80::/10 ff00::/8 fd00:ec2::254/128 ::ffff:0:0/96 64:ff9b::/96 2002::/16 2001::/32 224.0.0.0/4 0.0.0.0/8 240.0.0.0/4 168.63.129.16/32 fec0::/10 ::/96",
			closed: public + " " + private4 + " " + private6 + " " + never,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := newPolicy(prefixes(tt.allow))
			if err != nil {
				t.Fatal(err)
			}
			for want, list := range map[bool]string{true: tt.open, false: tt.closed} {
				for s := range strings.FieldsSeq(list) {
					ip := netip.MustParseAddr(s)
					if got := p.allows(ip); got != want {
						t.Errorf("allows(%v) = %v, want %v", ip, got, want)
					}
				}
			}
		})
	}
}

func TestPolicyRefusesNonsense(t *testing.T) {
	if _, err := newPolicy([]netip.Prefix{{}}); err == nil {
		t.Error("an invalid prefix was taken")
	}
}

func TestPolicyDoesNotAllocate(t *testing.T) {
	p, err := newPolicy(prefixes("0.0.0.0/0 10.1.0.0/16 ::/0"))
	if err != nil {
		t.Fatal(err)
	}
	dst := []netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("2001:db8::9"), netip.MustParseAddr("10.2.0.1")}
	if n := testing.AllocsPerRun(100, func() {
		for _, ip := range dst {
			p.allows(ip)
		}
	}); n != 0 {
		t.Errorf("%v allocations a lookup", n)
	}
}
