package install

import (
	"fmt"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlog"
	"github.com/quic-go/quic-go/qlogwriter"
)

const (
	quicModule = "github.com/quic-go/quic-go"
	// quicVersion is the only version whose internals this package touches: the
	// layout can be checked, what the fields mean cannot.
	quicVersion = "v0.65.0"
)

// linkedVersion returns the version of quic-go in this binary. Test binaries list
// no modules; there the path of a source file has the version.
func linkedVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			switch {
			case m.Path != quicModule:
			case m.Replace != nil:
				return m.Version + " (replaced)"
			default:
				return m.Version
			}
		}
	}
	file, _ := runtime.FuncForPC(reflect.ValueOf(quic.DialAddr).Pointer()).FileLine(0)
	if _, after, ok := strings.Cut(file, quicModule+"@"); ok {
		version, _, _ := strings.Cut(after, "/")
		return version
	}
	return "unknown"
}

// slots are the places in a connection that this package reads or writes, all
// owned by its run loop.
type slots struct {
	algorithm  *sendAlgorithm
	field      reflect.Value // the same field with the type that quic-go gave it
	connLogger *qlogwriter.Recorder
	ackLogger  *qlogwriter.Recorder
	onAckOfAck *func(qlog.PacketNumber)
	ptoCount   *uint32
	rtt        rttStats
	stats      connStats
}

type rttStats interface {
	HasMeasurement() bool
	SmoothedRTT() time.Duration
	PTO(includeMaxAckDelay bool) time.Duration
}

// field returns field name of the struct v as something that can be read and
// set, if its type is called want.
func field(v reflect.Value, name, want string) (reflect.Value, error) {
	f := v.FieldByName(name)
	if !f.IsValid() {
		return f, fmt.Errorf("%s has no field %s", v.Type(), name)
	}
	if got := f.Type().String(); got != want {
		return f, fmt.Errorf("%s.%s is a %s, not a %s", v.Type(), name, got, want)
	}
	if !f.CanAddr() {
		return f, fmt.Errorf("%s.%s has no address", v.Type(), name)
	}
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem(), nil
}

// typed returns field name of the struct v as a *T, if T is its very type.
func typed[T any](v reflect.Value, name string) (*T, error) {
	f, err := field(v, name, reflect.TypeFor[T]().String())
	if err != nil {
		return nil, err
	}
	p, ok := f.Addr().Interface().(*T)
	if !ok {
		return nil, fmt.Errorf("%s.%s is another %s", v.Type(), name, f.Type())
	}
	return p, nil
}

// inside returns the struct in the interface or pointer v, if it is a pointer to
// a type called want.
func inside(v reflect.Value, want string) (reflect.Value, error) {
	if v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct || v.Type().String() != want {
		return v, fmt.Errorf("found %v where a %s should be", v.Kind(), want)
	}
	return v.Elem(), nil
}

// find looks into the connection that conn, a pointer to a struct, points to, and
// checks all that is relied on.
func find(conn any) (s slots, err error) {
	c, err := inside(reflect.ValueOf(conn), "*quic.Conn")
	if err != nil {
		return s, err
	}
	handler, err := field(c, "sentPacketHandler", "ackhandler.SentPacketHandler")
	if err != nil {
		return s, err
	}
	h, err := inside(handler, "*ackhandler.sentPacketHandler")
	if err != nil {
		return s, err
	}
	if s.field, err = findAlgorithm(h); err != nil {
		return s, err
	}
	if _, err := stockPacketSize(s.field); err != nil {
		return s, err
	}
	// Both interface types have the same method table, as was just seen.
	s.algorithm = (*sendAlgorithm)(unsafe.Pointer(s.field.UnsafeAddr()))
	if s.connLogger, err = typed[qlogwriter.Recorder](c, "qlogger"); err != nil {
		return s, err
	}
	if s.ackLogger, err = typed[qlogwriter.Recorder](h, "qlogger"); err != nil {
		return s, err
	}
	if s.onAckOfAck, err = typed[func(qlog.PacketNumber)](h, "ignorePacketsBelow"); err != nil {
		return s, err
	}
	if s.ptoCount, err = typed[uint32](h, "ptoCount"); err != nil {
		return s, err
	}
	rtt, err := field(h, "rttStats", "*utils.RTTStats")
	if err != nil {
		return s, err
	}
	var ok bool
	if s.rtt, ok = rtt.Interface().(rttStats); !ok || rtt.IsNil() {
		return s, fmt.Errorf("%s tells no round-trip time", rtt.Type())
	}
	stats, err := field(h, "connStats", "*utils.ConnectionStats")
	if err != nil {
		return s, err
	}
	if stats, err = inside(stats, "*utils.ConnectionStats"); err != nil {
		return s, err
	}
	for name, counter := range map[string]**atomic.Uint64{
		"CongestionWindow": &s.stats.window, "PacketsLost": &s.stats.packetsLost, "BytesLost": &s.stats.bytesLost,
	} {
		if *counter, err = typed[atomic.Uint64](stats, name); err != nil {
			return s, err
		}
	}
	return s, nil
}

