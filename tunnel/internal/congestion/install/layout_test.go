package install

import (
	"reflect"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlog"
	"github.com/quic-go/quic-go/qlogwriter"
)

// TestVersion fails when go.mod has another quic-go: then read the new one's
// sent_packet_handler.go and connection.go for what this package relies on (see
// algorithm and recorder.RecordEvent), run all tests, and move quicVersion.
func TestVersion(t *testing.T) {
	if err := Supported(); err != nil {
		t.Fatal(err)
	}
}

// TestShape pins what can be seen of the layout without a connection.
func TestShape(t *testing.T) {
	conn := reflect.TypeFor[quic.Conn]()
	handler, ok := conn.FieldByName("sentPacketHandler")
	if !ok || handler.Type.Kind() != reflect.Interface {
		t.Fatalf("sentPacketHandler is %v", handler.Type)
	}
	logger, ok := conn.FieldByName("qlogger")
	if !ok || logger.Type != reflect.TypeFor[qlogwriter.Recorder]() {
		t.Fatalf("qlogger is %v", logger.Type)
	}
	if len(signatures) != reflect.TypeFor[sendAlgorithm]().NumMethod() {
		t.Fatal("signatures and sendAlgorithm differ")
	}
}

func TestWrongShapes(t *testing.T) {
	type Conn struct{}
	tests := []struct {
		name string
		conn any
		want string
	}{
		{"nothing", nil, "found invalid where a *quic.Conn"},
		{"no pointer", Conn{}, "found struct where a *quic.Conn"},
		{"another type", &Conn{}, "found ptr where a *quic.Conn"},
		{"nil", (*quic.Conn)(nil), "found ptr where a *quic.Conn"},
		{"not connected", &quic.Conn{}, "found invalid where a *ackhandler.sentPacketHandler"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := findSafely(tt.conn); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("find says %v, not %q", err, tt.want)
			}
		})
	}
}

func TestWrongFields(t *testing.T) {
	v := struct {
		Counter uint64
		Logger  any
		Real    atomic.Uint64
	}{}
	s := reflect.ValueOf(&v).Elem()
	if _, err := typed[atomic.Uint64](s, "Counter"); err == nil {
		t.Error("took a uint64 for an atomic.Uint64")
	}
	if _, err := typed[qlogwriter.Recorder](s, "Logger"); err == nil {
		t.Error("took an any for a Recorder")
	}
	if _, err := typed[func(qlog.PacketNumber)](s, "Missing"); err == nil {
		t.Error("found a field that is not there")
	}
	if p, err := typed[atomic.Uint64](s, "Real"); err != nil || p != &v.Real {
		t.Errorf("typed: %p, %v", p, err)
	}
	if _, err := typed[atomic.Uint64](reflect.ValueOf(struct{ Real int }{}), "Real"); err == nil {
		t.Error("took a value without address")
	}
}

func TestWrongMethods(t *testing.T) {
	for _, wrong := range []reflect.Type{
		reflect.TypeFor[error](),
		reflect.TypeFor[sendAlgorithm](), // plain integers: not quic-go's
		reflect.TypeFor[int](),
	} {
		if err := sameMethods(wrong); err == nil {
			t.Errorf("%v passed", wrong)
		}
	}
}
