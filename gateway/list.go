package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/quicvpn/quicvpn/tunnel"
)

// ClientInfo is what may be shown of a client.
type ClientInfo struct {
	Client
	// Since is when it was enrolled.
	Since time.Time
}

// ListClients returns the clients of a state directory by their addresses,
// without those that were revoked or removed.
func ListClients(dir string) ([]ClientInfo, error) {
	infos, err := listClients(dir)
	if err != nil {
		return nil, fmt.Errorf("list clients: %w", err)
	}
	return infos, nil
}

func listClients(dir string) ([]ClientInfo, error) {
	if _, _, err := loadFixed(dir); err != nil {
		return nil, err
	}
	var all tokens
	if err := readFile(dir, tokensFile, &all); err != nil {
		return nil, err
	}
	return all.clients(dir)
}

// clients returns those that clients.json has and the tokens let stay.
func (t *tokens) clients(dir string) ([]ClientInfo, error) {
	var file clients
	if err := readFile(dir, clientsFile, &file); err != nil {
		return nil, err
	}
	var infos []ClientInfo
	for _, r := range file.Clients {
		tok := t.find(r.Token)
		if tok == nil || !tok.Revoked.IsZero() || slices.ContainsFunc(t.Removed, r.is) {
			continue
		}
		infos = append(infos, ClientInfo{Since: r.Since, Client: Client{
			ID: tunnel.Fingerprint(r.Key), Name: tok.Name, TokenID: tok.ID, Network: tok.Network, Allow: tok.Allow,
			Addr4: r.Addr4, Addr6: r.Addr6, Block4: r.Block4, Block6: r.Block6,
		}})
	}
	return infos, nil
}

// is reports whether the enrolment was removed.
func (r *clientRecord) is(removed removedRecord) bool {
	return r.Key == removed.Key && r.Since.Equal(removed.Since)
}

// RemoveClient ends the membership of one client, which is named by its key, by
// the first characters of it, or by one of its addresses. A running gateway ends
// its session within half a second, and its addresses are free again. The client
// may come back, as another, by a token that is in force.
func RemoveClient(dir, keyOrAddr string) (ClientInfo, error) {
	info, err := removeClient(dir, keyOrAddr)
	if err != nil {
		return ClientInfo{}, fmt.Errorf("remove client: %w", err)
	}
	return info, nil
}

func removeClient(dir, keyOrAddr string) (info ClientInfo, err error) {
	if _, _, err := loadFixed(dir); err != nil {
		return info, err
	}
	err = changeTokens(dir, func(all *tokens) error {
		infos, err := all.clients(dir)
		if err != nil {
			return err
		}
		if info, err = pickClient(infos, keyOrAddr); err != nil {
			return err
		}
		if err := all.forgetRemoved(dir); err != nil {
			return err
		}
		all.Removed = append(all.Removed, removedRecord{Key: digest(info.ID), Since: info.Since})
		return nil
	})
	return info, err
}

// forgetRemoved leaves out the removed that the gateway has forgotten.
func (t *tokens) forgetRemoved(dir string) error {
	var file clients
	if err := readFile(dir, clientsFile, &file); err != nil {
		return err
	}
	t.Removed = slices.DeleteFunc(t.Removed, func(removed removedRecord) bool {
		return !slices.ContainsFunc(file.Clients, func(r clientRecord) bool { return r.is(removed) })
	})
	return nil
}

func pickClient(infos []ClientInfo, keyOrAddr string) (ClientInfo, error) {
	addr, _ := netip.ParseAddr(keyOrAddr)
	var found []ClientInfo
	for _, i := range infos {
		has := addr.IsValid() && (addr == i.Addr4 || addr == i.Addr6 || i.Block4.Contains(addr) || i.Block6.Contains(addr))
		if has || keyOrAddr != "" && strings.HasPrefix(i.ID.String(), keyOrAddr) {
			found = append(found, i)
		}
	}
	switch len(found) {
	case 0:
		return ClientInfo{}, errors.New("there is no such client: `quicvpn client list` shows those that are")
	case 1:
		return found[0], nil
	}
	return ClientInfo{}, fmt.Errorf("the keys of %d clients begin with %q: give more of the key, or an address", len(found), clip(keyOrAddr))
}