// findAlgorithm returns the field that holds the congestion control.
func findAlgorithm(h reflect.Value) (reflect.Value, error) {
	f, err := field(h, "congestion", "congestion.SendAlgorithmWithDebugInfos")
	if err != nil {
		return f, err
	}
	return f, sameMethods(f.Type())
}

// signatures are the methods that quic-go's interface must have, neither more nor
// less.
var signatures = map[string]string{
	"TimeUntilSend":           "func(protocol.ByteCount) monotime.Time",
	"HasPacingBudget":         "func(monotime.Time) bool",
	"OnPacketSent":            "func(monotime.Time, protocol.ByteCount, protocol.PacketNumber, protocol.ByteCount, bool)",
	"CanSend":                 "func(protocol.ByteCount) bool",
	"MaybeExitSlowStart":      "func()",
	"OnPacketAcked":           "func(protocol.PacketNumber, protocol.ByteCount, protocol.ByteCount, monotime.Time)",
	"OnCongestionEvent":       "func(protocol.PacketNumber, protocol.ByteCount, protocol.ByteCount)",
	"OnSpuriousLoss":          "func(protocol.PacketNumber)",
	"OnRetransmissionTimeout": "func(bool)",
	"SetMaxDatagramSize":      "func(protocol.ByteCount)",
	"InSlowStart":             "func() bool",
	"InRecovery":              "func() bool",
	"GetCongestionWindow":     "func() protocol.ByteCount",
}

// sameMethods checks that interface type t has the method table of
// sendAlgorithm: the same names, hence the same order, and parameters that are
// the same integers or booleans, in the order that is expected.
func sameMethods(t reflect.Type) error {
	ours := reflect.TypeFor[sendAlgorithm]()
	if t.Kind() != reflect.Interface || t.NumMethod() != ours.NumMethod() {
		return fmt.Errorf("%s is not an interface of %d methods", t, ours.NumMethod())
	}
	for i := range ours.NumMethod() {
		a, b := t.Method(i), ours.Method(i)
		if a.Name != b.Name || a.PkgPath != "" {
			return fmt.Errorf("method %d of %s is %s, not %s", i, t, a.Name, b.Name)
		}
		if got := a.Type.String(); got != signatures[a.Name] {
			return fmt.Errorf("%s.%s is a %s, not a %s", t, a.Name, got, signatures[a.Name])
		}
		if !slices.Equal(kinds(a.Type), kinds(b.Type)) {
			return fmt.Errorf("%s.%s takes or returns other kinds than %s", t, a.Name, b.Type)
		}
	}
	return nil
}

// kinds returns the kinds of what function type t takes and returns.
func kinds(t reflect.Type) (k []reflect.Kind) {
	for i := range t.NumIn() {
		k = append(k, t.In(i).Kind())
	}
	k = append(k, reflect.Invalid) // between them
	for i := range t.NumOut() {
		k = append(k, t.Out(i).Kind())
	}
	return k
}

// stockPacketSize returns the size of a full packet as the stock control in field
// f knows it.
func stockPacketSize(f reflect.Value) (int64, error) {
	stock, err := inside(f, "*congestion.cubicSender")
	if err != nil {
		return 0, err
	}
	size, err := field(stock, "maxDatagramSize", "protocol.ByteCount")
	if err != nil {
		return 0, err
	}
	if size.Kind() != reflect.Int64 || size.Int() < 1200 || size.Int() > 65527 {
		return 0, fmt.Errorf("%s.maxDatagramSize is %v", stock.Type(), size)
	}
	return size.Int(), nil
}
