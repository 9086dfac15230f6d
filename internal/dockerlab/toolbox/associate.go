package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// associate is a client of UDP ASSOCIATE (RFC 1928, section 7).
func associate(ctx context.Context, args []string) error {
	to, err := netip.ParseAddrPort(args[1])
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	relay, err := askAssociate(c)
	if err != nil {
		return fmt.Errorf("ask for an association: %w", err)
	}
	u, err := new(net.Dialer).DialContext(ctx, "udp", relay.String())
	if err != nil {
		return err
	}
	defer u.Close()
	if err := u.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	b := append([]byte{0, 0, 0}, socksAddr(to)...)
	head := len(b)
	b = append(b, make([]byte, size)...)
	rand.Read(b[head:])
	if _, err := u.Write(b); err != nil {
		return err
	}
	got := make([]byte, 1<<16)
	n, err := u.Read(got)
	if err != nil {
		return err
	}
	if !bytes.Equal(got[:n], b) {
		return fmt.Errorf("%d bytes came back for %d, or others", n, len(b))
	}
	return nil
}

// askAssociate returns where the proxy takes datagrams.
func askAssociate(c net.Conn) (relay netip.AddrPort, err error) {
	any := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	if _, err := c.Write(append([]byte{5, 1, 0, 5, 3, 0}, socksAddr(any)...)); err != nil {
		return relay, err
	}
	var b [6]byte // the method, and the reply up to its address
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return relay, err
	}
	if b[1] != 0 || b[3] != 0 {
		return relay, fmt.Errorf("method %d, reply %d", b[1], b[3])
	}
	addr := make([]byte, map[byte]int{1: 4, 4: 16}[b[5]])
	var port [2]byte
	if _, err := io.ReadFull(c, addr); err != nil {
		return relay, err
	}
	if _, err := io.ReadFull(c, port[:]); err != nil {
		return relay, err
	}
	ip, ok := netip.AddrFromSlice(addr)
	if !ok {
		return relay, fmt.Errorf("an address of type %d", b[5])
	}
	return netip.AddrPortFrom(ip, binary.BigEndian.Uint16(port[:])), nil
}

// socksAddr is an address as SOCKS5 writes it.
func socksAddr(a netip.AddrPort) []byte {
	kind := byte(1)
	if a.Addr().Is6() {
		kind = 4
	}
	return binary.BigEndian.AppendUint16(append([]byte{kind}, a.Addr().AsSlice()...), a.Port())
}
