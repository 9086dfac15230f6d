package driver

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/driver/publish"
	"github.com/quicvpn/quicvpn/internal/token"
)

func newToken(t *testing.T) string {
	t.Helper()
	tok, err := token.New("192.0.2.1:443", [32]byte{1})
	if err != nil {
		t.Fatal(err)
	}
	return tok.Encode()
}

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func generic(t *testing.T, options map[string]string) map[string]json.RawMessage {
	t.Helper()
	b, err := json.Marshal(options)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]json.RawMessage{optionGeneric: b}
}

func TestNetworkOptions(t *testing.T) {
	dir := t.TempDir()
	tok, other := newToken(t), newToken(t)
	file := write(t, filepath.Join(dir, "token"), tok+"\n")
	o, err := networkOptionsOf(generic(t, map[string]string{
		"token-file": file, "mtu": "1400", "queues": "3", "dns": "host", "wait": "2s",
	}), write(t, filepath.Join(dir, "other"), other))
	if err != nil {
		t.Fatal(err)
	}
	if o.tokenText != tok || o.mtu != 1400 || o.queues != 3 || !o.hostDNS || o.wait != 2*time.Second || o.shown {
		t.Errorf("options %+v", o)
	}
	o, err = networkOptionsOf(nil, file)
	if err != nil || o.tokenText != tok || o.wait != createWait || o.hostDNS {
		t.Errorf("by default %+v, %v", o, err)
	}
	o, err = networkOptionsOf(generic(t, map[string]string{"token": tok}), "")
	if err != nil || o.tokenText != tok || !o.shown {
		t.Errorf("with -o token %+v, %v", o, err)
	}
	o, err = networkOptionsOf(map[string]json.RawMessage{optionInternal: json.RawMessage("true")}, "")
	if err != nil || o.isSet() {
		t.Errorf("of an internal network %+v, %v", o, err)
	}
}

func TestNetworkOptionsRefused(t *testing.T) {
	dir := t.TempDir()
	tok := newToken(t)
	file := write(t, filepath.Join(dir, "token"), tok)
	secret := write(t, filepath.Join(dir, "shadow"), "root:$6$very-secret\n")
	empty := write(t, filepath.Join(dir, "empty"), "")
	tests := []struct {
		options     map[string]string
		defaultFile string
		want        string
	}{
		{nil, "", "no join token: give -o token-file=PATH"},
		{nil, filepath.Join(dir, "missing"), "the driver's --token-file: open"},
		{map[string]string{"token-file": filepath.Join(dir, "missing")}, "", "no such file"},
		{map[string]string{"token-file": ""}, "", "give the absolute path"},
		{map[string]string{"token-file": "token"}, "", "give the absolute path"},
		{map[string]string{"token-file": empty}, "", "is empty: make another token"},
		{map[string]string{"token-file": secret}, "", "join token"},
		{map[string]string{"token-file": dir}, "", "is a directory: give the absolute path"},
		{map[string]string{"token": "qv1_nonsense"}, "", "option token:"},
		{map[string]string{"token": tok, "token-file": file}, "", "give either token-file or token"},
		{map[string]string{"mtu": "900"}, file, "option mtu: must be a whole number from 1280 to 1500"},
		{map[string]string{"mtu": "9000"}, file, "option mtu: must be a whole number from 1280 to 1500"},
		{map[string]string{"queues": "257"}, file, "option queues: must be a whole number from 1 to 256"},
		{map[string]string{"wait": "soon"}, file, "option wait: not a time span"},
		{map[string]string{"dns": "no"}, file, "option dns: must be one of tunnel, host, off"},
		{map[string]string{"socks5": "yes"}, file, "option socks5: must be one of on, off"},
		{map[string]string{"tcp": "stream"}, file, "option tcp: must be one of auto, packet, flow"},
		{map[string]string{"parent": "eth0"}, file, `unknown option "parent": there are dns, mtu, queues, socks5, tcp, token, token-file, wait`},
	}
	for _, tt := range tests {
		_, err := networkOptionsOf(generic(t, tt.options), tt.defaultFile)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v with the default %q: error %v, want %q", tt.options, tt.defaultFile, err, tt.want)
		}
		if err != nil && (strings.Contains(err.Error(), "very-secret") || strings.Contains(err.Error(), tok) || strings.Contains(err.Error(), "nonsense")) {
			t.Errorf("%v: the error %q repeats what it was given", tt.options, err)
		}
	}
}

func TestExitOptions(t *testing.T) {
	tok := newToken(t)
	q := func(s string) json.RawMessage { b, _ := json.Marshal(s); return b }
	o, err := exitOptionsOf(map[string]json.RawMessage{
		"token": q(tok), publish.PortMapOption: json.RawMessage("[]"), "com.docker.network.endpoint.exposedports": json.RawMessage("[]"),
	})
	if err != nil || o.tokenText != tok {
		t.Errorf("%+v, %v", o, err)
	}
	if o, err = exitOptionsOf(map[string]json.RawMessage{publish.PortMapOption: json.RawMessage("[]")}); err != nil || o.isSet() {
		t.Errorf("without any: %+v, %v", o, err)
	}
	if _, err = exitOptionsOf(map[string]json.RawMessage{"mtu": q("1400")}); err == nil || !strings.Contains(err.Error(), "there are token, token-file") {
		t.Errorf("an unknown one: %v", err)
	}
}
