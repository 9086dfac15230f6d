package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/quicvpn/quicvpn/driver/publish"
	"github.com/quicvpn/quicvpn/internal/durable"
	"github.com/quicvpn/quicvpn/internal/token"
	"github.com/quicvpn/quicvpn/sidecar"
	"github.com/quicvpn/quicvpn/tunnel"
)

// What the driver knows durably is one directory for each network:
//
//	networks/<network ID>/network.json     a record
//	networks/<network ID>/<exit>.key       the key of a session to a gateway
//
// A record is replaced as a whole at every change.

const (
	recordVersion = 1
	recordFile    = "network.json"
)

// A record is a network as it is stored.
type record struct {
	Version int
	ID      string
	// Boot is the boot of the host in which the endpoints were made.
	Boot string

	Internal bool           `json:",omitempty"`
	Subnets  []netip.Prefix `json:",omitempty"` // the engine's IPAM; none with the IPAM driver "null"
	Gateways []netip.Addr   `json:",omitempty"` // the network's own addresses
	IPv6     bool           `json:",omitempty"` // wanted where there are no subnets
	MTU      int            `json:",omitempty"`
	Queues   int            `json:",omitempty"`
	HostDNS  bool           `json:",omitempty"`
	NoDNS    bool           `json:",omitempty"`
	NoProxy  bool           `json:",omitempty"`

	// TCP says how the containers' connections go to the gateway.
	TCP sidecar.TCPMode `json:",omitempty"`

	Exits     []*exitRecord
	Endpoints []*endpointRecord `json:",omitempty"`
}

// An exitRecord is a gateway through which containers of the network leave. The
// first is the network's; containers may have others.
type exitRecord struct {
	Name    string         // of its key
	Token   string         // a secret
	Block   []netip.Prefix `json:",omitempty"` // leased; none before the first session
	Gateway []netip.Addr   `json:",omitempty"` // the gateway's own addresses
	MTU     int            `json:",omitempty"` // what the path carried last
}

// An endpointRecord is a container's place in the network.
type endpointRecord struct {
	ID   string
	Exit string // the exit's name
	// Addrs are the container's own.
	Addrs []netip.Addr
	// Number is the container's in the exit's block.
	Number int
	// Sandbox is the path of the container's network namespace; empty before it
	// has joined.
	Sandbox string         `json:",omitempty"`
	Ports   []publish.Port `json:",omitempty"`
}

// names says which queries for names the gateway answers.
func (r *record) names() tunnel.Names {
	switch {
	case r.NoDNS:
		return tunnel.NamesOff
	case r.HostDNS:
		return tunnel.NamesPrivate
	}
	return tunnel.NamesAll
}

func (r *record) exit(name string) *exitRecord {
	i := slices.IndexFunc(r.Exits, func(e *exitRecord) bool { return e.Name == name })
	if i < 0 {
		return nil
	}
	return r.Exits[i]
}

func (r *record) endpoint(id string) *endpointRecord {
	i := slices.IndexFunc(r.Endpoints, func(e *endpointRecord) bool { return e.ID == id })
	if i < 0 {
		return nil
	}
	return r.Endpoints[i]
}

func (r *record) removeEndpoint(id string) {
	r.Endpoints = slices.DeleteFunc(r.Endpoints, func(e *endpointRecord) bool { return e.ID == id })
}

// addrs are the addresses that stand for a number beyond this host.
func (e *exitRecord) addrs(number int) (list []netip.Addr) {
	for _, p := range e.Block {
		list = append(list, nth(p, number))
	}
	return list
}

// nth returns an address of a prefix of at least 256.
func nth(p netip.Prefix, number int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	b[len(b)-1] += byte(number)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// blockSize is how many numbers a block has: it is a /24 and a /120.
const blockSize = 256

// freeNumber returns a number of the exit's block that no endpoint has: the one
// after the highest that was given last, so that one that was freed is used
// again late.
func (r *record) freeNumber(exit string, after int) (int, error) {
	used := make(map[int]bool)
	for _, e := range r.Endpoints {
		if e.Exit == exit {
			used[e.Number] = true
		}
	}
	// The first and the last look like a network's own and its broadcast address.
	const first, last = 1, blockSize - 2
	for i := range last {
		if n := first + (after+i)%(last-first+1); !used[n] {
			return n, nil
		}
	}
	return 0, fmt.Errorf("the network has %d containers, which is as many as the gateway's block has addresses: create another network", len(used))
}

// check says what makes a record unusable.
func (r *record) check(dir string) error {
	switch {
	case r.Version != recordVersion:
		return fmt.Errorf("it has version %d, and this driver reads version %d: install the release that wrote it", r.Version, recordVersion)
	case r.ID != filepath.Base(dir):
		return fmt.Errorf("it is of network %q", r.ID)
	case len(r.Exits) == 0 != r.Internal:
		return errors.New("it names no gateway, or one of an internal network")
	}
	for _, x := range r.Exits {
		if x == nil {
			return errors.New("it has an empty entry")
		}
		if _, err := token.Parse(x.Token); err != nil {
			return err
		}
		if strings.ContainsAny(x.Name, "/.") || x.Name == "" {
			return fmt.Errorf("exit name %q", x.Name)
		}
		for _, p := range x.Block {
			if !p.IsValid() || p.Addr().BitLen()-p.Bits() != 8 {
				return fmt.Errorf("%v is no block of %d addresses", p, blockSize)
			}
		}
	}
	for _, e := range r.Endpoints {
		if e == nil || r.exit(e.Exit) == nil && !r.Internal {
			return errors.New("an endpoint has no gateway")
		}
		if err := checkID("endpoint", e.ID); err != nil {
			return err
		}
		if e.Number < 0 || e.Number >= blockSize {
			return fmt.Errorf("endpoint %s has the number %d of %d", e.ID, e.Number, blockSize)
		}
	}
	return nil
}

// save stores a record durably.
func (r *record) save(dir string) error {
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return fmt.Errorf("store the network: %w", err)
	}
	if err := durable.Replace(filepath.Join(dir, recordFile), append(b, '\n')); err != nil {
		return fmt.Errorf("store the network: %w", err)
	}
	return nil
}

// loadRecord reads a record. One that cannot be read, or only in part, is an
// error: what it would be replaced with could let traffic out elsewhere.
func loadRecord(dir string) (*record, error) {
	path := filepath.Join(dir, recordFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := new(record)
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	if err = decoder.Decode(r); err == nil {
		err = r.check(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("the state file %s is damaged: %w: restore it from a backup, or remove its directory "+
			"and the network with `docker network rm`, and create the network again", path, err)
	}
	return r, nil
}
