package tun

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Offloads say what a device does with whole super-packets, and why not more.
type Offloads struct {
	// Checksum: the kernel leaves transport checksums partial.
	Checksum bool
	// TSO and USO: the kernel hands out super-packets of TCP, and of UDP.
	TSO, USO bool
	// WriteTSO and WriteUSO: it takes them.
	WriteTSO, WriteUSO bool

	note string
}

// String lists the offloads, and the reason where something is missing.
func (o Offloads) String() string {
	list := func(names ...any) string {
		var on []string
		for i := 0; i < len(names); i += 2 {
			if names[i+1].(bool) {
				on = append(on, names[i].(string))
			}
		}
		if on == nil {
			return "none"
		}
		return strings.Join(on, "+")
	}
	s := "read " + list("checksum", o.Checksum, "tso", o.TSO, "uso", o.USO) +
		", write " + list("tso", o.WriteTSO, "uso", o.WriteUSO)
	if o.note != "" {
		s += " (" + o.note + ")"
	}
	return s
}

const (
	offloadTSO = unix.TUN_F_TSO4 | unix.TUN_F_TSO6
	offloadUSO = unix.TUN_F_USO4 | unix.TUN_F_USO6
)

// negotiate sets the header format and the offloads of the whole device through
// one of its queues.
func (d *Device) negotiate(fd int, cfg Config) error {
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, vnetLen); err != nil {
		return fmt.Errorf("tun: set packet header size of %s: %w", d.name, err)
	}
	o, err := offer(cfg, func(flags int) error { return unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, flags) })
	if err != nil {
		return fmt.Errorf("tun: set offloads of %s: %w", d.name, err)
	}
	o.probe(cfg, func(b []byte) error { _, err := unix.Write(fd, b); return err })
	d.offloads = o
	return nil
}

// offer asks for less and less until the kernel agrees.
func offer(cfg Config, set func(flags int) error) (Offloads, error) {
	var notes []string
	wanted := unix.TUN_F_CSUM
	if cfg.DisableTSO {
		notes = append(notes, "tso turned off")
	} else {
		wanted |= offloadTSO | unix.TUN_F_TSO_ECN
	}
	if cfg.DisableUSO {
		notes = append(notes, "uso turned off")
	} else {
		wanted |= offloadUSO
	}
	got := -1
	for _, without := range []int{0, offloadUSO, offloadUSO | unix.TUN_F_TSO_ECN, ^unix.TUN_F_CSUM, ^0} {
		flags := wanted &^ without
		if flags == got {
			continue // refused already
		}
		got = flags
		err := set(flags)
		if err == nil {
			break
		}
		if flags == 0 || !errors.Is(err, unix.EINVAL) {
			return Offloads{}, err
		}
	}
	missing := wanted &^ got
	for _, m := range []struct {
		flags int
		note  string
	}{
		{unix.TUN_F_CSUM, "the kernel lacks checksum offload"},
		{offloadTSO, "the kernel lacks tso"},
		{offloadUSO, "the kernel lacks uso, 6.2 has it"},
	} {
		if missing&m.flags != 0 {
			notes = append(notes, m.note)
		}
	}
	return Offloads{
		Checksum: got&unix.TUN_F_CSUM != 0,
		TSO:      got&offloadTSO != 0,
		USO:      got&offloadUSO != 0,
		note:     strings.Join(notes, "; "),
	}, nil
}

// probe writes a super-packet of two segments for each protocol, to see whether
// the kernel takes them: some kernels that hand them out do not. A link that is
// down refuses the packet with EIO after it has looked at the header.
func (o *Offloads) probe(cfg Config, write func([]byte) error) {
	for _, p := range []struct {
		name  string
		off   bool
		proto uint8
		gso   uint8
		hdr   int
		sum   uint16
		to    *bool
	}{
		{"tso", cfg.DisableTSO, unix.IPPROTO_TCP, unix.VIRTIO_NET_HDR_GSO_TCPV4, 20, 16, &o.WriteTSO},
		{"uso", cfg.DisableUSO, unix.IPPROTO_UDP, unix.VIRTIO_NET_HDR_GSO_UDP_L4, 8, 6, &o.WriteUSO},
	} {
		if p.off {
			continue
		}
		err := write(probePacket(p.proto, p.gso, p.hdr, p.sum))
		*p.to = err == nil || errors.Is(err, unix.EIO)
		if !*p.to {
			if o.note != "" {
				o.note += "; "
			}
			o.note += fmt.Sprintf("the kernel refuses to take %s: %v", p.name, err)
		}
	}
}

// probePacket makes a super-packet that dies in the kernel at once: the checksum
// of its IP header is wrong, it comes from a multicast address, and its hop
// limit is zero.
func probePacket(proto, gso uint8, hdr int, sum uint16) []byte {
	const segment = 600
	b := make([]byte, vnetLen+20+hdr+2*segment)
	vnet{
		flags: unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, gso: gso, hdrLen: uint16(20 + hdr),
		gsoSize: segment, csumStart: 20, csumOffset: sum,
	}.put(b)
	ip := b[vnetLen:]
	ip[0] = 0x45
	ip[2], ip[3] = byte(len(ip)>>8), byte(len(ip))
	ip[9] = proto
	ip[10], ip[11] = 0xba, 0xad
	copy(ip[12:], []byte{224, 0, 0, 0, 127, 0, 0, 1})
	t := ip[20:]
	if proto == unix.IPPROTO_TCP {
		t[12], t[13] = 5<<4, 0x10
	} else {
		t[4], t[5] = byte(len(t)>>8), byte(len(t))
	}
	return b
}
