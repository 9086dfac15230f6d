package relay

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"
)

// A large buffer goes back when nothing comes, and the connection lives on.
func TestBufferGoesBack(t *testing.T) {
	near, client := net.Pipe()
	defer client.Close()
	far, server := net.Pipe()
	defer server.Close()
	ended := make(chan error, 1)
	go func() { ended <- transferBusy(far, near) }()
	for _, data := range [][]byte{[]byte("x"), make([]byte, busyBuffer), make([]byte, 3*busyBuffer+1)} {
		go client.Write(data)
		expect(t, server, data)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(20 * busyWait):
		t.Fatal("the buffer is still held")
	}
	go func() { ended <- transfer(far, near) }()
	go client.Write([]byte("y"))
	expect(t, server, []byte("y"))
	client.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func expect(t *testing.T, r io.Reader, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %d bytes, %v, want %d", len(got), err, len(want))
	}
}
