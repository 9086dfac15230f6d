package tunnel

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"
)

var compareNetip = cmp.Options{
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmpopts.EquateEmpty(),
}

// unhex takes hexadecimal digits with spaces between them.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func ipRange(start, end string, protocol uint8) ipRoute {
	return ipRoute{Start: netip.MustParseAddr(start), End: netip.MustParseAddr(end), Protocol: protocol}
}

func address(id uint64, prefix string) assignedAddress {
	return assignedAddress{RequestID: id, Prefix: netip.MustParsePrefix(prefix)}
}

func TestCapsuleBytes(t *testing.T) {
	for _, tc := range []struct {
		name, wire string
		want       capsule
	}{
		// The first three are the exchange of RFC 9484, section 8.1.
		{"any IPv4 address wanted", "02 07 01 04 00000000 20", addressRequest{address(1, "0.0.0.0/32")}},
		{"IPv4 address given", "01 07 01 04 c000020b 20", addressAssign{address(1, "192.0.2.11/32")}},
		{"all of IPv4", "03 0a 04 00000000 ffffffff 00", routeAdvertisement{ipRange("0.0.0.0", "255.255.255.255", 0)}},
		{"both versions, unasked", "01 1a 00 04 0a580000 10 00 06 20010db8000000000000000000000000 40",
			addressAssign{address(0, "10.88.0.0/16"), address(0, "2001:db8::/64")}},
		{"request turned down", "01 13 05 06 00000000000000000000000000000000 80", addressAssign{address(5, "::/128")}},
		{"all addresses withdrawn", "01 00", addressAssign{}},
		{"all routes withdrawn", "03 00", routeAdvertisement{}},
		{"long request ID", "02 0a 80004000 04 0a000000 08", addressRequest{address(16384, "10.0.0.0/8")}},
		{"one address for UDP and one for all", "03 36 04 c0000201 c0000201 00 04 c0000205 c0000205 11" +
			"06 20010db8000000000000000000000001 20010db8000000000000000000000002 3a",
			routeAdvertisement{ipRange("192.0.2.1", "192.0.2.1", 0), ipRange("192.0.2.5", "192.0.2.5", 17),
				ipRange("2001:db8::1", "2001:db8::2", 58)}},
		{"peers", "b1767074 14 04 0a5b0000 0a5bffff 00 04 ac120000 ac12ffff 00",
			peerList{ipRange("10.91.0.0", "10.91.255.255", 0), ipRange("172.18.0.0", "172.18.255.255", 0)}},
		{"no peers", "b1767074 00", peerList{}},
		{"leave", "b1767075 00", leave{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			wire := unhex(t, tc.wire)
			got, err := readCapsule(http3.NewCapsuleParser(bytes.NewReader(wire)))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.want, got, compareNetip); d != "" {
				t.Error(d)
			}
			var w bytes.Buffer
			if err := writeCapsule(&w, tc.want); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(w.Bytes(), wire) {
				t.Errorf("wrote %x, want %x", w.Bytes(), wire)
			}
		})
	}
}

