package socks5

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"strings"
)

// Credentials returns an Authenticate function for one user. It takes the same time
// whatever part is wrong, and tells nothing of lengths: hashes are compared.
func Credentials(user, password string) func(user, password string) bool {
	wantUser, wantPassword := sha256.Sum256([]byte(user)), sha256.Sum256([]byte(password))
	return func(user, password string) bool {
		gotUser, gotPassword := sha256.Sum256([]byte(user)), sha256.Sum256([]byte(password))
		return subtle.ConstantTimeCompare(gotUser[:], wantUser[:])&
			subtle.ConstantTimeCompare(gotPassword[:], wantPassword[:]) == 1
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
