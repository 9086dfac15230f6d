// Package packet owns the IP packet that the other packages pass on: parsing,
// checksums, the split of a super-packet into its segments, the coalescing of
// segments into a super-packet, and the ICMP errors that answer a packet.
//
// It knows nothing of devices, of QUIC or of sessions, and it does no I/O.
package packet

// Flags say what is known of a packet's transport checksum.
type Flags uint8

const (
	// Partial says that the transport checksum field holds the folded
	// pseudo-header sum only (virtio's NEEDS_CSUM). It is completed before the
	// packet leaves the machine.
	Partial Flags = 1 << iota
	// Verified says that the kernel has checked the transport checksum
	// (virtio's DATA_VALID).
	Verified
)

// A Packet is one IP packet, or a super-packet: one IP and transport header
// followed by the payload of many segments, as a TUN device with TSO or USO
// hands it out.
//
// Who receives a Packet in a call borrows Data until the call returns, and may
// write to it.
type Packet struct {
	// Data starts with the IP header and ends with the payload.
	Data []byte
	// Segment is the payload bytes of every segment but the last, which may be
	// shorter. Zero means that this is a single packet.
	Segment uint16
	Flags   Flags
}

// Protocol numbers (IANA) that the house looks at.
const (
	ICMP   = 1
	TCP    = 6
	UDP    = 17
	ICMPv6 = 58
)
