package tun

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

const vnetLen = 10

// vnet is the virtio_net_hdr before every packet, in the host's byte order.
type vnet struct {
	flags, gso                             uint8
	hdrLen, gsoSize, csumStart, csumOffset uint16
}

func (v vnet) put(b []byte) {
	_ = b[vnetLen-1]
	b[0], b[1] = v.flags, v.gso
	binary.NativeEndian.PutUint16(b[2:], v.hdrLen)
	binary.NativeEndian.PutUint16(b[4:], v.gsoSize)
	binary.NativeEndian.PutUint16(b[6:], v.csumStart)
	binary.NativeEndian.PutUint16(b[8:], v.csumOffset)
}

func parseVnet(b []byte) vnet {
	_ = b[vnetLen-1]
	return vnet{
		flags: b[0], gso: b[1] &^ unix.VIRTIO_NET_HDR_GSO_ECN,
		// hdrLen is not reliable, and not needed.
		gsoSize:    binary.NativeEndian.Uint16(b[4:]),
		csumStart:  binary.NativeEndian.Uint16(b[6:]),
		csumOffset: binary.NativeEndian.Uint16(b[8:]),
	}
}
