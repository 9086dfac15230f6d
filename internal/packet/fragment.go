package packet

import "encoding/binary"

// FragmentIPv4 cuts an IPv4 packet into fragments of at most mtu bytes (RFC 791
// section 3.2), hands each to emit, which may write to it and must not keep it,
// and uses up b. A packet that fits is handed on as it is, and a fragment is cut
// into smaller ones. The transport checksum must be complete.
//
// It returns false, and emits nothing, where the packet must not be fragmented
// or the mtu leaves no room for payload.
func FragmentIPv4(b []byte, mtu int, emit func([]byte)) bool {
	h, err := Parse(b)
	if err != nil || h.Version != 4 {
		return false
	}
	if len(b) <= mtu {
		emit(b)
		return true
	}
	hl := int(b[0]&0x0f) * 4
	if h.DontFragment || mtu < hl+8 || h.FragmentOffset+len(b)-hl > 0xffff {
		return false
	}
	var hdr [60]byte
	rest := copiedOptions(hdr[:], b[:hl]) // the header of all but the first
	more := b[6] & 0x20
	at := h.FragmentOffset
	for off := hl; off < len(b); {
		n := hl
		if off > hl {
			n = rest
		}
		end := off + (mtu-n)&^7
		mf := uint8(0x20)
		if end >= len(b) {
			end, mf = len(b), more
		}
		// The header goes over payload that has been handed out.
		f := b[off-n : end]
		if off > hl {
			copy(f, hdr[:n])
		}
		binary.BigEndian.PutUint16(f[2:], uint16(len(f)))
		binary.BigEndian.PutUint16(f[6:], uint16(at/8))
		f[6] |= mf
		setIPv4Checksum(f, n)
		at += end - off
		off = end
		emit(f)
	}
	return true
}

// copiedOptions writes to dst the header that the fragments after the first
// have: with those options only that are to be copied (RFC 791 section 3.1). It
// returns its length.
func copiedOptions(dst, hdr []byte) int {
	n := copy(dst, hdr[:ipv4Len])
	for opts := hdr[ipv4Len:]; len(opts) > 0 && opts[0] != 0; {
		size := 1
		if opts[0] != 1 { // no operation
			if len(opts) < 2 || opts[1] < 2 || int(opts[1]) > len(opts) {
				break
			}
			size = int(opts[1])
			if opts[0]&0x80 != 0 {
				n += copy(dst[n:], opts[:size])
			}
		}
		opts = opts[size:]
	}
	for n%4 != 0 {
		dst[n] = 0 // end of options
		n++
	}
	dst[0] = 0x40 | uint8(n/4)
	return n
}
