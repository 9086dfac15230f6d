package socks5

import (
	"strings"
	"testing"
)

func TestParseCredentials(t *testing.T) {
	long := strings.Repeat("x", 255)
	for _, tt := range []struct {
		text, user, password string
		passes               bool
	}{
		{"a:b", "a", "b", true},
		{"a:b\n", "a", "b", true},
		{"\r\n\na:b\r\nc:d\r\n", "c", "d", true},
		{"a:b\nc:d", "a", "b", true},
		{"a:b\nc:d", "a", "d", false},
		{"a:b\nc:d", "", "", false},
		{"a:b:c", "a", "b:c", true},
		{"a:b:c", "a:b", "c", false},
		{"#a: b ", "#a", " b ", true},
		{long + ":" + long, long, long, true},
	} {
		authenticate, err := ParseCredentials(tt.text)
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
		} else if got := authenticate(tt.user, tt.password); got != tt.passes {
			t.Errorf("%q: %s with %s passes: %t", tt.text, tt.user, tt.password, got)
		}
	}
	for text, want := range map[string]string{
		"":                       "there is no user",
		"\n\r\n":                 "there is no user",
		"secret":                 "line 1 is not USER:PASSWORD",
		"a:b\n\nsecret:":         "line 3 is not USER:PASSWORD",
		":secret":                "line 1 is not USER:PASSWORD",
		"secret:" + long + "x":   "line 1: SOCKS5 carries",
		long + "x:secret\na:b":   "line 1: SOCKS5 carries",
		"a:b\r\nsecret\r\nc:d\n": "line 2 is not USER:PASSWORD",
	} {
		_, err := ParseCredentials(text)
		if err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParseCredentials(f *testing.F) {
	f.Add("a:b\nc:d\r\n\n", "c", "d")
	f.Add("a:b:c", "a", "b:c")
	f.Fuzz(func(t *testing.T, text, user, password string) {
		authenticate, err := ParseCredentials(text)
		if err != nil {
			return
		}
		known := false
		for line := range strings.SplitSeq(text, "\n") {
			u, p, _ := strings.Cut(strings.TrimSuffix(line, "\r"), ":")
			known = known || u != "" && u == user && p == password
		}
		if got := authenticate(user, password); got != known {
			t.Fatalf("%q: %q with %q passes: %t, want %t", text, user, password, got, known)
		}
	})
}
