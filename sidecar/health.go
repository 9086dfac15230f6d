package sidecar

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// CheckHealth says in one line that the tunnel carries packets, for a sidecar
// with this state directory in this network namespace. Where it does not, the
// error says what is wrong and what to do.
//
// That a session stands is not enough: the gateway must answer a ping that went
// through the TUN device, within the time given. Without a device it must answer a
// request for a connection, as the proxies make them.
func CheckHealth(ctx context.Context, stateDir string, timeout time.Duration) (string, error) {
	s, err := readStatus(stateDir)
	if err != nil {
		return "", err
	}
	since := s.Since.UTC().Format(time.RFC3339)
	if !s.Connected {
		why := s.Trouble
		if why == "" {
			why = "the first attempt has not ended yet; look again in some seconds"
		}
		return "", fmt.Errorf("no tunnel since %s: %s", since, why)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if s.Probe != "" {
		took, err := askProbe(ctx, s.Probe)
		if errors.Is(err, errUnanswered) {
			err = s.dead("the gateway", timeout)
		}
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("the gateway answers the proxies: after %v; network %s, connected since %s",
			took.Round(10*time.Microsecond), s.Network, since), nil
	}
	if len(s.Gateway) == 0 {
		return "", errors.New("the gateway has no address in the network by which it could be asked: run quicvpn's gateway, of the same release")
	}
	type answer struct {
		from netip.Addr
		took time.Duration
		err  error
	}
	answers := make(chan answer, len(s.Gateway))
	for _, a := range s.Gateway {
		go func() {
			took, err := ping(ctx, s.Interface, a)
			answers <- answer{a, took, err}
		}()
	}
	var failed error
	for range s.Gateway {
		a := <-answers
		if a.err == nil {
			return fmt.Sprintf("the gateway answers through %s: %v after %v; network %s, congestion control %s, connected since %s",
				s.Interface, a.from, a.took.Round(10*time.Microsecond), s.Network, s.Congestion, since), nil
		}
		// What is not a timeout says more.
		if failed == nil || errors.Is(failed, errUnanswered) {
			failed = a.err
		}
	}
	if !errors.Is(failed, errUnanswered) {
		return "", failed
	}
	return "", s.dead(strings.Trim(fmt.Sprint(s.Gateway), "[]")+" through "+s.Interface, timeout)
}

// dead is the error about a gateway that does not answer.
func (s status) dead(gateway string, timeout time.Duration) error {
	why := "although the session stands since " + s.Since.UTC().Format(time.RFC3339) + ": see the sidecar's and the gateway's logs; if it stays so, restart the sidecar"
	if s.Trouble != "" {
		why = "and the sidecar tries to connect again: " + s.Trouble
	}
	return fmt.Errorf("the tunnel is dead: no answer from %s within %v, %s", gateway, timeout, why)
}

// errUnanswered is a ping's end without an answer.
var errUnanswered = errors.New("no answer")

var errNoPing = errors.New("to ping, the capability NET_RAW is missing: pass --cap-add NET_RAW, " +
	"or --sysctl net.ipv4.ping_group_range='0 2147483647' (Compose: cap_add, sysctls)")

// pingInterval is after how long the next request is sent: one may be lost.
const pingInterval = 500 * time.Millisecond

// ping asks an address for an echo through an interface, until it answers or ctx
// ends, and returns how long the answer took.
func ping(ctx context.Context, iface string, to netip.Addr) (time.Duration, error) {
	conn, raw, err := openPing(iface, to)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	request, reply, protocol := icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply), unix.IPPROTO_ICMP
	if to.Is6() {
		request, reply, protocol = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply, unix.IPPROTO_ICMPV6
	}
	// By it the answers are known; the ID is the kernel's for ping sockets.
	nonce := rand.Text()
	var sent []time.Time
	buf := make([]byte, 1500)
	for {
		m := icmp.Message{Type: request, Body: &icmp.Echo{ID: os.Getpid() & 0xffff, Seq: len(sent), Data: []byte(nonce)}}
		packet, err := m.Marshal(nil)
		if err != nil {
			return 0, err
		}
		sent = append(sent, time.Now())
		conn.SetDeadline(time.Now().Add(pingInterval))
		if ctx.Err() != nil {
			return 0, errUnanswered
		}
		if _, err := conn.Write(packet); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, fmt.Errorf("ping %v through %s: %w: see the sidecar's log", to, iface, errno(err))
		}
		for {
			n, err := conn.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return 0, fmt.Errorf("ping %v through %s: %w: see the sidecar's log", to, iface, errno(err))
			}
			b := buf[:n]
			if raw && to.Is4() && n > 0 {
				b = b[min(int(b[0]&0xf)*4, n):] // the IP header
			}
			m, err := icmp.ParseMessage(protocol, b)
			if err != nil || m.Type != reply {
				continue
			}
			if e, ok := m.Body.(*icmp.Echo); ok && string(e.Data) == nonce && e.Seq < len(sent) {
				return time.Since(sent[e.Seq]), nil
			}
		}
	}
}

// openPing opens a socket for echo requests to an address that leave by an
// interface: a ping socket, which containers may open as a rule, or else a raw
// one.
func openPing(iface string, to netip.Addr) (conn *os.File, raw bool, err error) {
	family, protocol := unix.AF_INET, unix.IPPROTO_ICMP
	var addr unix.Sockaddr
	if to.Is4() {
		addr = &unix.SockaddrInet4{Addr: to.As4()}
	} else {
		family, protocol = unix.AF_INET6, unix.IPPROTO_ICMPV6
		addr = &unix.SockaddrInet6{Addr: to.As16()}
	}
	const flags = unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|flags, protocol)
	if err != nil {
		raw = true
		fd, err = unix.Socket(family, unix.SOCK_RAW|flags, protocol)
	}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return nil, false, errNoPing
	}
	if err != nil {
		return nil, false, fmt.Errorf("open a socket to ping: %w", err)
	}
	conn = os.NewFile(uintptr(fd), "ping")
	if err := unix.BindToDevice(fd, iface); err != nil {
		conn.Close()
		switch {
		case errors.Is(err, unix.EPERM): // by kernels before 5.7
			return nil, false, errNoPing
		case errors.Is(err, unix.ENODEV):
			return nil, false, fmt.Errorf("there is no interface %s here: the sidecar was killed, or runs in another network namespace: start it again, or run the healthcheck in its container", iface)
		}
		return nil, false, fmt.Errorf("ping through %s: %w", iface, err)
	}
	if err := unix.Connect(fd, addr); err != nil {
		conn.Close()
		return nil, false, fmt.Errorf("ping %v through %s: %w: see the sidecar's log", to, iface, err)
	}
	return conn, raw, nil
}
