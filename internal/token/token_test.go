package token

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func mustNew(t testing.TB, address string) Token {
	t.Helper()
	tok, err := New(address, [32]byte{1, 2, 3})
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestRoundTrip(t *testing.T) {
	for _, address := range []string{
		"vpn.example.net:443", "192.0.2.1:1", "[2001:db8::1]:65535", "localhost:4433", "a_b.example.:443",
	} {
		tok := mustNew(t, address)
		got, err := Parse(tok.Encode())
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		if got != tok {
			t.Errorf("%s: got %v, want %v", address, got, tok)
		}
	}
	if a, b := mustNew(t, "h:1"), mustNew(t, "h:1"); a.Secret == b.Secret {
		t.Error("two tokens share a secret")
	}
}

// TestFormat pins the text form: a token printed by one version must be read by
// every other.
func TestFormat(t *testing.T) {
	tok := Token{Address: "vpn.example.net:443"}
	for i := range tok.Pin {
		tok.Pin[i] = byte(i)
	}
	for i := range tok.Secret {
		tok.Secret[i] = byte(100 + i)
	}
	const want = "qv1_E3Zwbi5leGFtcGxlLm5ldDo0NDMAAQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eH2RlZmdoaWprbG1ub3BxcnN0dXZ3eHl6e63cri8"
	if got := tok.Encode(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got, want := tok.SecretText(), "ZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7"; got != want {
		t.Errorf("secret: got %s, want %s", got, want)
	}
}

func TestParseIgnoresSpace(t *testing.T) {
	tok := mustNew(t, "vpn.example.net:443")
	s := tok.Encode()
	for _, in := range []string{s + "\n", "  " + s + "\r\n", s[:40] + "\n" + s[40:], s[:3] + " " + s[3:]} {
		if got, err := Parse(in); err != nil || got != tok {
			t.Errorf("Parse(%q): %v, %v", in, got, err)
		}
	}
}

// seal makes a token's text of any body, with a checksum that is right.
func seal(body []byte) string {
	sum := crc32.ChecksumIEEE(body)
	return "qv1_" + base64.RawURLEncoding.EncodeToString(append(bytes.Clone(body), byte(sum>>24), byte(sum>>16), byte(sum>>8), byte(sum)))
}

func withAddress(address string) string {
	return seal(append(append([]byte{byte(len(address))}, address...), make([]byte, 56)...))
}

func TestParseErrors(t *testing.T) {
	good := mustNew(t, "vpn.example.net:443").Encode()
	tests := []struct{ name, in, want string }{
		{"empty", " \n", "is empty"},
		{"no prefix", strings.TrimPrefix(good, "qv1_"), "does not start with qv1_"},
		{"upper-case prefix", "QV1_" + good[4:], "does not start with qv1_"},
		{"newer", "qv2_" + good[4:], "update quicvpn"},
		{"truncated", good[:len(good)-1], "damaged"},
		{"prefix only", "qv1_", "damaged"},
		{"one letter changed", good[:20] + string(good[20]^1) + good[21:], "damaged"},
		{"not base64", good[:20] + "!" + good[21:], "damaged"},
		{"twice", good + "\n" + good, "damaged"},
		{"a whole file", strings.Repeat(good, 9), "too long"},
		{"length byte beyond the end", seal(append([]byte{200}, make([]byte, 80)...)), "damaged"},
		{"no address", withAddress(""), "no valid gateway address"},
		{"no port", withAddress("vpn.example.net"), "no valid gateway address"},
		{"address of control characters", withAddress("a\x1b[31m:443"), "no valid gateway address"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tok, err := Parse(tt.in)
			if err == nil {
				t.Fatalf("parsed: %v", tok)
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %q, want it to contain %q", err, tt.want)
			}
			if rest := strings.TrimPrefix(strings.TrimSpace(tt.in), "qv1_"); len(rest) > 8 && strings.Contains(err.Error(), rest[:8]) {
				t.Errorf("the error repeats the token: %q", err)
			}
		})
	}
}

func TestEveryDamageIsNoticed(t *testing.T) {
	good := mustNew(t, "vpn.example.net:443").Encode()
	for i := range good {
		if _, err := Parse(good[:i]); err == nil {
			t.Errorf("cut at %d: parsed", i)
		}
		for _, c := range []byte("Aa0_-z") {
			bad := good[:i] + string(c) + good[i+1:]
			if _, err := Parse(bad); err == nil && bad != good {
				t.Errorf("%q at %d: parsed", c, i)
			}
		}
	}
}

func TestCheckAddress(t *testing.T) {
	for _, bad := range []string{
		"", "host", "host:", ":443", "host:0", "host:65536", "host:http", "host:+1", "host:0443", "::1:443",
		"[fe80::1%eth0]:443", "0.0.0.0:443", "[::]:443", "224.0.0.1:443", "1.2.3:443", "256.1.1.1:443",
		"-a.example:443", "a..b:443", "ho st:443", "höst:443", strings.Repeat("a", 64) + ":443",
		strings.Repeat("a.", 130) + "b:443", "user@host:443", "host/path:443",
	} {
		if err := CheckAddress(bad); err == nil {
			t.Errorf("%q: accepted", bad)
		}
		if _, err := New(bad, [32]byte{}); err == nil {
			t.Errorf("%q: a token was made", bad)
		}
	}
	longest := strings.TrimSuffix(strings.Repeat(strings.Repeat("a", 49)+".", 5), ".") + ":443"
	if err := CheckAddress(longest); err != nil || len(longest) != 253 {
		t.Errorf("a host of %d characters: %v", len(longest)-4, err)
	}
}

func TestNothingPrintsTheSecret(t *testing.T) {
	tok := mustNew(t, "vpn.example.net:443")
	var out strings.Builder
	for _, v := range []any{tok, &tok, tok.Secret, []Token{tok}, map[string]Token{"a": tok}, struct{ T Token }{tok}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%o", "%b", "%c", "%U"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
			slog.New(h).Info("m", "v", v)
		}
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(b)
	}
	all := out.String()
	s := tok.Secret[:]
	for _, bad := range []string{
		tok.SecretText(), tok.Encode(), base64.StdEncoding.EncodeToString(s), string(s),
		fmt.Sprintf("%x", s), fmt.Sprintf("%X", s), strings.Trim(fmt.Sprint(s), "[]"), fmt.Sprintf("%#x", s[:6]),
		strings.Trim(strings.ReplaceAll(fmt.Sprint(s), " ", ","), "[]"),
	} {
		if strings.Contains(all, bad) {
			t.Errorf("%q was printed", bad)
		}
	}
	if !strings.Contains(all, "vpn.example.net:443") || !strings.Contains(all, redacted) {
		t.Error("the address or the placeholder is missing")
	}
}