func TestCapsuleMalformed(t *testing.T) {
	v6 := strings.Repeat("00", 15)
	for _, tc := range []struct{ name, wire, want string }{
		{"empty request", "02 00", "no address"},
		{"request ID zero", "02 07 00 04 00000000 20", "request ID 0"},
		{"request ID twice", "02 0e 01 04 00000000 20 01 04 0a000001 20", "request ID 1 twice"},
		{"IP version", "01 07 00 05 0a000001 20", "IP version 5"},
		{"IPv4 prefix length", "01 07 00 04 0a000001 21", "prefix length 33"},
		{"IPv6 prefix length", "01 13 00 06 " + v6 + "01 81", "prefix length 129"},
		{"bits beyond the prefix", "01 07 00 04 0a000001 18", "beyond its length"},
		{"mapped address", "01 13 00 06 00000000000000000000ffff0a000001 80", "IPv4-mapped"},
		{"address cut short", "01 06 00 04 0a000001", "unexpected EOF"},
		{"prefix length missing", "01 01 00", "unexpected EOF"},
		{"request ID cut short", "01 01 40", "request ID"},
		{"capsule cut short", "01 07 00 04 0a", "unexpected EOF"},
		{"length cut short", "01", "unexpected EOF"},
		{"type cut short", "40", "unexpected EOF"},
		{"unknown capsule cut short", "3f 05 00", "unexpected EOF"},
		{"backwards", "03 0a 04 0a000002 0a000001 00", "backwards"},
		{"mapped range", "03 22 06 00000000000000000000ffff0a000001 00000000000000000000ffff0a000001 00", "IPv4-mapped"},
		{"IPv6 first", "03 2c 06 " + v6 + "01" + v6 + "01 00 04 0a000001 0a000001 00", "IPv4 after IPv6"},
		{"protocol order", "03 14 04 0a000001 0a000001 11 04 0a000002 0a000002 06", "protocol 6 after 17"},
		{"address order", "03 14 04 0a000002 0a000002 00 04 0a000001 0a000001 00", "does not come after"},
		{"touching", "03 14 04 0a000000 0a000001 00 04 0a000001 0a000002 00", "does not come after"},
		{"also for all", "03 1e 04 0a000000 0a0000ff 00 04 0b000000 0b0000ff 00 04 0a0000ff 0a0001ff 06", "and for all"},
		{"around one for all", "03 14 04 0a000010 0a000020 00 04 0a000000 0a0001ff 06", "and for all"},
		{"range cut short", "03 05 04 0a000001", "unexpected EOF"},
		{"peers for TCP", "b1767074 0a 04 0a000000 0a0000ff 06", "for protocol 6"},
		{"peers are no prefix", "b1767074 0a 04 0a000000 0a000002 00", "is no prefix"},
		{"peers overlap", "b1767074 14 04 0a000000 0a0000ff 00 04 0a000080 0a0000ff 00", "does not come after"},
		{"peers cut short", "b1767074 05 04 0a000001", "unexpected EOF"},
		{"leave with a value", "b1767075 01 00", "has a value"},
		{"protocol missing", "03 09 04 0a000001 0a000001", "unexpected EOF"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := readCapsule(http3.NewCapsuleParser(bytes.NewReader(unhex(t, tc.wire))))
			if err == nil {
				t.Fatalf("parsed as %v", c)
			}
			if errors.Is(err, io.EOF) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q, want one with %q", err, tc.want)
			}
		})
	}
}

// A specific protocol beside the ranges for all protocols is no overlap, on
// either side of any of them.
func TestCapsuleRoutesBesideOthers(t *testing.T) {
	c := routeAdvertisement{
		ipRange("10.0.0.16", "10.0.0.31", 0), ipRange("10.0.0.64", "10.0.0.79", 0),
		ipRange("10.0.0.0", "10.0.0.15", 6), ipRange("10.0.0.32", "10.0.0.63", 6), ipRange("10.0.0.80", "10.0.0.90", 6),
		ipRange("10.0.0.0", "10.0.0.15", 17),
		ipRange("10.0.0.0", "10.0.0.15", 255),
	}
	if err := c.check(); err != nil {
		t.Error(err)
	}
}

