package settings

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// anyOf turns the parsers into one type.
func anyOf[T any](parse func(string) (T, error)) func(string) (any, error) {
	return func(s string) (any, error) { return parse(s) }
}

func TestParsers(t *testing.T) {
	tests := []struct {
		name  string
		parse func(string) (any, error)
		good  map[string]any
		bad   []string
	}{
		{"String", anyOf(String), map[string]any{"a b": "a b"}, []string{"", "a\nb", "a\x00"}},
		{"Interface", anyOf(Interface), map[string]any{"quicvpn0": "quicvpn0", "123456789012345": "123456789012345"},
			[]string{"", "1234567890123456", "a/b", "a b", "..", "tun%d", "a:1", "a\"b", "a\\b", "lo"}},
		{"Int", anyOf(Int(1280, 1500)), map[string]any{"1280": 1280, "1500": 1500, "0": 0},
			[]string{"", "1279", "1501", "-1280", "1280.5", "1280x", "99999999999999999999"}},
		{"Duration", anyOf(Duration), map[string]any{"24h": 24 * time.Hour, "0": time.Duration(0)}, []string{"", "24", "1d", "-1h"}},
		{"OneOf", anyOf(OneOf("on", "off")), map[string]any{"on": "on", "off": "off"}, []string{"", "ON", "onoff"}},
		{"Prefix", anyOf(Prefix), map[string]any{
			"10.0.0.0/8":    netip.MustParsePrefix("10.0.0.0/8"),
			"2001:db8::/32": netip.MustParsePrefix("2001:db8::/32"),
		}, []string{"", "10.0.0.0", "10.0.0.1/8", "10.0.0.0/33", "fe80::%eth0/64"}},
		{"PrefixOf(4)", anyOf(PrefixOf(4, 8, 30)), map[string]any{
			"10.0.0.0/8":   netip.MustParsePrefix("10.0.0.0/8"),
			"10.91.0.4/30": netip.MustParsePrefix("10.91.0.4/30"),
		}, []string{"", "10.0.0.0/7", "10.91.0.0/31", "2001:db8::/30", "10.0.0.1/8"}},
		{"PrefixOf(6)", anyOf(PrefixOf(6, 16, 126)), map[string]any{
			"fd00::/16": netip.MustParsePrefix("fd00::/16"), "fd00::4/126": netip.MustParsePrefix("fd00::4/126"),
		}, []string{"fc00::/15", "fd00::/127", "10.0.0.0/16"}},
		{"ListenAddr", anyOf(ListenAddr), map[string]any{
			":443":        netip.MustParseAddrPort("[::]:443"),
			"0.0.0.0:443": netip.MustParseAddrPort("0.0.0.0:443"),
		}, []string{"", "8443", "[::1]", "[::1]:0", "localhost:443", "[::]:65536"}},
		{"NameServer", anyOf(NameServer), map[string]any{
			"192.0.2.1":           netip.MustParseAddrPort("192.0.2.1:53"),
			"192.0.2.1:5353":      netip.MustParseAddrPort("192.0.2.1:5353"),
			"2001:db8::1":         netip.MustParseAddrPort("[2001:db8::1]:53"),
			"[2001:db8::1]:5353":  netip.MustParseAddrPort("[2001:db8::1]:5353"),
			"fe80::1%eth0":        netip.MustParseAddrPort("[fe80::1%eth0]:53"),
			"[fe80::1%eth0]:5353": netip.MustParseAddrPort("[fe80::1%eth0]:5353"),
		}, []string{"", "53", "192.0.2.1:0", "[2001:db8::7]", "0.0.0.0", "[::]:53", "224.0.0.1", "dns.example.com", "on"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for in, want := range tt.good {
				got, err := tt.parse(in)
				if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{}, netip.AddrPort{})); err != nil || diff != "" {
					t.Errorf("%q: error %v, -want +got:\n%s", in, err, diff)
				}
			}
			for _, in := range tt.bad {
				got, err := tt.parse(in)
				if err == nil {
					t.Errorf("%q: parsed as %v, want an error", in, got)
				} else if len(in) > 2 && strings.Contains(err.Error(), in) {
					t.Errorf("%q: the error repeats the value: %v", in, err)
				}
			}
		})
	}
}

func TestVar(t *testing.T) {
	n := 7
	v := Var(&n, "by CPUs", Int(1, 9))
	if v.String() != "by CPUs" {
		t.Errorf("String() = %q before Set", v.String())
	}
	if err := v.Set("x"); err == nil || n != 7 || v.String() != "by CPUs" {
		t.Errorf("a bad value: error %v, n %d, String() %q", err, n, v.String())
	}
	if err := v.Set("8"); err != nil || n != 8 || v.String() != "8" {
		t.Errorf("a good value: error %v, n %d, String() %q", err, n, v.String())
	}
}

func TestAppend(t *testing.T) {
	var list []int
	v := Append(&list, Int(1, 9))
	for _, s := range []string{"1", "2, 3"} {
		if err := v.Set(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := v.Set("4,,5"); err == nil {
		t.Error("an empty item is no error")
	}
	if got := fmt.Sprint(list); got != "[1 2 3]" {
		t.Errorf("got %s", got)
	}
}

// FuzzParsers holds what is accepted to what its users rely on.
func FuzzParsers(f *testing.F) {
	for _, s := range []string{"", "10.0.0.0/8", "fd00::/64", ":443", "[::]:443", "quicvpn0", "24h", "1280", "a\nb"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if p, err := Prefix(s); err == nil && (p != p.Masked() || p.Addr().Zone() != "") {
			t.Errorf("Prefix(%q) = %v", s, p)
		}
		if a, err := ListenAddr(s); err == nil && (!a.IsValid() || a.Port() == 0) {
			t.Errorf("ListenAddr(%q) = %v", s, a)
		}
		if a, err := NameServer(s); err == nil && (!a.IsValid() || a.Port() == 0) {
			t.Errorf("NameServer(%q) = %v", s, a)
		}
		if name, err := Interface(s); err == nil && (len(name) < 1 || len(name) > 15 || strings.ContainsAny(name, "/ \n")) {
			t.Errorf("Interface(%q) = %q", s, name)
		}
		if text, err := String(s); err == nil && (text == "" || strings.Contains(text, "\n")) {
			t.Errorf("String(%q) = %q", s, text)
		}
		if d, err := Duration(s); err == nil && d < 0 {
			t.Errorf("Duration(%q) = %v", s, d)
		}
	})
}
