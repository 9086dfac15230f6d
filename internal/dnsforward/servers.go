package dnsforward

import (
	"cmp"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"sync"
)

// port is that of name servers.
const port = 53

// servers knows the name servers of now.
type servers struct {
	cfg *Config

	mu      sync.Mutex // guards what follows
	file    os.FileInfo
	named   []netip.AddrPort // in that file
	trouble string           // with it, so that it is told once
}

// list returns the name servers, which are not to be changed.
func (s *servers) list() []netip.AddrPort {
	if len(s.cfg.Servers) > 0 {
		return s.cfg.Servers
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	path := cmp.Or(s.cfg.File, "/etc/resolv.conf")
	info, err := os.Stat(path)
	if err == nil && same(info, s.file) {
		return s.named
	}
	text, rerr := os.ReadFile(path)
	if err := errors.Join(err, rerr); err != nil && !errors.Is(err, fs.ErrNotExist) {
		if text := err.Error(); text != s.trouble {
			s.trouble = text
			s.cfg.Log.Warn("the list of name servers cannot be read; the one before is used", "error", err)
		}
		return s.named
	}
	s.file, s.named, s.trouble = info, nil, ""
	for _, server := range parse(string(text)) {
		if s.cfg.Loops(server.Addr()) {
			s.cfg.Log.Warn("a name server is not asked, because clients have addresses there: queries could go round for ever", "server", server, "file", path)
			continue
		}
		s.named = append(s.named, server)
	}
	return s.named
}

func same(a, b os.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// parse reads the name servers of a resolv.conf(5). A file that names none means
// one on this machine.
func parse(conf string) (list []netip.AddrPort) {
	named := false
	for line := range strings.Lines(conf) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		named = true
		a, err := netip.ParseAddr(f[1])
		if server := netip.AddrPortFrom(a, port); err == nil && check(server) == nil {
			list = append(list, server)
		}
	}
	if !named {
		list = append(list, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))
	}
	return list
}