func TestCapsuleSkipsOthers(t *testing.T) {
	var w bytes.Buffer
	for _, n := range []int{0, 1, maxCapsuleLength + 1, 1 << 20} { // their size does not matter
		if err := http3.WriteCapsule(&w, 0x29, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	want := addressAssign{address(0, "10.0.0.1/32")}
	if err := writeCapsule(&w, want); err != nil {
		t.Fatal(err)
	}
	p := http3.NewCapsuleParser(&w)
	got, err := readCapsule(p)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(capsule(want), got, compareNetip); d != "" {
		t.Error(d)
	}
	if c, err := readCapsule(p); err != io.EOF {
		t.Errorf("at the end: %v, %v, want io.EOF", c, err)
	}
}

func TestCapsuleBounds(t *testing.T) {
	assign := func(n int) (c addressAssign) {
		for i := range n {
			a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
			c = append(c, assignedAddress{Prefix: netip.PrefixFrom(a, 32)})
		}
		return c
	}
	full := assign(maxCapsuleEntries)
	var w bytes.Buffer
	if err := writeCapsule(&w, full); err != nil {
		t.Fatal(err)
	}
	got, err := readCapsule(http3.NewCapsuleParser(&w))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(capsule(full), got, compareNetip); d != "" {
		t.Error(d)
	}

	over := assign(maxCapsuleEntries + 1)
	if err := writeCapsule(io.Discard, over); !errors.Is(err, errTooManyEntries) {
		t.Errorf("write of %d entries: %v", len(over), err)
	}
	for _, c := range []capsule{over, addressRequest(over)} {
		w.Reset()
		if err := http3.WriteCapsule(&w, c.capsuleType(), c.appendValue(nil)); err != nil {
			t.Fatal(err)
		}
		if _, err := readCapsule(http3.NewCapsuleParser(&w)); !errors.Is(err, errTooManyEntries) {
			t.Errorf("read of %d entries: %v", len(over), err)
		}
	}
	var routes routeAdvertisement
	for _, a := range over {
		routes = append(routes, ipRoute{Start: a.Prefix.Addr(), End: a.Prefix.Addr()})
	}
	if _, err := parseRoutes(routes.appendValue(nil)); !errors.Is(err, errTooManyEntries) {
		t.Errorf("read of %d routes: %v", len(routes), err)
	}
}

// A length alone must not make us allocate.
func TestCapsuleClaimedLength(t *testing.T) {
	head := quicvarint.Append(nil, uint64(capsuleRouteAdvertisement))
	head = quicvarint.Append(head, 1<<61)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := readCapsule(http3.NewCapsuleParser(io.MultiReader(bytes.NewReader(head), neverEnding{})))
	runtime.ReadMemStats(&after)
	if err == nil || !strings.Contains(err.Error(), "more than 65536") {
		t.Errorf("error %v", err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("allocated %d bytes", n)
	}
}

type neverEnding struct{}

func (neverEnding) Read(b []byte) (int, error) { return len(b), nil }

func TestCapsuleRoutesFromPrefixes(t *testing.T) {
	for _, tc := range []struct {
		name     string
		prefixes []string
		routes   routeAdvertisement
		back     []string
	}{
		{"none", nil, nil, nil},
		{"everything", []string{"::/0", "0.0.0.0/0"},
			routeAdvertisement{ipRange("0.0.0.0", "255.255.255.255", 0),
				ipRange("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 0)},
			[]string{"0.0.0.0/0", "::/0"}},
		{"unsorted, nested, adjoining, unmasked",
			[]string{"10.2.0.0/16", "10.0.0.7/16", "10.1.0.0/16", "10.0.3.0/24", "10.9.0.0/32"},
			routeAdvertisement{ipRange("10.0.0.0", "10.2.255.255", 0), ipRange("10.9.0.0", "10.9.0.0", 0)},
			[]string{"10.0.0.0/15", "10.2.0.0/16", "10.9.0.0/32"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := routesTo(parsePrefixes(tc.prefixes))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.routes, got, compareNetip); d != "" {
				t.Error(d)
			}
			back, err := got.prefixes()
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(parsePrefixes(tc.back), back, compareNetip); d != "" {
				t.Error(d)
			}
		})
	}
}

func parsePrefixes(ss []string) (ps []netip.Prefix) {
	for _, s := range ss {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

func TestCapsuleRoutesRefused(t *testing.T) {
	for _, p := range []netip.Prefix{{}, netip.MustParsePrefix("::ffff:10.0.0.0/104"), netip.PrefixFrom(netip.IPv4Unspecified(), 40)} {
		if c, err := routesTo([]netip.Prefix{p}); err == nil {
			t.Errorf("%v: %v", p, c)
		}
	}
	var many []netip.Prefix
	for i := range maxCapsuleEntries + 1 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 32))
	}
	if _, err := routesTo(many); !errors.Is(err, errTooManyEntries) {
		t.Errorf("%d routes: %v", len(many), err)
	}
}

// Ranges that take hundreds of prefixes each are hostile.
func TestCapsuleRoutesExplode(t *testing.T) {
	var c routeAdvertisement
	for i := range 100 {
		var start, end [16]byte
		start[0], start[15] = byte(2*i), 1
		end[0] = byte(2*i + 1)
		for j := 1; j < 16; j++ {
			end[j] = 0xff
		}
		end[15] = 0xfe
		c = append(c, ipRoute{Start: netip.AddrFrom16(start), End: netip.AddrFrom16(end)})
	}
	if err := c.check(); err != nil {
		t.Fatal(err)
	}
	if ps, err := c.prefixes(); err == nil {
		t.Errorf("%d ranges became %d prefixes", len(c), len(ps))
	}
	if ps, err := c[:10].prefixes(); err != nil || len(ps) < 2000 {
		t.Errorf("10 ranges became %d prefixes, %v", len(ps), err)
	}
	c[0].Protocol = 6
	if ps, err := c[:1].prefixes(); err != nil || len(ps) != 0 {
		t.Errorf("a range for TCP alone became %v, %v", ps, err)
	}
}

// Prefixes hold exactly the addresses of the ranges, whatever these are.
func TestCapsulePrefixesCoverRanges(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	addr := func(n uint32) netip.Addr {
		return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
	}
	for range 200 {
		var edges []uint32
		for range 10 {
			edges = append(edges, rnd.Uint32()>>rnd.UintN(16))
		}
		slices.Sort(edges)
		if len(slices.Compact(slices.Clone(edges))) != len(edges) {
			continue
		}
		var c routeAdvertisement
		for i := 0; i < len(edges); i += 2 {
			c = append(c, ipRoute{Start: addr(edges[i]), End: addr(edges[i+1])})
		}
		ps, err := c.prefixes()
		if err != nil {
			t.Fatal(err)
		}
		again, err := routesTo(ps)
		if err != nil {
			t.Fatal(err)
		}
		var size, want uint64
		for _, p := range ps {
			size += 1 << (32 - p.Bits())
		}
		for i := 0; i < len(edges); i += 2 {
			want += uint64(edges[i+1]-edges[i]) + 1
		}
		if size != want {
			t.Errorf("%v: the prefixes hold %d addresses, not %d", c, size, want)
		}
		for _, r := range c {
			i := slices.IndexFunc(again, func(a ipRoute) bool { return a.Start.Compare(r.Start) <= 0 && a.End.Compare(r.End) >= 0 })
			if i < 0 {
				t.Errorf("%v is not in %v", r, again)
			}
		}
	}
}

func FuzzCapsule(f *testing.F) {
	for _, s := range []string{
		"01 07 01 04 c000020b 20", "02 07 01 04 00000000 20", "03 0a 04 00000000 ffffffff 00",
		"01 00", "03 00", "02 00", "29 03 010203 01 00", "b1767075 00",
		"b1767074 14 04 0a5b0000 0a5bffff 00 04 ac120000 ac12ffff 00",
		"03 36 04 c0000201 c0000201 00 04 c0000205 c0000205 11 06 20010db8000000000000000000000001 20010db8000000000000000000000002 3a",
	} {
		f.Add(unhex(f, s))
	}
	f.Fuzz(func(t *testing.T, wire []byte) {
		p := http3.NewCapsuleParser(bytes.NewReader(wire))
		for {
			c, err := readCapsule(p)
			if err != nil {
				return
			}
			if r, ok := c.(routeAdvertisement); ok {
				ps, err := r.prefixes()
				if err == nil && len(ps) > maxRoutePrefixes {
					t.Errorf("%d prefixes", len(ps))
				}
			}
			var w bytes.Buffer
			if err := writeCapsule(&w, c); err != nil {
				t.Fatalf("%v was read and cannot be written: %v", c, err)
			}
			again, err := readCapsule(http3.NewCapsuleParser(&w))
			if err != nil {
				t.Fatalf("%v was written and cannot be read: %v", c, err)
			}
			if d := cmp.Diff(c, again, compareNetip); d != "" {
				t.Error(d)
			}
		}
	})
}
