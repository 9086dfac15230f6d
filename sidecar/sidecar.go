// Package sidecar is the client role for one network namespace: the session to
// a gateway and its reconnection, the TUN device, routes and the kill switch.
package sidecar
