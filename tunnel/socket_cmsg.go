package tunnel

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// controlMessages calls f with each control message in oob: its level, type and
// data, and all of its bytes with their padding. What is not whole ends it.
func controlMessages(oob []byte, f func(level, typ int32, data, whole []byte)) {
	for len(oob) >= unix.SizeofCmsghdr {
		hdr, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			return
		}
		f(hdr.Level, hdr.Type, data, oob[:len(oob)-len(rest)])
		oob = rest
	}
}

// segmentSize returns the size in a UDP_SEGMENT message; zero if there is none.
func segmentSize(oob []byte) (size int) {
	controlMessages(oob, func(level, typ int32, data, _ []byte) {
		if level == unix.IPPROTO_UDP && typ == unix.UDP_SEGMENT && len(data) >= 2 {
			size = int(binary.NativeEndian.Uint16(data))
		}
	})
	return size
}

// appendWithoutSegmentSize appends the messages in oob, without UDP_SEGMENT.
func appendWithoutSegmentSize(b, oob []byte) []byte {
	controlMessages(oob, func(level, typ int32, _, whole []byte) {
		if level != unix.IPPROTO_UDP || typ != unix.UDP_SEGMENT {
			b = append(b, whole...)
		}
	})
	return b
}
