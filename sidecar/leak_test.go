package sidecar

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/quicvpn/quicvpn/internal/netlab"
)

// tryAll makes all attempts, whose errors do not matter.
func (l *lab) tryAll() {
	l.t.Helper()
	for _, a := range attempts() {
		if err := l.Client.Do(func() error {
			_ = a.send(a.name)
			return nil
		}); err != nil {
			l.t.Fatal(err)
		}
	}
}

// TestNothingLeaves makes every attempt in every state of the sidecar.
func TestNothingLeaves(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	// The multicast groups need no router to be sent to.
	sniffer := sniff(t, l.UplinkClientIf)
	l.tryAll()
	var all []string
	for _, a := range attempts() {
		all = append(all, a.name)
	}
	slices.Sort(all)
	if diff := cmp.Diff(all, sniffer.take()); diff != "" {
		t.Fatalf("without a sidecar not every attempt is seen, so that the rest of this test would prove nothing:\n%s", diff)
	}

	ends := netip.AddrPortFrom(netlab.GatewayAddr4, toyPort)
	capture := l.UplinkClientIf.Capture(ends)
	nothing := func(state string) {
		t.Helper()
		l.tryAll()
		if seen := sniffer.take(); len(seen) > 0 {
			t.Errorf("%s: these left: %v\n%s", state, seen, l.dump())
		}
		if leak := capture.Traffic().Leak(); leak != "" {
			t.Errorf("%s: %s", state, leak)
		}
	}
	l.gw.set(func() { l.gw.dead = true })
	cmd := l.command(childSettings{})
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.WaitLog(l.ctx, "the namespace is set up"); err != nil {
		t.Fatal(err)
	}
	nothing("no session yet")
	l.gw.set(func() { l.gw.dead = false })
	if err := cmd.WaitLog(l.ctx, "msg=connected"); err != nil {
		t.Fatal(err)
	}
	nothing("with a session")
	l.gw.set(func() { l.gw.dead = true })
	if err := cmd.WaitLog(l.ctx, "does not answer"); err != nil {
		t.Fatal(err)
	}
	nothing("the gateway is silent")
	cmd.Kill()
	nothing("killed")
	if traffic := capture.Traffic(); traffic.Tunnel == 0 {
		t.Error("the capture saw no packet of the tunnel")
	}
	l.gw.set(func() { l.gw.dead = false })
	cmd = l.start(childSettings{})
	nothing("started again")
	l.ping(toyRemote4)
	l.stop(cmd)
	l.tryAll()
	if diff := cmp.Diff(all, sniffer.take()); diff != "" {
		t.Errorf("stopped: not everything leaves again:\n%s", diff)
	}
}

// TestRefusedAtOnce: programs do not hang on what the kill switch refuses.
func TestRefusedAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	cmd := l.start(childSettings{})
	for to, from := range map[string]string{
		"203.0.113.10:80":     "192.0.2.2",
		"[2001:db8:3::10]:80": "2001:db8:1::2",
		"192.0.2.1:53":        "",
		"[2001:db8:1::1]:53":  "",
	} {
		start := time.Now()
		err := l.Client.Do(func() error {
			d := net.Dialer{Timeout: 10 * time.Second}
			if from != "" {
				d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
			}
			c, err := d.Dial("tcp", to)
			if err == nil {
				c.Close()
			}
			return err
		})
		if err == nil {
			t.Errorf("%s: connected", to)
		}
		if took := time.Since(start); took > 3*time.Second {
			t.Errorf("%s: it took %v to fail with %v", to, took, err)
		}
	}
	l.stop(cmd)
}
