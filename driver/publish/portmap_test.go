package publish

import (
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParsePortMap(t *testing.T) {
	for _, tt := range []struct {
		name, raw string
		want      []Port
	}{
		{"none", ``, nil},
		{"null", `null`, nil},
		{"empty", `[]`, nil},
		{"-p 8080:80", `[{"Proto":6,"IP":"","Port":80,"HostIP":"","HostPort":8080,"HostPortEnd":8080}]`,
			[]Port{web}},
		{"-p 127.0.0.1:53:53/udp", `[{"Proto":17,"IP":"","Port":53,"HostIP":"127.0.0.1","HostPort":53,"HostPortEnd":53}]`,
			[]Port{{Protocol: "udp", HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 53, ContainerPort: 53}}},
		{"-p [::1]:80:80", `[{"Proto":6,"IP":"","Port":80,"HostIP":"::1","HostPort":80,"HostPortEnd":80}]`,
			[]Port{{Protocol: "tcp", HostIP: netip.IPv6Loopback(), HostPort: 80, ContainerPort: 80}}},
		{"-p 8000-8010:80", `[{"Proto":6,"IP":"","Port":80,"HostIP":"","HostPort":8000,"HostPortEnd":8010}]`,
			[]Port{{Protocol: "tcp", HostPort: 8000, HostPortEnd: 8010, ContainerPort: 80}}},
		{"-p 80, -p 81", `[{"Proto":6,"IP":"","Port":80,"HostIP":"","HostPort":0,"HostPortEnd":0},{"Proto":6,"Port":81}]`,
			[]Port{{Protocol: "tcp", ContainerPort: 80}, {Protocol: "tcp", ContainerPort: 81}}},
		{"fields of another version", `[{"Proto":6,"Port":80,"HostPort":8080,"Else":{"x":1}}]`,
			[]Port{web}},
	} {
		got, err := ParsePortMap(json.RawMessage(tt.raw))
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got, byValue); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestParsePortMapRefuses(t *testing.T) {
	for _, tt := range []struct{ raw, want string }{
		{`{}`, "read Docker's port map: json: cannot unmarshal object into Go value of type []publish.binding"},
		{`[{"Port":70000}]`, "read Docker's port map: json: cannot unmarshal number 70000 into Go struct field binding.Port of type uint16"},
		{`[{"Proto":132,"Port":80,"HostPort":80,"HostPortEnd":80}]`, "publish 80->80/sctp: quicvpn publishes tcp and udp ports, not sctp"},
		{`[{"Proto":1,"Port":80}]`, "publish 0->80/IP protocol 1: the protocol must be tcp or udp"},
		{`[{"Proto":6,"HostPort":80}]`, "publish 80->0/tcp: the container's port must not be 0"},
		{`[{"Proto":6,"Port":80,"HostPort":9,"HostPortEnd":8}]`, "publish 9->80/tcp: the host's ports 9-8 are no range"},
		{`[{"Proto":6,"Port":80,"HostIP":"localhost","HostPort":9}]`, `publish 9->80/tcp: the host's address "localhost" is no IP address`},
	} {
		got, err := ParsePortMap(json.RawMessage(tt.raw))
		if err == nil || err.Error() != tt.want {
			t.Errorf("%s: got %v and %q, want %q", tt.raw, got, err, tt.want)
		}
	}
}

// Whatever the map says, what is taken from it can be published, and says the same
// in Docker's form.
func FuzzParsePortMap(f *testing.F) {
	for _, seed := range []string{
		``, `null`, `[]`, `[null]`,
		`[{"Proto":6,"IP":"","Port":80,"HostIP":"","HostPort":8080,"HostPortEnd":8080}]`,
		`[{"Proto":17,"IP":"10.0.0.1","Port":53,"HostIP":"::ffff:127.0.0.1","HostPort":8000,"HostPortEnd":8010}]`,
		`[{"Proto":6,"Port":80,"HostIP":"fe80::1%eth0"},{"Proto":132,"Port":1}]`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		ports, err := ParsePortMap(raw)
		if err != nil {
			if ports != nil {
				t.Fatalf("an error and ports: %v, %v", ports, err)
			}
			return
		}
		var bindings []binding
		for _, p := range ports {
			if err := p.validate(); err != nil {
				t.Fatal(err)
			}
			b := binding{Proto: 6, Port: p.ContainerPort, HostPort: p.HostPort, HostPortEnd: p.last()}
			if p.Protocol == "udp" {
				b.Proto = 17
			}
			if p.HostIP.IsValid() {
				b.HostIP = p.HostIP.String()
			}
			bindings = append(bindings, b)
		}
		again, err := json.Marshal(bindings)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ParsePortMap(again)
		if diff := cmp.Diff(ports, got, byValue); err != nil || diff != "" {
			t.Fatalf("%s (-first +second): %v\n%s", again, err, diff)
		}
	})
}