func TestParseSecret(t *testing.T) {
	tok := mustNew(t, "h:1")
	got, err := ParseSecret(tok.SecretText())
	if err != nil || got != tok.Secret {
		t.Errorf("got %v, %v", got == tok.Secret, err)
	}
	good := tok.SecretText()
	for _, bad := range []string{"", good[1:], good + "A", good + "\n", " " + good, good[:16] + "\n" + good[16:], strings.Repeat("=", 32)} {
		if _, err := ParseSecret(bad); err == nil {
			t.Errorf("%q: accepted", bad)
		} else if strings.Contains(err.Error(), good[4:12]) {
			t.Errorf("the error repeats the secret: %v", err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(mustNew(f, "vpn.example.net:443").Encode())
	f.Add(mustNew(f, "[2001:db8::1]:1").Encode() + "\n")
	f.Add(withAddress("h:1"))
	f.Add(withAddress(""))
	f.Add("qv1_")
	f.Add("qv9_AAAA")
	f.Fuzz(func(t *testing.T, s string) {
		tok, err := Parse(s)
		if err != nil {
			if tok != (Token{}) {
				t.Fatal("an error with a token")
			}
			return
		}
		if err := CheckAddress(tok.Address); err != nil {
			t.Fatal(err)
		}
		if got := tok.Encode(); got != strings.Join(strings.Fields(s), "") {
			t.Fatalf("%q parses and encodes as %q", s, got)
		}
		again, err := Parse(tok.Encode())
		if diff := cmp.Diff([]any{again, err == nil}, []any{tok, true}); diff != "" {
			t.Fatal(diff)
		}
	})
}
