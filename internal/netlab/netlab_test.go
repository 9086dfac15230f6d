package netlab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestNamespaceIsSeparate(t *testing.T) {
	host, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	n := New(t).NS("one")
	if err := n.Do(func() error {
		inside, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		if inside == host {
			return fmt.Errorf("inside and outside are both %s", host)
		}
		ifaces, err := net.Interfaces()
		if err != nil {
			return err
		}
		if len(ifaces) != 1 || ifaces[0].Flags&net.FlagUp == 0 {
			return fmt.Errorf("interfaces %v, want loopback alone, up", ifaces)
		}
		devices, err := filepath.Glob("/sys/class/net/*")
		if err != nil || len(devices) != 1 {
			return fmt.Errorf("/sys/class/net has %v (%v), want one", devices, err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	// No thread of the process stays inside by accident.
	for range 4 * runtime.NumCPU() {
		got, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil || got != host {
			t.Fatalf("after Do a thread is in %s (%v), want %s", got, err, host)
		}
	}
}

func TestDoReturnsWhenTheFunctionExits(t *testing.T) {
	n := New(t).NS("one")
	if err := n.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("no error from a function that did not return")
	}
	want := errors.New("mine")
	if err := n.Do(func() error { return want }); err != want {
		t.Errorf("error %v, want %v", err, want)
	}
}

func TestCloseWaitsForDials(t *testing.T) {
	var client *NS
	dialled := make(chan error)
	err := Main(t.Context(), "lab", func(ctx context.Context, tb TB) {
		client = NewTopology(tb, LinkConfig{}).Client
		go func() {
			_, err := client.DialContext(context.WithoutCancel(ctx), "tcp", "203.0.113.99:80") // nobody answers
			dialled <- err
		}()
		time.Sleep(50 * time.Millisecond)
	})
	if err != nil {
		t.Error(err)
	}
	if err := <-dialled; !errors.Is(err, context.Canceled) && !strings.Contains(err.Error(), "canceled") {
		t.Errorf("the dial ended with %v, want that it was cancelled", err)
	}
	if err := client.Do(func() error { return nil }); !errors.Is(err, net.ErrClosed) {
		t.Errorf("enter a namespace of a closed lab: %v, want ErrClosed", err)
	}
}

func TestSysctlAndMountsStayInside(t *testing.T) {
	ctx := testContext(t)
	l := New(t)
	a, b := l.NS("a"), l.NS("b")
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	a.Sysctl("net.ipv4.ip_forward", "1")
	a.Replace("/etc/hosts", "127.0.0.9 only-here\n")
	a.Hide("/var")
	a.ReadOnly("/proc/sys")
	if err := a.Do(func() error { return writeSysctl("net.ipv4.ip_forward", "1") }); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write to a read-only sysctl: %v, want EROFS", err)
	}
	for _, tt := range []struct {
		ns             *NS
		forward, hosts string
		emptyVar       bool
	}{
		{a, "1\n", "127.0.0.9 only-here\n", true},
		{b, "0\n", string(hosts), false},
	} {
		out, err := tt.ns.Command(ctx, "cat", "/proc/sys/net/ipv4/ip_forward").Output()
		if err != nil || string(out) != tt.forward {
			t.Errorf("%s: forwarding %q (%v), want %q", tt.ns.Name, out, err, tt.forward)
		}
		hosts, err := tt.ns.Command(ctx, "cat", "/etc/hosts").Output()
		if err != nil || string(hosts) != tt.hosts {
			t.Errorf("%s: hosts %q (%v), want %q", tt.ns.Name, hosts, err, tt.hosts)
		}
		list, err := tt.ns.Command(ctx, "ls", "/var").Output()
		if err != nil || (len(list) == 0) != tt.emptyVar {
			t.Errorf("%s: /var has %q (%v), want empty %v", tt.ns.Name, list, err, tt.emptyVar)
		}
	}
}

func TestCommand(t *testing.T) {
	ctx := testContext(t)
	n := New(t).NS("one")

	t.Run("what it prints is kept", func(t *testing.T) {
		c := n.Start(ctx, "sh", "-c", "echo out; echo err >&2; exec sleep 60")
		if err := c.WaitLog(ctx, "err"); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff("out\nerr\n", c.Log()); diff != "" {
			t.Error(diff)
		}
		if err := c.Stop(5 * time.Second); err == nil || !strings.Contains(err.Error(), "terminated") {
			t.Errorf("stop: %v, want the signal", err)
		}
		if err := c.Stop(time.Second); err == nil {
			t.Error("a second stop forgot how the process ended")
		}
		c.Kill()
	})
	t.Run("a stubborn one is killed with its children", func(t *testing.T) {
		c := n.Start(ctx, "sh", "-c", "trap '' TERM; sleep 61 & echo $!; wait; wait; wait")
		if err := c.WaitLog(ctx, "\n"); err != nil {
			t.Fatal(err)
		}
		var child int
		if _, err := fmt.Sscan(c.Log(), &child); err != nil {
			t.Fatal(err)
		}
		if err := c.Stop(50 * time.Millisecond); err == nil || !strings.Contains(err.Error(), "did not end") {
			t.Errorf("stop: %v, want that it did not end", err)
		}
		deadline := time.Now().Add(5 * time.Second)
		for alive(child) {
			if time.Now().After(deadline) {
				t.Fatalf("child %d is still alive", child)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	t.Run("one that ends early is an error of WaitLog", func(t *testing.T) {
		c := n.Start(ctx, "sh", "-c", "echo good reason; exit 3")
		if err := c.WaitLog(ctx, "never"); err == nil || !strings.Contains(err.Error(), "good reason") {
			t.Errorf("error %v, want what the command printed", err)
		}
	})
}

// alive says whether a process runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestNothingOutlivesTheLab(t *testing.T) {
	before, err := Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	err = Main(t.Context(), "lab", func(ctx context.Context, tb TB) {
		top := NewTopology(tb, LinkConfig{})
		top.Internet.ServeHTTP(80)
		top.ClientIf.Capture()
		pid = top.Client.Start(ctx, "sleep", "62").Process.Pid
		tb.Fatalf("failure number %d", 7)
	})
	if err == nil || err.Error() != "failure number 7" {
		t.Errorf("error %v, want failure number 7", err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the command %d is still there (%v)", pid, err)
	}
	after, err := Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("descriptors left (-before +after):\n%s", diff)
	}
}

func TestMainCleansUpAfterPanic(t *testing.T) {
	var dir string
	err := Main(t.Context(), "lab", func(_ context.Context, tb TB) {
		dir = tb.TempDir()
		panic("boom")
	})
	if err == nil || !strings.Contains(err.Error(), "boom") {
		t.Errorf("error %v, want the panic", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the temporary directory is still there: %v", err)
	}
}

func TestTopologyReachesTheInternetInClear(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	top.Internet.ServeHTTP(80)
	top.Internet.ServeHTTPS(443)
	home1 := top.AddHomeClient("home1", netip.MustParsePrefix("192.168.1.0/24"))
	home2 := top.AddHomeClient("home2", netip.MustParsePrefix("192.168.1.0/24"))
	for _, tt := range []struct {
		ns   *NS
		url  string
		seen string
	}{
		{top.Client, "http://203.0.113.10/", "192.0.2.2"},
		{top.Client, "http://[2001:db8:3::10]/", "2001:db8:1::2"},
		{top.Client, "https://203.0.113.10/", "192.0.2.2"},
		{top.Gateway, "http://203.0.113.10/", "203.0.113.2"},
		{top.Gateway, "http://[2001:db8:3::10]/", "2001:db8:3::2"},
		{home1.NS, "http://203.0.113.10/", "192.0.2.18"},
		{home2.NS, "http://203.0.113.10/", "192.0.2.34"},
	} {
		page, err := tt.ns.Get(ctx, tt.url)
		if err != nil || page != Page+tt.seen+"\n" {
			t.Errorf("%s from %s: %q (%v), want to be seen as %s", tt.url, tt.ns.Name, page, err, tt.seen)
		}
	}
	page, err := top.Client.Get(ctx, "https://203.0.113.10/bytes/100000")
	if err != nil || len(page) != 100000 {
		t.Errorf("got %d bytes (%v), want 100000", len(page), err)
	}
	for _, to := range []netip.Addr{ServerAddr4, ServerAddr6, GatewayAddr4, GatewayAddr6} {
		rtts, err := top.Client.Ping(ctx, Ping{To: to, Count: 3, Interval: time.Millisecond, Size: 1000})
		if err != nil || len(rtts) != 3 || rtts[0] <= 0 || rtts[2] > time.Second {
			t.Errorf("ping %s: %v (%v), want three times", to, rtts, err)
		}
	}
}

func TestWaitRoute(t *testing.T) {
	top := NewTopology(t, LinkConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := top.Client.WaitRoute(ctx, ServerAddr6, "eth0"); err != nil {
		t.Error(err)
	}
	for _, iface := range []string{"lo", "none"} {
		if err := top.Client.WaitRoute(ctx, ServerAddr4, iface); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("wait for %s: %v, want the deadline", iface, err)
		}
	}
}

func TestWaitPing(t *testing.T) {
	top := NewTopology(t, LinkConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	top.UplinkGatewayIf.Down()
	back := time.AfterFunc(300*time.Millisecond, func() {
		if err := top.Uplink.Netlink().LinkSetUp(top.UplinkGatewayIf.link()); err != nil {
			t.Error(err)
		}
	})
	defer back.Stop()
	start := time.Now()
	if err := top.Client.WaitPing(ctx, GatewayAddr6); err != nil || time.Since(start) < 250*time.Millisecond {
		t.Errorf("answered after %v (%v), want about 300ms", time.Since(start), err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := top.Client.WaitPing(ctx, netip.MustParseAddr("203.0.113.99")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the deadline", err)
	}
}

func TestLinkDownUpMTUAndRate(t *testing.T) {
	ctx := testContext(t)
	l := New(t)
	a, b := l.NS("a"), l.NS("b")
	ia, ib := l.Link(a, b, LinkConfig{
		A: End{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/30")}},
		B: End{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/30")}},
	})
	b.ServeHTTP(80)
	server := netip.MustParseAddrPort("192.0.2.2:80")
	reach := func(size int) int {
		rtts, err := a.Ping(ctx, Ping{To: server.Addr(), Size: size})
		if err != nil && !errors.Is(err, syscall.ENETUNREACH) {
			t.Fatal(err)
		}
		return len(rtts)
	}
	if got := reach(100); got != 1 {
		t.Errorf("%d answers, want 1", got)
	}
	ib.Down()
	if got := reach(100); got != 0 {
		t.Errorf("%d answers over a link that is down, want 0", got)
	}
	ib.Up()
	if err := a.WaitReady(ctx, server); err != nil {
		t.Error(err)
	}
	ia.SetMTU(1280)
	ib.SetMTU(1280)
	if link, err := a.Netlink().LinkByName("eth0"); err != nil || link.Attrs().MTU != 1280 {
		t.Errorf("MTU %d (%v), want 1280", link.Attrs().MTU, err)
	}

	timed := func() time.Duration {
		start := time.Now()
		if page, err := a.Get(ctx, "http://192.0.2.2/bytes/1000000"); err != nil || len(page) != 1000000 {
			t.Fatalf("got %d bytes (%v)", len(page), err)
		}
		return time.Since(start)
	}
	ib.SetRate(10e6) // 1 MB takes 0.8 s
	if took := timed(); took < 600*time.Millisecond || took > 3*time.Second {
		t.Errorf("1 MB at 10 Mbit/s took %v", took)
	}
	ib.SetRate(0)
	if took := timed(); took > 500*time.Millisecond {
		t.Errorf("1 MB without a limit took %v", took)
	}
}

func TestSetPathMTU(t *testing.T) {
	ctx := testContext(t)
	for _, tt := range []struct {
		up   bool
		to   netip.Addr
		head int // IP and ICMP
	}{
		{true, GatewayAddr4, 28},
		{true, GatewayAddr6, 48},
		{false, netip.MustParseAddr("192.0.2.2"), 28},
		{false, netip.MustParseAddr("2001:db8:1::2"), 48},
	} {
		top := NewTopology(t, LinkConfig{})
		top.SetPathMTU(1400)
		from := top.Gateway
		if tt.up {
			from = top.Client
		}
		answers := func(size, count int) int {
			rtts, err := from.Ping(ctx, Ping{To: tt.to, Size: size - tt.head, Count: count, Interval: 50 * time.Millisecond, Wait: 300 * time.Millisecond})
			if err != nil {
				t.Error(err)
			}
			return len(rtts)
		}
		if got := answers(1400, 1); got != 1 {
			t.Errorf("1400 bytes to %s: %d answers, want 1", tt.to, got)
		}
		if got := answers(1401, 1); got != 0 {
			t.Errorf("1401 bytes to %s: %d answers, want none", tt.to, got)
		}
		// Both kernels learn the size from the ICMP answers, one packet each, and
		// fragment.
		if got := answers(1401, 3); got == 0 {
			t.Errorf("fragments to %s: no answer", tt.to)
		}
	}
}

func TestServeEcho(t *testing.T) {
	ctx := testContext(t)
	top := NewTopology(t, LinkConfig{})
	top.Internet.ServeEcho(7)
	for _, addr := range []netip.Addr{ServerAddr4, ServerAddr6} {
		conn, err := top.Client.DialContext(ctx, "udp", netip.AddrPortFrom(addr, 7).String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		want := strings.Repeat("x", 1200)
		if _, err := conn.Write([]byte(want)); err != nil {
			t.Fatal(err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 2000)
		size, err := conn.Read(buf)
		if err != nil || string(buf[:size]) != want {
			t.Errorf("echo by %s: %d bytes (%v), want %d", addr, size, err, len(want))
		}
	}
}

func TestSnapshotShowsEveryChange(t *testing.T) {
	l := New(t)
	n := l.NS("one")
	l.Link(n, l.NS("other"), LinkConfig{A: End{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}}})
	before := n.Snapshot()
	if diff := before.Diff(n.Snapshot()); diff != "" {
		t.Errorf("nothing changed, but:\n%s", diff)
	}
	ip := func(args string) {
		t.Helper()
		n.read("ip", strings.Fields(args)...)
	}
	for _, tt := range []struct {
		name     string
		do, undo func()
	}{
		{"link", func() { ip("link add d0 type veth") }, func() { ip("link del d0") }},
		{"address", func() { ip("addr add 192.0.2.9/24 dev eth0") }, func() { ip("addr del 192.0.2.9/24 dev eth0") }},
		{"address 6", func() { ip("addr add 2001:db8::9/64 dev eth0 nodad") }, func() { ip("addr del 2001:db8::9/64 dev eth0") }},
		{"route in a table", func() { ip("route add default via 192.0.2.2 table 77") }, func() { ip("route del default table 77") }},
		{"rule", func() { ip("rule add fwmark 7 lookup 77") }, func() { ip("rule del fwmark 7 lookup 77") }},
		{"rule 6", func() { ip("-6 rule add fwmark 7 lookup 77") }, func() { ip("-6 rule del fwmark 7 lookup 77") }},
		{"nftables", func() { n.Nft("table inet x { chain y { accept; }; }") }, func() { n.Nft("delete table inet x") }},
		{"empty table", func() { n.Nft("table ip6 x") }, func() { n.Nft("delete table ip6 x") }},
		{"sysctl", func() { n.Sysctl("net.ipv4.ip_forward", "1") }, func() { n.Sysctl("net.ipv4.ip_forward", "0") }},
		{"sysctl of a link", func() { n.Sysctl("net.ipv6.conf.eth0.forwarding", "1") }, func() { n.Sysctl("net.ipv6.conf.eth0.forwarding", "0") }},
	} {
		tt.do()
		if before.Diff(n.Snapshot()) == "" {
			t.Errorf("%s: no difference", tt.name)
		}
		tt.undo()
		if diff := before.Diff(n.Snapshot()); diff != "" {
			t.Errorf("%s: undone, but:\n%s", tt.name, diff)
		}
	}
}

func TestDescriptors(t *testing.T) {
	before, err := Descriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	after, err := Descriptors(os.Getpid())
	if err != nil || len(after) != len(before)+1 || !slices.Contains(after, path) {
		t.Errorf("descriptors %v (%v), want those before and %s", after, err, path)
	}
	if _, err := Descriptors(1 << 30); err == nil {
		t.Error("no error for a process that is not there")
	}
}
