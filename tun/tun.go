// Package tun owns Linux multiqueue TUN devices with offloads: opening and
// re-opening them, reading super-packets whole, and coalescing on write.
//
// It does not configure addresses, routes or namespaces, and does not know
// what becomes of the packets.
package tun
