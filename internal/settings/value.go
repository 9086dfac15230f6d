package settings

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Value is a flag that parses itself when it is set, so that every source
// of a setting is judged alike. It implements cli.Generic.
type Value struct {
	set  func(string) error
	text string
}

// Set parses s. Its error says what is wrong and never contains s.
func (v *Value) Set(s string) error {
	if err := v.set(s); err != nil {
		return err
	}
	v.text = s
	return nil
}

// String returns the value as it was set, or the text of the default.
func (v *Value) String() string { return v.text }

// Var returns a Value that parses into p, which holds the default; shown is how
// the help shows it. The error of parse must not contain what it was given.
func Var[T any](p *T, shown string, parse func(string) (T, error)) *Value {
	return &Value{text: shown, set: func(s string) error {
		v, err := parse(s)
		if err != nil {
			return err
		}
		*p = v
		return nil
	}}
}

// Append returns a Value that adds what it is given to the list in p: one item,
// or several with commas between them.
func Append[T any](p *[]T, parse func(string) (T, error)) *Value {
	return &Value{set: func(s string) error {
		var items []T
		for item := range strings.SplitSeq(s, ",") {
			v, err := parse(strings.TrimSpace(item))
			if err != nil {
				return err
			}
			items = append(items, v)
		}
		*p = append(*p, items...)
		return nil
	}}
}

// String parses a text of one line that is not empty.
func String(s string) (string, error) {
	switch {
	case s == "":
		return "", errors.New("it is empty")
	case strings.ContainsAny(s, "\r\n\x00"):
		return "", errors.New("it is more than one line")
	}
	return s, nil
}

// Interface parses a name for a TUN device, as Linux and nftables take it.
func Interface(s string) (string, error) {
	if s == "" || len(s) > 15 || s == "." || s == ".." || s == "lo" || strings.ContainsAny(s, "/:%\"\\ \t\r\n\v\f\x00") {
		return "", errors.New("not a name for a TUN device: take 1 to 15 letters, digits, dots or dashes")
	}
	return s, nil
}

// Int returns a parser for a whole number within bounds. 0 passes too: it stands
// for the default.
func Int(least, most int) func(string) (int, error) {
	return func(s string) (int, error) {
		n, err := strconv.Atoi(s)
		if err != nil || n != 0 && (n < least || n > most) {
			return 0, fmt.Errorf("must be a whole number from %d to %d, or 0 for the default", least, most)
		}
		return n, nil
	}
}

// Duration parses a time span that is not negative.
func Duration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, errors.New("not a time span: write it as 10s, 30m or 24h")
	}
	return d, nil
}

// OneOf returns a parser for a word out of a list.
func OneOf(words ...string) func(string) (string, error) {
	return func(s string) (string, error) {
		for _, w := range words {
			if s == w {
				return s, nil
			}
		}
		return "", fmt.Errorf("must be one of %s", strings.Join(words, ", "))
	}
}

// Named returns a parser for the values out of a list by their names.
func Named[T fmt.Stringer](values ...T) func(string) (T, error) {
	var names []string
	for _, v := range values {
		names = append(names, v.String())
	}
	return func(s string) (none T, err error) {
		if _, err := OneOf(names...)(s); err != nil {
			return none, err
		}
		return values[slices.Index(names, s)], nil
	}
}

// Prefix parses an address prefix without bits beyond its length.
func Prefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, errors.New("not an address prefix: write it as 192.0.2.0/24 or 2001:db8::/32")
	}
	if p.Masked() != p {
		return netip.Prefix{}, errors.New("the address has bits beyond the prefix length: write the first address of the prefix")
	}
	return p, nil
}

// PrefixOf returns a parser for a prefix of IP version 4 or 6 whose length is
// within bounds.
func PrefixOf(version, shortest, longest int) func(string) (netip.Prefix, error) {
	return func(s string) (netip.Prefix, error) {
		p, err := Prefix(s)
		if err == nil && (p.Addr().Is4() != (version == 4) || p.Bits() < shortest || p.Bits() > longest) {
			err = fmt.Errorf("must be an IPv%d prefix from /%d to /%d", version, shortest, longest)
		}
		return p, err
	}
}

// ListenAddr parses an IP address and a UDP port to listen on; without the
// address it is every one.
func ListenAddr(s string) (netip.AddrPort, error) {
	if strings.HasPrefix(s, ":") {
		s = "[::]" + s
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 {
		return netip.AddrPort{}, errors.New("not an IP address and a port: write it as [::]:443, 0.0.0.0:443 or :443")
	}
	return a, nil
}

// NameServer parses the address of a name server, with or without its port.
func NameServer(s string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		var ip netip.Addr
		ip, err = netip.ParseAddr(s)
		a = netip.AddrPortFrom(ip, 53)
	}
	if err != nil || a.Port() == 0 || a.Addr().IsUnspecified() || a.Addr().IsMulticast() {
		return netip.AddrPort{}, errors.New("not the address of a name server: write it as 192.0.2.1, 192.0.2.1:5353, 2001:db8::1 or [2001:db8::1]:5353")
	}
	return a, nil
}
