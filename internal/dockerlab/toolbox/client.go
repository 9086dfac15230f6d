package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

const patience = 5 * time.Second

func get(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("get", flag.ExitOnError)
	iface := flags.String("interface", "", "send from this interface only")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	dialer := &net.Dialer{}
	if *iface != "" {
		dialer.Control = func(_, _ string, c syscall.RawConn) (err error) {
			if cerr := c.Control(func(fd uintptr) { err = syscall.BindToDevice(int(fd), *iface) }); cerr != nil {
				return cerr
			}
			return err
		}
	}
	client := http.Client{Transport: &http.Transport{
		DialContext: dialer.DialContext,
		Proxy:       http.ProxyFromEnvironment,
		// The image has no certificates.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, flags.Arg(0), nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s", flags.Arg(0), resp.Status)
	}
	_, err = io.Copy(os.Stdout, resp.Body)
	return err
}

func echo(ctx context.Context, args []string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, args[0], args[1])
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, args[2]); err != nil {
		return err
	}
	answer := make([]byte, len(args[2]))
	if _, err := io.ReadFull(c, answer); err != nil {
		return err
	}
	fmt.Println(string(answer))
	return nil
}

// chat sends a line each 10 ms on one connection and waits for its echo before
// the next. It prints "connected" once it is.
func chat(ctx context.Context, args []string) error {
	d, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	fmt.Println("connected")
	var result struct {
		Lines int
		Stall time.Duration // the longest time that an echo took
	}
	echoes := bufio.NewReader(c)
	for end := time.Now().Add(d); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		sent := time.Now()
		if err := c.SetDeadline(sent.Add(time.Minute)); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(c, "line", result.Lines); err != nil {
			return fmt.Errorf("after %d lines: %w", result.Lines, err)
		}
		got, err := echoes.ReadString('\n')
		if err != nil {
			return fmt.Errorf("after %d lines: %w", result.Lines, err)
		}
		if want := fmt.Sprintln("line", result.Lines); got != want {
			return fmt.Errorf("echo %q, want %q", got, want)
		}
		result.Lines++
		result.Stall = max(result.Stall, time.Since(sent))
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

func resolve(ctx context.Context, args []string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupHost(ctx, args[0])
	if err != nil {
		return err
	}
	slices.Sort(addrs)
	fmt.Println(strings.Join(addrs, "\n"))
	return nil
}

func ping(_ context.Context, args []string) error {
	to, err := netip.ParseAddr(args[0])
	if err != nil {
		return err
	}
	network, local, protocol := "ip4:icmp", "0.0.0.0", 1
	var request, reply icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	if to.Is6() {
		network, local, protocol = "ip6:ipv6-icmp", "::", 58
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	c, err := icmp.ListenPacket(network, local)
	if err != nil {
		return err
	}
	defer c.Close()
	body := &icmp.Echo{ID: os.Getpid() & 0xffff, Seq: 1, Data: []byte("quicvpn toolbox")}
	packet, err := (&icmp.Message{Type: request, Body: body}).Marshal(nil)
	if err != nil {
		return err
	}
	if _, err := c.WriteTo(packet, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return fmt.Errorf("no answer from %s: %w", to, err)
		}
		m, err := icmp.ParseMessage(protocol, buf[:n])
		if err != nil || m.Type != reply || from.String() != to.String() {
			continue
		}
		if got, ok := m.Body.(*icmp.Echo); ok && got.ID == body.ID {
			return nil
		}
	}
}
