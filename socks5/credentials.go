package socks5

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// Credentials returns an Authenticate function for one user. It takes the same time
// whatever part is wrong, and tells nothing of lengths: hashes are compared.
func Credentials(user, password string) func(user, password string) bool {
	return anyOf([]credential{newCredential(user, password)})
}

// ParseCredentials reads users, one "user:password" a line, and returns an
// Authenticate function that lets each of them pass. Empty lines do not count. No
// error repeats what a line says.
func ParseCredentials(text string) (func(user, password string) bool, error) {
	var known []credential
	n := 0
	for line := range strings.SplitSeq(text, "\n") {
		n++
		line = strings.TrimSuffix(line, "\r")
		if line == "" {
			continue
		}
		user, password, _ := strings.Cut(line, ":")
		if user == "" || password == "" {
			return nil, fmt.Errorf("line %d is not USER:PASSWORD", n)
		}
		if len(user) > maxCredential || len(password) > maxCredential {
			return nil, fmt.Errorf("line %d: SOCKS5 carries a user and a password of up to %d bytes each", n, maxCredential)
		}
		known = append(known, newCredential(user, password))
	}
	if known == nil {
		return nil, errors.New("there is no user: write USER:PASSWORD, one user a line")
	}
	return anyOf(known), nil
}

// maxCredential is the length of a user and of a password (RFC 1929 section 2).
const maxCredential = 255

// A credential is the hashes of a user and a password.
type credential struct{ user, password [sha256.Size]byte }

func newCredential(user, password string) credential {
	return credential{sha256.Sum256([]byte(user)), sha256.Sum256([]byte(password))}
}

// anyOf takes as long for the first of those known as for none.
func anyOf(known []credential) func(user, password string) bool {
	return func(user, password string) bool {
		got, passes := newCredential(user, password), 0
		for _, c := range known {
			passes |= subtle.ConstantTimeCompare(got.user[:], c.user[:]) &
				subtle.ConstantTimeCompare(got.password[:], c.password[:])
		}
		return passes == 1
	}
}

// parseBasic reads user and password from a Proxy-Authorization field (RFC 7617).
func parseBasic(field string) (user, password string, ok bool) {
	scheme, encoded, _ := strings.Cut(field, " ")
	if !strings.EqualFold(scheme, "basic") {
		return "", "", false
	}
	b, err := base64.StdEncoding.DecodeString(strings.TrimLeft(encoded, " "))
	if err != nil {
		return "", "", false
	}
	return strings.Cut(string(b), ":")
}
