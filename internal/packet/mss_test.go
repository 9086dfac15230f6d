package packet

import (
	"encoding/binary"
	"net/netip"
	"testing"
)

func TestClampMSS(t *testing.T) {
	for name, test := range map[string]struct {
		v6      bool
		flags   byte
		options []byte
		mtu     int
		want    uint16
	}{
		"lowered":         {flags: 0x02, options: []byte{2, 4, 5, 180}, mtu: 1400, want: 1360},
		"lowered in v6":   {v6: true, flags: 0x12, options: []byte{2, 4, 5, 160}, mtu: 1400, want: 1340},
		"at an odd place": {flags: 0x02, options: []byte{1, 2, 4, 5, 180, 1, 1, 0}, mtu: 1300, want: 1260},
		"behind others":   {flags: 0x02, options: []byte{3, 3, 7, 1, 4, 2, 2, 4, 5, 180, 0, 0}, mtu: 1300, want: 1260},
		"low already":     {flags: 0x02, options: []byte{2, 4, 2, 24}, mtu: 1400, want: 536},
		"no SYN":          {flags: 0x10, options: []byte{2, 4, 5, 180}, mtu: 1400, want: 1460},
		"cut option":      {flags: 0x02, options: []byte{1, 1, 1, 2}, mtu: 1400},
		"length of zero":  {flags: 0x02, options: []byte{9, 0, 2, 4, 5, 180, 1, 1}, mtu: 1400},
	} {
		for _, partial := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				n := 20
				if test.v6 {
					n = 40
				}
				b := make([]byte, n+20+len(test.options))
				if test.v6 {
					b[0], b[6], b[7] = 0x60, TCP, 64
					binary.BigEndian.PutUint16(b[4:], uint16(len(b)-n))
					copy(b[8:], netip.MustParseAddr("2001:db8::1").AsSlice())
				} else {
					b[0], b[8], b[9] = 0x45, 64, TCP
					binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
					copy(b[12:], []byte{192, 0, 2, 1})
				}
				b[n+12], b[n+13] = byte(5+len(test.options)/4)<<4, test.flags
				copy(b[n+20:], test.options)
				h, err := Parse(b)
				if err != nil {
					t.Fatal(err)
				}
				p := &Packet{Data: b}
				p.SetPartial(h)
				if !partial {
					p.CompleteChecksum(h)
				}
				ClampMSS(p, h, test.mtu)
				p.CompleteChecksum(h)
				if got := checksum(b, h); got != 0 {
					t.Errorf("the checksum is off by %#x", got)
				}
				if test.want == 0 {
					return
				}
				for o := n + 20; o < len(b)-3; o++ {
					if b[o] == 2 && b[o+1] == 4 {
						if got := binary.BigEndian.Uint16(b[o+2:]); got != test.want {
							t.Errorf("MSS = %d, want %d", got, test.want)
						}
						return
					}
				}
				t.Error("the option is gone")
			})
		}
	}
}

// checksum sums a TCP packet with its pseudo-header; it is zero if all is well.
func checksum(b []byte, h Header) uint16 {
	sum := uint32(TCP) + uint32(len(b)-h.IPLen)
	add := func(b []byte) {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	add(h.Src.AsSlice())
	add(h.Dst.AsSlice())
	add(b[h.IPLen:])
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
