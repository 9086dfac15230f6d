package packet

import "testing"

func TestCheck(t *testing.T) {
	big := make([]byte, 60000)
	tcp := spec{proto: TCP, flags: tcpACK | tcpPSH | tcpFIN, payload: big}
	for name, c := range map[string]struct {
		spec    spec
		segment uint16
		flags   Flags
		want    error
	}{
		"single":                  {spec{proto: TCP}, 0, Partial, nil},
		"TCP":                     {tcp, 536, Partial, nil},
		"UDP":                     {spec{v6: true, proto: UDP, payload: big}, 1400, Partial, nil},
		"one segment":             {tcp, 65000, Verified, nil},
		"segments too small":      {tcp, 535, Partial, errSuperSegment},
		"as many as fit":          {spec{proto: UDP, payload: make([]byte, 65507)}, 536, 0, nil},
		"no payload":              {spec{proto: TCP}, 536, Partial, errSuperSegments},
		"ICMP":                    {spec{proto: ICMP, payload: big}, 1000, 0, errSuperProto},
		"fragment":                {spec{proto: UDP, frag: 0x2000, payload: big}, 1000, 0, errSuperProto},
		"SYN":                     {spec{proto: TCP, flags: tcpSYN, payload: big}, 1000, 0, errSuperHeader},
		"RST":                     {spec{proto: TCP, flags: tcpRST | tcpACK, payload: big}, 1000, 0, errSuperHeader},
		"partial ICMP":            {spec{proto: ICMP, payload: big}, 0, Partial, errPartial},
		"partial fragment":        {spec{proto: UDP, frag: 0x2000}, 0, Partial, errPartial},
		"unknown flags":           {spec{proto: TCP}, 0, 4, errFlags},
		"a very long header":      {spec{v6: true, proto: TCP, ext: destOptions, options: append([]byte{TCP, 27}, make([]byte, 222)...), payload: big}, 1000, 0, errSuperHeader},
		"a long header":           {spec{v6: true, proto: TCP, ext: destOptions, options: append([]byte{TCP, 23}, make([]byte, 190)...), payload: big}, 1000, 0, nil},
		"smallest segments, IPv6": {spec{v6: true, proto: UDP, payload: big}, 536, Partial, nil},
	} {
		p := Packet{Data: c.spec.build(), Segment: c.segment, Flags: c.flags}
		if err := p.Check(parse(t, p.Data)); err != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
