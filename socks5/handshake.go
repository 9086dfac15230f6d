package socks5

import (
	"bytes"
	"errors"
	"fmt"
	"io"
)

// Methods of authentication (RFC 1928 section 3).
const (
	methodNone     = 0
	methodPassword = 2
	methodNothing  = 0xff // none of those that the client offers
)

// Commands (RFC 1928 section 4).
const (
	commandConnect   = 1
	commandAssociate = 3
)

var (
	// errDenied means that the client was told.
	errDenied    = errors.New("the client has no credentials, or wrong ones")
	errMalformed = errors.New("malformed handshake")
)

// A request is what a client asks for.
type request struct {
	command byte
	to      Addr
}

// negotiate reads what follows the version byte of a greeting, settles who the
// client is and returns its request. Every message is read to its end and no
// further: what the client sends behind the request stays in the connection.
//
// Where no credentials are asked for, those of a client that insists on sending
// some are taken.
func negotiate(rw io.ReadWriter, authenticate func(user, password string) bool) (request, error) {
	offered, err := readField(rw)
	if err != nil {
		return request{}, fmt.Errorf("read the greeting: %w", err)
	}
	method := byte(methodNothing)
	switch {
	case authenticate == nil && bytes.IndexByte(offered, methodNone) >= 0:
		method = methodNone
	case bytes.IndexByte(offered, methodPassword) >= 0:
		method = methodPassword
	}
	if _, err := rw.Write([]byte{version5, method}); err != nil {
		return request{}, err
	}
	switch method {
	case methodNothing:
		return request{}, errDenied
	case methodPassword:
		if err := checkPassword(rw, authenticate); err != nil {
			return request{}, err
		}
	}
	return readRequest(rw)
}

// checkPassword is RFC 1929.
func checkPassword(rw io.ReadWriter, authenticate func(user, password string) bool) error {
	if err := readVersion(rw, 1); err != nil {
		return fmt.Errorf("read credentials: %w", err)
	}
	user, err := readField(rw)
	if err != nil {
		return fmt.Errorf("read credentials: %w", err)
	}
	password, err := readField(rw)
	if err != nil {
		return fmt.Errorf("read credentials: %w", err)
	}
	const version, success, failure = 1, 0, 1
	if authenticate != nil && !authenticate(string(user), string(password)) {
		rw.Write([]byte{version, failure})
		return errDenied
	}
	_, err = rw.Write([]byte{version, success})
	return err
}

// readRequest returns a Reply as its error where the request cannot be met.
func readRequest(r io.Reader) (req request, err error) {
	if err := readVersion(r, version5); err != nil {
		return req, fmt.Errorf("read the request: %w", err)
	}
	var b [2]byte // command, reserved
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return req, fmt.Errorf("read the request: %w", unexpected(err))
	}
	to, err := readAddr(r)
	req = request{command: b[0], to: to}
	switch {
	case errors.Is(err, errName):
		return req, fmt.Errorf("%w: %w", err, HostUnreachable)
	case err != nil:
		return req, fmt.Errorf("read the request: %w", err)
	}
	return req, nil
}

func readVersion(r io.Reader, want byte) error {
	var b [1]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return unexpected(err)
	}
	if b[0] != want {
		return errMalformed
	}
	return nil
}

// readField reads bytes behind a byte that tells how many there are.
func readField(r io.Reader) ([]byte, error) {
	var n [1]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return nil, unexpected(err)
	}
	b := make([]byte, n[0])
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, unexpected(err)
	}
	return b, nil
}

// appendReply appends a reply with the address that this side has.
func appendReply(b []byte, r Reply, bound Addr) []byte {
	return bound.append(append(b, version5, byte(r), 0))
}
