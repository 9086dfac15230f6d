package packet

import "encoding/binary"

// ClampMSS lowers the maximum segment size that a TCP SYN announces (RFC 9293
// section 3.7.1) to what packets of mtu bytes can carry, so that both ends of a
// connection through a narrow path use segments that fit.
func ClampMSS(p *Packet, h Header, mtu int) {
	const syn, optionEnd, optionNop, optionMSS = 0x02, 0, 1, 2
	if h.Proto != TCP || h.Fragment || p.Data[h.IPLen+13]&syn == 0 {
		return
	}
	fits := mtu - h.IPLen - 20
	if fits < 0 {
		return
	}
	b := p.Data[h.IPLen:h.HeaderLen]
	for o := 20; o < len(b) && b[o] != optionEnd; {
		if b[o] == optionNop {
			o++
			continue
		}
		if o+2 > len(b) || b[o+1] < 2 || o+int(b[o+1]) > len(b) {
			return
		}
		if b[o] != optionMSS || b[o+1] != 4 {
			o += int(b[o+1])
			continue
		}
		mss := b[o+2 : o+4]
		was := binary.BigEndian.Uint16(mss)
		if int(was) <= fits {
			return
		}
		binary.BigEndian.PutUint16(mss, uint16(fits))
		if p.Flags&Partial != 0 {
			return // the sum covers the pseudo-header alone
		}
		// RFC 1624, equation 3. An odd offset swaps the bytes of both words.
		from, to := was, uint16(fits)
		if o%2 != 0 {
			from, to = from<<8|from>>8, to<<8|to>>8
		}
		sum := uint32(^binary.BigEndian.Uint16(b[16:])) + uint32(^from) + uint32(to)
		sum = sum&0xffff + sum>>16
		sum = sum&0xffff + sum>>16
		binary.BigEndian.PutUint16(b[16:], ^uint16(sum))
		return
	}
}
