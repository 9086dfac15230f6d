package tunnel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/packet"
)

func frames(pkts ...packet.Packet) []byte {
	var b []byte
	for _, p := range pkts {
		b = binary.BigEndian.AppendUint16(b, uint16(len(p.Data)))
		b = binary.BigEndian.AppendUint16(b, p.Segment)
		b = append(append(b, byte(p.Flags)), p.Data...)
	}
	return b
}

func readAll(t *testing.T, r io.Reader, size int) ([]packet.Packet, error) {
	t.Helper()
	c := newCollector()
	buf := make([]byte, size)
	for {
		err := readFrames(r, buf, make([]packet.Packet, 0, 4), func(pkts []packet.Packet) { c.WritePackets(0, pkts) })
		if err != nil {
			return c.pkts, err
		}
	}
}

func TestReadFrames(t *testing.T) {
	var sent []packet.Packet
	for i := range 50 {
		sent = append(sent, packet.Packet{Data: bytes.Repeat([]byte{byte(i)}, 1+i*1200), Segment: uint16(i)})
	}
	sent[3].Flags = packet.Partial
	whole := frames(sent...)
	for name, r := range map[string]io.Reader{
		"at once":            bytes.NewReader(whole),
		"byte by byte":       iotest.OneByteReader(bytes.NewReader(whole)),
		"halves":             iotest.HalfReader(bytes.NewReader(whole)),
		"end with the bytes": iotest.DataErrReader(bytes.NewReader(whole)),
	} {
		got, err := readAll(t, r, readBuffer)
		if err != io.EOF {
			t.Errorf("%s: error %v, want EOF", name, err)
		}
		if diff := cmp.Diff(sent, got, sameBytes); diff != "" {
			t.Errorf("%s: packets (-sent +read):\n%s", name, diff)
		}
	}
}

func TestReadFramesCutOff(t *testing.T) {
	whole := frames(packet.Packet{Data: []byte{1, 2, 3}}, packet.Packet{Data: []byte{4, 5, 6}})
	for n := 1; n < len(whole); n++ {
		if n == len(whole)/2 {
			continue // a frame's end
		}
		got, err := readAll(t, bytes.NewReader(whole[:n]), readBuffer)
		if err == io.EOF || !errors.Is(err, io.EOF) {
			t.Errorf("cut at %d: error %v, want one that says so", n, err)
		}
		if want := n / (len(whole) / 2); len(got) != want {
			t.Errorf("cut at %d: %d packets, want %d", n, len(got), want)
		}
	}
}

func FuzzReadFrames(f *testing.F) {
	f.Add(frames(packet.Packet{Data: []byte{1, 2, 3}, Segment: 1000}))
	f.Add(frames(packet.Packet{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		pkts, _ := readAll(t, bytes.NewReader(b), readBuffer)
		for _, p := range pkts {
			p.Flags &= packet.Partial
		}
		if again := frames(pkts...); len(again) > len(b) {
			t.Errorf("%d bytes hold packets of %d", len(b), len(again))
		}
	})
}

func TestOutboxIsBounded(t *testing.T) {
	o := &outbox{wake: make(chan struct{}, 1)}
	p := &packet.Packet{Data: make([]byte, 60000), Segment: 1400}
	n := 0
	for o.add(p) {
		if n++; n > 1000 {
			t.Fatal("takes without end")
		}
	}
	if held := n * (frameHeader + len(p.Data)); held > minOutbox || held < minOutbox/2 {
		t.Errorf("holds %d bytes, want about %d", held, minOutbox)
	}
	var got int
	for c := o.take(); c != nil; c = o.take() {
		got += len(c.b)
	}
	if want := n * (frameHeader + len(p.Data)); got != want || o.bytes != 0 {
		t.Errorf("gave back %d bytes of %d, %d left", got, want, o.bytes)
	}
	if !o.add(p) {
		t.Error("is full after all was taken")
	}
}
