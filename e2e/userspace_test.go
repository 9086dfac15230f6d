package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

var (
	userEnd     = netip.AddrPortFrom(netlab.GatewayAddr4, 4433)
	noPrivilege = []string{"--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"}
)

// startUserGateway runs the gateway as an ordinary user without capabilities.
func (w *world) startUserGateway(args ...string) {
	w.t.Helper()
	if err := os.Chmod(filepath.Dir(w.dir), 0o711); err != nil {
		w.t.Fatal(err)
	}
	if out, err := exec.Command("chown", "-R", "65534:65534", w.gatewayDir()).CombinedOutput(); err != nil {
		w.t.Fatalf("%v: %s", err, out)
	}
	w.gateway = w.Gateway.Start(w.ctx, "setpriv", slices.Concat(noPrivilege,
		[]string{program, "gateway", "run", "--state-dir", w.gatewayDir()}, args)...)
}

// A gateway without any privilege serves clients by ordinary sockets.
func TestUserspaceEgress(t *testing.T) {
	w := newWorld(t, options{address: userEnd.String()})
	w.Gateway.Sysctl("net.ipv4.ping_group_range", "0 65534")
	before := w.Gateway.Snapshot()
	w.startUserGateway()
	c, d := w.client0(), w.addClient("other")
	c.join(w.token)
	for _, says := range []string{"--egress userspace", "NET_ADMIN"} {
		if err := w.gateway.WaitLog(w.ctx, says); err != nil {
			t.Error(err)
		}
	}
	idle, err := netlab.Descriptors(w.gateway.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	c.checkPages() // TCP
	for i, server := range servers {
		t.Run(fmt.Sprintf("IPv%d", []int{4, 6}[i]), func(t *testing.T) {
			c.checkEcho(t, netip.AddrPortFrom(server, 7))
			if err := c.dialError("tcp", netip.AddrPortFrom(server, 81)); err != syscall.ECONNREFUSED {
				t.Errorf("a closed TCP port: %v", err)
			}
			if err := c.dialError("udp", netip.AddrPortFrom(server, 81)); err != syscall.ECONNREFUSED {
				t.Errorf("a closed UDP port: %v", err)
			}
		})
	}
	// What is refused by packets is refused here.
	for _, to := range []string{"10.0.0.1", "169.254.169.254", "198.51.100.2", "203.0.113.2", "64:ff9b::a00:1", "2002:a00:1::1", "2001:db8:2::2"} {
		a := netip.MustParseAddr(to)
		if a == netlab.GatewayAddr4 || a == netlab.GatewayAddr6 {
			continue // goes beside the tunnel
		}
		if err := c.dialError("tcp", netip.AddrPortFrom(a, 80)); err != syscall.EHOSTUNREACH && err != syscall.EACCES {
			t.Errorf("%s is answered with %v", to, err)
		}
	}
	d.join(w.newUserToken("two", "--network", "two"))
	d.checkPages()
	// Sessions end; their flows follow.
	c.stop()
	d.stop()
	deadline := time.Now().Add(75 * time.Second)
	for {
		now, err := netlab.Descriptors(w.gateway.Process.Pid)
		if err == nil && len(now) <= len(idle) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("descriptors are left: %d, first %d: %v", len(now), len(idle), now)
		}
		time.Sleep(time.Second)
	}
	w.stopRole(w.gateway)
	if diff := before.Diff(w.Gateway.Snapshot()); diff != "" {
		t.Errorf("the gateway's namespace is not as before:\n%s", diff)
	}
}

// Without sockets for pings they are refused, and the log says how to have them;
// --egress=kernel refuses to start.
func TestUserspaceEgressWithoutPings(t *testing.T) {
	w := newWorld(t, options{address: userEnd.String()})
	w.Gateway.Sysctl("net.ipv4.ping_group_range", "1 0")
	w.startUserGateway("--egress", "kernel")
	if err := w.gateway.Wait(); err == nil {
		t.Error("--egress=kernel started without privileges")
	}
	w.startUserGateway("--egress", "userspace")
	c := w.client0()
	c.start(w.token)
	if err := w.gateway.WaitLog(w.ctx, "net.ipv4.ping_group_range"); err != nil {
		t.Error(err)
	}
	if err := c.ns.WaitRoute(w.ctx, netlab.ServerAddr4, "quicvpn0"); err != nil {
		t.Fatal(err)
	}
	c.checkPages()
	ctx, cancel := context.WithTimeout(w.ctx, 2*time.Second)
	defer cancel()
	if err := c.ns.WaitPing(ctx, netlab.ServerAddr4); err == nil {
		t.Error("a ping was answered")
	}
}

// newUserToken creates a token that the gateway's user can read.
func (w *world) newUserToken(name string, args ...string) string {
	w.t.Helper()
	words := slices.Concat(noPrivilege, []string{program, "token", "create", "--state-dir", w.gatewayDir(), "--name", name}, args)
	out, err := w.Gateway.Command(w.ctx, "setpriv", words...).Output()
	if err != nil {
		w.t.Fatal(err)
	}
	return w.save("token-"+name, string(out))
}

// checkEcho sends datagrams of several sizes to a server that sends them back.
func (c *client) checkEcho(t *testing.T, server netip.AddrPort) {
	t.Helper()
	conn, err := c.dial("udp", server)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	for _, n := range []int{1, 100, 1100} {
		want := []byte(strings.Repeat("x", n))
		got := make([]byte, 2000)
		if _, err := conn.Write(want); err != nil {
			t.Fatal(err)
		}
		if n, err := conn.Read(got); err != nil || !bytes.Equal(got[:n], want) {
			t.Errorf("an echo of %d bytes: %d bytes, %v", len(want), n, err)
		}
	}
}

func (c *client) dial(network string, to netip.AddrPort) (conn net.Conn, err error) {
	err = c.ns.Do(func() error {
		ctx, cancel := context.WithTimeout(c.w.ctx, 10*time.Second)
		defer cancel()
		conn, err = new(net.Dialer).DialContext(ctx, network, to.String())
		return err
	})
	return conn, err
}

// dialError returns the error that an app sees, by UDP after it has sent.
func (c *client) dialError(network string, to netip.AddrPort) error {
	conn, err := c.dial(network, to)
	if err == nil {
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err = conn.Write([]byte("x")); err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
	}
	var errno syscall.Errno
	if e, ok := err.(*net.OpError); ok {
		if s, ok := e.Err.(*os.SyscallError); ok {
			errno, _ = s.Err.(syscall.Errno)
		}
	}
	if errno == 0 {
		return err
	}
	return errno
}
